"""Rules of prefix sharing in which engines differ: from when, at what gain, and up to where.

| rule | vLLM 0.6.3 | vLLM V1 | nano-vllm | nano-vllm of August 2025 |
|---|---|---|---|---|
| `publish_at` | `allocation` | `allocation` | `computed` | `allocation` |
| `hits_save` | `computation` | `admission` | `admission` | `charge` |
| `full_hit` | `last-block` | `last-block` | `last-block` | `nothing` |

vLLM 0.3.3 shares only what clients declare: its blocks at once, its computation once `computed`.

Each block manager has its engine's rules as defaults; others are for research. What is not among
them stays the manager's own: vLLM 0.6.3 merges equal blocks, takes the last block of a full hit as
its own although it computes it again, and lets nobody skip what is computed in the same step.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvsim.engine.named import find_rule
from kvsim.errors import ConfigError

T = TypeVar("T", bound=tuple[Any, ...])


class PublishAt(NamedTuple):
    """From when on a full block can be shared with other requests."""

    about: str
    computed: bool
    """Not before the step that computes it is over."""


class HitsSave(NamedTuple):
    """What prefix hits are discounted from when a waiting request is admitted."""

    about: str
    blocks: bool
    """From the blocks that the admission needs; only those in use, idle ones leave the pool."""
    tested: bool
    """From the tokens that must fit the rest of the token budget, where prompts are not cut."""
    charged: bool
    """From the tokens charged to the budget; then hits take no part of a chunk either."""


class FullHit(NamedTuple):
    """What is computed of a prompt of whole blocks that are all there."""

    about: str
    withheld: int
    """Tokens at the end of a sequence that are not looked up, nor the block they are in."""
    least: int
    """Tokens of a chunk that are computed whatever is hit."""


PUBLISH_AT: dict[str, PublishAt] = {
    "allocation": PublishAt(
        "as soon as its tokens are known (vLLM 0.6.3, V1, nano-vllm of August 2025)",
        computed=False,
    ),
    "computed": PublishAt("once the step that computes it is over (nano-vllm)", computed=True),
}
"""Names of the argument `publish_at` of managers with a prefix cache."""

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
"""Names of the argument `hits_save` of managers with a prefix cache."""

FULL_HITS: dict[str, FullHit] = {
    "last-block": FullHit(
        "the last block is computed again (vLLM 0.6.3, V1, nano-vllm)", withheld=1, least=1
    ),
    "last-token": FullHit(
        "the last token is computed again, into the block that was hit", withheld=0, least=1
    ),
    "nothing": FullHit("a prefill of no tokens (nano-vllm of August 2025)", withheld=0, least=0),
}
"""Names of the argument `full_hit` of managers with a prefix cache."""


def _made(kind: type[T], argument: str, table: dict[str, T], name: str | T, /, **given: Any) -> T:
    """The rule that `name` stands for: of `table`, or `package.module:name`, a `kind` or a class
    that makes one of `given`. Raises `ConfigError`."""

    def guard(label: str, found: Any) -> Any:
        if not isinstance(found, kind):
            raise ConfigError(f"{label} is no {kind.__name__}; make it one of {kind.__module__}")
        from kvsim.library import checked

        if any(isinstance(value, int) and value < 0 for value in found):
            raise ConfigError(f"{label}: numbers of tokens are at least 0")
        return checked(label, tuple(found), kind)

    made: T = find_rule(argument, table, name, guard, **given)
    return made


make_publish_at = partial(_made, PublishAt, "publish_at", PUBLISH_AT)
make_hits_save = partial(_made, HitsSave, "hits_save", HITS_SAVE)
make_full_hit = partial(_made, FullHit, "full_hit", FULL_HITS)
"""The rules that names stand for."""
