"""The speculative decoding that the settings of a run ask for: who drafts, and what is accepted.

`speculative_config` takes the keys of vLLM 0.33.0 (`config/speculative.py`) that matter here, and
those that say what no simulation knows: how many drafts the model accepts, and how long drafting
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvsim.core.plan import Plan
from kvsim.core.records import DraftLog
from kvsim.cost import Cost, make_cost
from kvsim.cost.estimates import DraftedCost, Fixed, Passes
from kvsim.cost.explain import Explains
from kvsim.engines import Engine
from kvsim.engines.vllm_v1.drafts import METHODS, Drafts, Rates, Recorded, Speculation, Verifier
from kvsim.errors import ConfigError
from kvsim.machine.hardware import GIB, Hardware
from kvsim.machine.memory import drafter_of, drafting_method, kv_dtype, tables_of
from kvsim.machine.models import Model, load_model
from kvsim.run.checks import check_features
from kvsim.settings.config import Positive, RunConfig
from kvsim.settings.library import build, convert, look_up
from kvsim.workload.trace import Row

KEY = "speculative_config"

_SPELLINGS = {"eagle3": "eagle", "mtp": "eagle", "ngram_gpu": "ngram"}
"""Methods that ask the same of the scheduler (`METHODS`)."""

_WITHOUT_EFFECT = (
    *("rejection_sample_method", "draft_sample_method", "prompt_lookup_max", "prompt_lookup_min"),
    *("draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "kv_cache_dtype"),
    *("max_model_len", "enforce_eager", "moe_backend", "attention_backend", "draft_load_config"),
    *("revision", "code_revision", "disable_padded_drafter_batch", "use_local_argmax_reduction"),
    "draft_lm_head_quantization",
)
"""Keys of vLLM that change nothing here."""


class Speculative(NamedTuple):
    """The parts of speculative decoding in a run."""

    proposer: Speculation
    verifier: Verifier
    drafter: str
    """Where the time of the drafter comes from."""
    log: DraftLog
    notes: tuple[str, ...]
    """What a reader of the result should know."""

    def parts(self) -> dict[str, Any]:
        """The arguments of a scheduler."""
        return {"speculation": self.proposer, "draft_log": self.log}

    def blocks(self) -> dict[str, Any]:
        """The arguments of a block manager."""
        proposer = self.proposer
        return {
            "eagle_drop": proposer.eagle_drop,
            "lookahead_keys": proposer.lookahead_keys,
            "num_spec_tokens": proposer.num_spec_tokens,
        }

    def priced(self, cost: Cost) -> DraftedCost:
        """The cost model with the time of the drafter."""
        return DraftedCost(cost, self.drafter)

    def learn(self, rows: Sequence[Row]) -> None:
        """Takes over what a trace says of accepted drafts, where the settings say nothing.

        Raises `ConfigError` where the trace does not say it either.
        """
        if not isinstance(self.verifier, Recorded):
            return
        silent = next((row for row in rows if not row.accepted_drafts), None)
        if silent is not None:
            raise ConfigError(
                f"{KEY}: nothing says how many drafts are accepted (request {silent.id} has no"
                " accepted_drafts in the trace); give acceptance_rate or"
                " synthetic_acceptance_rates"
            )
        self.verifier.learn([row.accepted_drafts for row in rows])


def speculates(config: RunConfig, engine: Engine) -> bool:
    """Whether there is speculative decoding. Raises `ConfigError` where the engine has none."""
    if not config.speculative_config:
        return False
    check_features(KEY, config, engine, "has no speculative decoding")
    return True


def draws_acceptance(config: RunConfig) -> bool:
    """Whether the seed decides which drafts are accepted, and not the trace."""
    return not config.speculative_config.keys().isdisjoint(_ACCEPTANCE)


def speculation_of(
    config: RunConfig, model: Model, hardware: Hardware, cost: Cost, connector: bool
) -> Speculative:
    """The speculative decoding that `speculative_config` asks for. Raises `ConfigError`."""
    given = {k: v for k, v in config.speculative_config.items() if k not in _WITHOUT_EFFECT}
    asked = convert(given, _Asked, KEY)
    method, tokens = drafting_method(given), asked.num_speculative_tokens
    if method is None:
        raise ConfigError(f"{KEY}: give a method ({', '.join((*METHODS, *_SPELLINGS))}) or a model")
    verifier = _verifier(asked, config.seed)
    drafter, words = _drafter(asked, method, config, model, hardware, cost)
    proposer: Speculation = build(
        f"{KEY}: method",
        look_up(f"{KEY}: method", dict.fromkeys((*METHODS, *_SPELLINGS), Drafts), method),
        {},
        method=_SPELLINGS.get(method, method),
        num_spec_tokens=tokens,
        verifier=verifier,
        drafter=drafter,
        connector=connector,
        disable_eagle_block_drop=asked.disable_eagle_block_drop,
        disable_lookahead_block_hashes=asked.disable_lookahead_block_hashes,
    )
    notes = [
        f"{KEY}: {method} makes {tokens} drafts a step; time of the drafter: {words}. Verifying is"
        " ESTIMATED: attention reads the context once for all drafts of a request"
    ]
    if not method.startswith("ngram"):
        notes.append(f"{KEY}: {_memory(method, model, config)}")
    threshold = config.long_prefill_token_threshold or 0
    if 0 < threshold <= tokens:
        notes.append(
            f"long_prefill_token_threshold: {threshold} is below 1 + {tokens} drafts; vLLM ends"
            " with an assertion when it pads an admission to that many tokens"
        )
    return Speculative(proposer, verifier, words, DraftLog(), tuple(notes))


_Share = Annotated[float, Meta(ge=0, le=1)]


class _Asked(Struct, frozen=True, kw_only=True):
    """The keys of `speculative_config`."""

    num_speculative_tokens: Positive
    method: str | None = None
    model: str | None = None
    acceptance: str | None = None
    acceptance_rate: _Share | None = None
    acceptance_distribution: list[_Share] | None = None
    synthetic_acceptance_rates: list[_Share] | None = None
    synthetic_acceptance_length: float | None = None
    drafter_us: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False


_ACCEPTANCE = (
    "acceptance",
    "acceptance_rate",
    "acceptance_distribution",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
)


def _verifier(asked: _Asked, seed: int) -> Verifier:
    """Who knows what is accepted; without a key that says it, the trace."""
    named = [key for key in _ACCEPTANCE if getattr(asked, key) is not None]
    if len(named) > 1:
        raise ConfigError(f"{KEY}: {named[0]} and {named[1]} are both given; keep one")
    if asked.acceptance is not None:
        where = f"{KEY}: acceptance"
        given = {"seed": seed, "num_spec_tokens": asked.num_speculative_tokens}
        made: Verifier = build(where, look_up(where, {}, asked.acceptance), {}, **given)
        return made
    rates = _rates(asked)
    return Recorded() if rates is None else Rates(rates, seed)


def _rates(asked: _Asked) -> list[float] | None:
    """The probability that the first draft is accepted, the first two are, ...; None: unsaid."""
    most = asked.num_speculative_tokens
    if asked.acceptance_rate is not None:
        # Draft `place` counts only if all before it were accepted.
        return [asked.acceptance_rate**place for place in range(1, most + 1)]
    if asked.synthetic_acceptance_length is not None:
        further = asked.synthetic_acceptance_length - 1
        if not 0 <= further <= most:
            raise ConfigError(
                f"{KEY}: synthetic_acceptance_length: {1 + further:g} is not in 1 .. {1 + most}"
            )
        # Whole drafts always, a further one with the rest as its probability: their mean is the
        # length.
        return [min(max(further - place, 0.0), 1.0) for place in range(most)]
    if asked.acceptance_distribution is not None:
        shares = asked.acceptance_distribution
        if len(shares) != most + 1 or abs(sum(shares) - 1) > 1e-6:
            raise ConfigError(
                f"{KEY}: acceptance_distribution: give {most + 1} shares that add up to 1, of steps"
                f" that accept 0 to {most} drafts"
            )
        # Added up from the end, without the share of 0: so many drafts or more.
        return [*accumulate(shares[:0:-1])][::-1]
    rates = asked.synthetic_acceptance_rates
    if rates is not None and (len(rates) != most or sorted(rates, reverse=True) != rates):
        raise ConfigError(
            f"{KEY}: synthetic_acceptance_rates: give {most} rates, none above the one before it"
        )
    return rates


def _memory(method: str, model: Model, config: RunConfig) -> str:
    """What is counted of a drafter's memory, in words."""
    given = {**config.speculative_config, "method": method}
    shard, dtype = model.shard(config.tensor_parallel_size), kv_dtype(model, config)
    weights, token = drafter_of(shard, given, config.dtype, dtype)
    if not weights:
        uncounted = "weights and KV of the drafter are"
    elif method == "draft_model" and tables_of(model, config):
        uncounted = "the KV of the drafter is"
    else:
        estimate = "" if method == "draft_model" else ", ESTIMATED"
        return (
            f"memory of the drafter on each GPU{estimate}: {weights / GIB:.2f} GiB of weights,"
            f" {token} bytes of KV a token"
        )
    return (
        f"{uncounted} not part of the memory budget; --num-gpu-blocks-override sets the pool of a"
        " real engine"
    )


def _drafter(
    asked: _Asked, method: str, config: RunConfig, model: Model, hardware: Hardware, cost: Cost
) -> tuple[Callable[[Plan], int] | None, str]:
    """What prices the drafts of a step, and where that comes from; None: they take no time."""
    passes, share = asked.num_speculative_tokens, 1.0
    if asked.drafter_us is not None:
        return Fixed(asked.drafter_us), f"{asked.drafter_us:g} us a step, as set"
    if method in ("ngram", "ngram_gpu"):
        return None, "none (looking n-grams up takes no time here)"
    if method == "draft_model":
        if asked.model is None:
            raise ConfigError(f"{KEY}: model: give the name of the draft model")
        drafting = load_model(asked.model)
        cost = make_cost(msgspec.structs.replace(config, model=asked.model), drafting, hardware)
        words = f"ESTIMATED: {passes} passes of {drafting.name}, {cost.source}"
    elif method == "dflash":
        passes, share = 1, 1 / model.num_hidden_layers
        words = "ESTIMATED: a pass of one layer of the model and its logits"
    elif method in ("eagle", "eagle3", "mtp"):
        share = 1 / model.num_hidden_layers
        words = f"ESTIMATED: {passes} passes of one layer of the model and its logits"
    else:
        return None, "none (give drafter_us)"
    if not isinstance(cost, Explains):
        raise ConfigError(
            f"{KEY}: the cost model does not explain its prices, so the drafter has none; give"
            " drafter_us, the microseconds that drafting adds to a step"
        )
    return Passes(cost, share, passes), words
