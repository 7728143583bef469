"""Plants faults, one at a time and in pairs, and writes what `kvsim check` names into the page.

    python docs/site/planted_faults.py
    python docs/site/planted_faults.py --check

The measured run is a simulation whose settings or prices are not those that the check is given.
Its steps take 3 % more or less at random, and first tokens reach the client 1 ms later in the mean,
also at random. The table is written between the marks `<!-- planted faults -->` and
`<!-- end of planted faults -->` of `docs/how-to/check.md`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

from kvsim.against.check import check, named
from kvsim.against.matched import Change, Slowed
from kvsim.core.plan import Plan
from kvsim.cost import Cost
from kvsim.run.assembly import Parts, assemble
from kvsim.run.simulation import simulate
from kvsim.settings.config import RunConfig, make_config
from kvsim.workload import open_trace
from kvsim.workload.trace import Trace

PAGE = Path(__file__).resolve().parents[1] / "how-to" / "check.md"
START, END = "<!-- planted faults -->\n", "<!-- end of planted faults -->\n"
NOISE = 0.03
"""Standard deviation of the logarithm of a step's time."""
CLIENT_S = 0.001
"""Mean time that a first token takes to the client."""
BASE: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "rtx-pro-6000-server",
    "vllm_version": "0.19.0",
    "max_model_len": 8192,
    "num_gpu_blocks_override": 34_000,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "sessions": "recorded",
    "num_prompts": 300,
}


class Fault(NamedTuple):
    """What the server has and what the check is told, where they differ."""

    name: str
    """That of the right correction."""
    words: str
    real: Mapping[str, Any] = MappingProxyType({})
    told: Mapping[str, Any] = MappingProxyType({})
    change: Change = Change()
    later_s: float = 0.0


def _setting(name: str, words: str, real: int | str, told: Any = None) -> Fault:
    key = "num_gpu_blocks_override" if name == "blocks" else name
    return Fault(name, words, {key: real}, {} if told is None else {key: told})


FAULTS = (
    _setting("max_num_seqs", "`max_num_seqs` 64 instead of 128", 64),
    _setting("max_num_seqs", "`max_num_seqs` 128 instead of 48", 128, 48),
    _setting("max_num_batched_tokens", "`max_num_batched_tokens` 512 instead of 2,048", 512),
    _setting("max_num_batched_tokens", "`max_num_batched_tokens` 8,192 instead of 2,048", 8192),
    _setting("enable_prefix_caching", "no prefix cache", False),
    _setting("blocks", "4,000 blocks instead of 34,000", 4000),
    _setting("blocks", "5,000 blocks instead of 4,000", 5000, 4000),
    _setting("vllm_version", "vLLM 0.10.2 instead of 0.19.0", "0.10.2"),
    Fault("step_times", "every step x 1.15", change=Change(1.15, 1.15)),
    Fault("prefill", "steps with prompts x 1.3", change=Change(prompts=1.3)),
    Fault("host", "every step 2 ms longer", change=Change(step_ns=2e6)),
    Fault("first_token", "first tokens 50 ms later", later_s=0.05),
)


class Noisy:
    """A cost model whose steps take more or less time at random."""

    def __init__(self, cost: Cost, seed: int) -> None:
        self._cost, self._random = cost, Random(seed)
        self.kind, self.source, self.describe = cost.kind, cost.source, cost.describe

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        return round(self._cost.step_ns(plan) * self._random.lognormvariate(0, NOISE))


def measured(trace: Trace, faults: tuple[Fault, ...], seed: int) -> Trace:
    """The trace with the times of a server that has all these faults."""
    settings = BASE | {"time_scale": 0.8}
    for fault in faults:
        settings |= fault.real
    change = Change(
        **{
            key: max((getattr(fault.change, key) for fault in faults), key=abs)
            for key in Change._fields
        }
    )

    def parts_of(config: RunConfig) -> Parts:
        parts = assemble(config)
        return parts._replace(cost=Noisy(Slowed(parts.cost, change), seed))

    done, random = simulate(trace, make_config(settings), parts_of=parts_of).requests, Random(seed)
    rows = [replace(row) for row in trace.rows]
    for place, index in enumerate(done["index"]):
        sent, first, last = (
            int(done[key][place]) / 1e9 for key in ("arrival_ns", "first_token_ns", "finish_ns")
        )
        later = random.expovariate(1 / CLIENT_S) + sum(fault.later_s for fault in faults)
        rows[index].arrival_ns = round(sent * 1e9)
        rows[index].observed = {"ttft_s": first - sent + later, "e2e_s": last - sent + later}
    return replace(trace, rows=rows[: BASE["num_prompts"]])


ALONE = [(fault,) for fault in FAULTS]
PAIRS = [(fault, FAULTS[place + 4]) for place, fault in enumerate(FAULTS[:6])]


def checked(faults: tuple[Fault, ...], seed: int) -> list[Mapping[str, Any]]:
    """The correction that the check names first, and those that it calls as likely."""
    settings = BASE.copy()
    for fault in faults:
        settings |= fault.told
    return named(check(measured(open_trace("chat"), faults, seed), make_config(settings)))


def right(faults: tuple[Fault, ...], found: list[Mapping[str, Any]]) -> bool:
    """Whether all faults are named first, and nothing else."""
    names = {name for each in found[:1] for name in each["name"].split(" and ")}
    return names == {fault.name for fault in faults}


def line(faults: tuple[Fault, ...], seed: int) -> str:
    """The row of a case."""
    found = checked(faults, seed)
    words = [each["words"] for each in found] or ["nothing"]
    left = f"{100 * found[0]['misfit']:.1f} %" if found else ""
    verdict = "yes" if right(faults, found) else "**no**"
    planted = "; ".join(fault.words for fault in faults)
    return f"| {planted} | {'; or '.join(words)} | {left} | {verdict} |\n"


def written(cases: Sequence[tuple[Fault, ...]]) -> str:
    """The table of these cases."""
    rows = [line(faults, seed) for seed, faults in enumerate(cases)]
    number = sum("| yes |" in row for row in rows)
    head = (
        f"| planted | named | error left | {number} of {len(cases)} |\n| --- | --- | --- | --- |\n"
    )
    return head + "".join(rows)


def main() -> int:
    """Write the page, or compare it; the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    _, after = rest.split(END)
    fresh = f"{before}{START}\n{written(ALONE)}\n{written(PAIRS)}\n{END}{after}"
    if "--check" in sys.argv:
        return int(fresh != text)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
