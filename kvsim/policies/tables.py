"""Rules of block tables in which engines differ: when blocks are shared, what hits save and how far
they reach, and when one more token counts as needing a free block.

| rule | vLLM 0.6.3 | vLLM V1 | nano-vllm | nano-vllm of August 2025 |
|---|---|---|---|---|
| `publish_at` | `allocation` | `allocation` | `computed` | `allocation` |
| `hits_save` | `computation` | `admission` | `admission` | `charge` |
| `full_hit` | `last-block` | `last-block` | `last-block` | `nothing` |

vLLM 0.3.3 shares only what clients declare: its blocks at once, its computation once `computed`.

Each block manager defaults to the rules of its engine; the other values are for research. Some
rules cannot be changed: vLLM V1 has all of its own built in, and vLLM 0.6.3 merges equal blocks,
owns the last block of a full hit although it computes it again, and lets no request skip what is
computed in the same step.

Under the growth `one-each`, a request can be preempted although its last block still has room. In
recorded runs of vLLM 0.6.3, most victims were preempted this way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvsim.core.request import Request
from kvsim.errors import ConfigError
from kvsim.policies.named import callable_with, find_rule

T = TypeVar("T", bound=tuple[Any, ...])

Growth = Callable[[Request, int, Any], int]
"""A rule that returns the number of free blocks that the next tokens of a sequence count as
needing. Its arguments are the sequence, the block size in tokens, and the pool of its table."""


class PublishAt(NamedTuple):
    """When a full block becomes available to other requests."""

    about: str
    computed: bool
    """Whether it becomes available only after the step that computes it."""


class HitsSave(NamedTuple):
    """What prefix hits save when a waiting request is admitted."""

    about: str
    blocks: bool
    """Whether hits reduce the blocks that the admission needs. Only blocks in use count, because
    idle ones leave the pool."""
    tested: bool
    """Whether hits reduce the tokens that must fit the rest of the token budget, where prompts are
    not split."""
    charged: bool
    """Whether hits reduce the tokens charged to the budget. If so, hits take up no part of a chunk
    either."""


class FullHit(NamedTuple):
    """What is still computed of a prompt of whole blocks that are all cached."""

    about: str
    withheld: int
    """Number of tokens at the end of a sequence that are not looked up. The block that holds them
    is not looked up either."""
    least: int
    """Least number of tokens of a chunk that are computed, whatever is hit."""


PUBLISH_AT: dict[str, PublishAt] = {
    "allocation": PublishAt(
        "as soon as its tokens are known (vLLM 0.6.3, V1, nano-vllm of August 2025)",
        computed=False,
    ),
    "computed": PublishAt("once the step that computes it is over (nano-vllm)", computed=True),
}
"""Values of the argument `publish_at` of managers with a prefix cache."""

HITS_SAVE: dict[str, HitsSave] = {
    "computation": HitsSave(
        "computation only: token budget and blocks are asked for in full (vLLM 0.6.3)",
        blocks=False,
        tested=False,
        charged=False,
    ),
    "charge": HitsSave(
        "computation and the charge to the token budget; what must fit is the whole length"
        " (nano-vllm of August 2025)",
        blocks=False,
        tested=False,
        charged=True,
    ),
    "admission": HitsSave(
        "computation, token budget, and the blocks that are in use (vLLM V1, nano-vllm)",
        blocks=True,
        tested=True,
        charged=True,
    ),
}
"""Values of the argument `hits_save` of managers with a prefix cache."""

FULL_HITS: dict[str, FullHit] = {
    "last-block": FullHit(
        "the last block is computed again (vLLM 0.6.3, V1, nano-vllm)", withheld=1, least=1
    ),
    "last-token": FullHit(
        "the last token is computed again, into the block that was hit", withheld=0, least=1
    ),
    "nothing": FullHit("a prefill of no tokens (nano-vllm of August 2025)", withheld=0, least=0),
}
"""Values of the argument `full_hit` of managers with a prefix cache."""


def _made(kind: type[T], argument: str, table: dict[str, T], name: str | T, /, **given: Any) -> T:
    """Returns the rule called `name`: a key of `table`, or `package.module:name` of a `kind` or of
    a class that makes one from `given`. Raises `ConfigError`."""

    def guard(label: str, found: Any) -> Any:
        if not isinstance(found, kind):
            raise ConfigError(f"{label} is not a {kind.__name__} of {kind.__module__}; make it one")
        from kvsim.settings.library import checked

        if any(isinstance(value, int) and value < 0 for value in found):
            raise ConfigError(f"{label}: a number of tokens is below 0; use 0 or more")
        return checked(label, tuple(found), kind)

    made: T = find_rule(argument, table, name, guard, **given)
    return made


make_publish_at = partial(_made, PublishAt, "publish_at", PUBLISH_AT)
make_hits_save = partial(_made, HitsSave, "hits_save", HITS_SAVE)
make_full_hit = partial(_made, FullHit, "full_hit", FULL_HITS)
"""These functions return the rule of each kind by its name."""


def one_each(sequence: Request, block_size: int, pool: Any) -> int:
    """Counts one free block for every running sequence, even if its last block has room.

    The engine counts the block that is written to (vLLM 0.6.3.post1 `core/block_manager.py:202`,
    `core/block/block_table.py`, `get_num_blocks_touched_by_append_slots`).
    """
    missing = sequence.length - sequence.filled
    if missing == 1:
        return 1
    # Tokens behind the room of the last block. If none is missing, a full last block needs 0,
    # another 1.
    beyond = missing - (block_size - sequence.filled % block_size)
    return 1 - (-beyond // block_size)


def when_needed(sequence: Request, block_size: int, pool: Any) -> int:
    """Counts the blocks that the new tokens open, plus one if a shared block must be copied first.

    vLLM V1 (`v1/core/kv_cache_manager.py`, `allocate_slots`) and nano-vllm ask this way.
    """
    table = sequence.table
    need = max(0, -(-sequence.length // block_size) - len(table))
    place = sequence.filled // block_size
    if sequence.filled < sequence.length and place < len(table):
        need += pool.refs(table[place]) > 1
    return need


GROWTH: dict[str, Growth] = {"one-each": one_each, "when-needed": when_needed}
"""Values of the block managers' argument `growth`."""


def make_growth(name: str | Growth, /, **given: Any) -> Growth:
    """Returns the rule called `name`: a key of `GROWTH`, or `package.module:name` of a function or
    of a class whose instances are called. `given` holds the arguments that its constructor may
    name.

    Raises `ConfigError` for an unknown rule, and during the run if a user's rule returns something
    other than a number of blocks.
    """
    growth: Growth = find_rule("growth", GROWTH, name, _guarded, **given)
    return growth


def _guarded(label: str, growth: Growth) -> Growth:
    """Wraps a user's rule and checks the numbers that it returns."""
    callable_with(label, growth, "sequence", "block_size", "pool")

    def need(sequence: Request, block_size: int, pool: Any) -> int:
        blocks = growth(sequence, block_size, pool)
        if type(blocks) is not int or blocks < 0:
            raise ConfigError(
                f"{label} returned {blocks!r}; return a whole number of blocks, 0 or more"
            )
        return blocks

    return need
