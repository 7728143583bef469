"""Replays real runs, and writes what each ingredient of a step's time is worth into the page.

    python docs/site/real_runs.py FOLDER        # FOLDER holds the published runs
    python docs/site/real_runs.py FOLDER --check
    python docs/site/real_runs.py FOLDER --public    # only the table of public runs

The tables are written between the marks `<!-- real runs -->` and `<!-- end of real runs -->`, and
those of public runs, of `docs/results/real-runs.md`. Nothing of it depends on the machine.
"""

import json
import sys
from functools import cached_property
from math import expm1
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import public_runs
from msgspec import UNSET
from msgspec.structs import replace

from kvsim.against.fit import fit_run, with_constants
from kvsim.against.matched import FITTED, Matched, errors, matched, measured_seconds
from kvsim.cost.calibrate.llmservingsim import import_profile
from kvsim.cost.profile import Profile, Tail, to_json
from kvsim.cost.table import profile_for
from kvsim.machine.hardware import AllReduce, load_hardware
from kvsim.machine.models import model_of
from kvsim.results.statistics import Floats
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload import open_trace
from kvsim.workload.trace import Trace

PAGE = Path(__file__).resolve().parents[1] / "results" / "real-runs.md"
START, END = "<!-- real runs -->\n", "<!-- end of real runs -->\n"
PUBLIC_START, PUBLIC_END = "<!-- public runs -->\n", "<!-- end of public runs -->\n"
STATED = AllReduce(latency_us=40, bandwidth_gb_s=16)
"""The link as the publisher of the runs states it, from no measured step."""
FIRST = 100
"""Requests that constants are fitted to."""


def worst(errors: dict[str, float]) -> float:
    """The greatest absolute error."""
    return max(map(abs, errors.values()))


def percents(pairs: Matched, rows: np.ndarray) -> dict[str, float]:
    """The errors of some requests, in percent."""
    return {name: 100 * expm1(error) for name, error in errors(pairs, rows).items()}


class Run(NamedTuple):
    """A published run: its folder, files, degree and settings."""

    title: str
    folder: str
    suffix: str
    tp: int
    settings: dict[str, Any]


_V1 = {"engine": "vllm-v1", "max_num_batched_tokens": 2048}
RUNS = (
    Run(
        "RTX 4090, Llama-3.1-8B",
        "rtx4090-llama-3.1-8b",
        "-true-arrivals",
        1,
        _V1 | {"model": "llama-3.1-8b", "hardware": "rtx-4090", "max_num_seqs": 256}
        | {"max_model_len": 32768, "num_gpu_blocks_override": 2588},
    ),
    Run(
        "RTX PRO 6000, Llama-3.1-8B",
        "rtxpro6000-llama-3.1-8b",
        "",
        1,
        _V1 | {"model": "llama-3.1-8b", "hardware": "rtx-pro-6000-server", "max_num_seqs": 128}
        | {"num_gpu_blocks_override": 34_000},
    ),
    Run(
        "2 x RTX PRO 6000, Qwen3-32B",
        "rtxpro6000-qwen3-32b",
        "",
        2,
        _V1 | {"model": "qwen3-32b", "hardware": "rtx-pro-6000-server", "max_num_seqs": 128}
        | {"num_gpu_blocks_override": 25_000, "tensor_parallel_size": 2},
    ),
)  # fmt: skip


class Bench:
    """One run, and its replays."""

    def __init__(self, run: Run, folder: Path) -> None:
        where = folder / run.folder
        self.run, self.trace = run, measured_trace(where, run.suffix)
        made = import_profile(where / "kernels", None, run.tp)
        self.profile = made if run.tp == 1 else with_link(made, STATED)
        self.regressed = made

    def errors(self, profile: Profile, **settings: Any) -> dict[str, float]:
        """Of all twelve statistics, in percent."""
        return percents(self.replay(profile, **settings), self.places)

    def replay(self, profile: Profile, **settings: Any) -> Matched:
        """What was measured, and what a profile predicts."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            path.write_text(to_json(profile), encoding="utf-8")
            return self._replay({**settings, "cost": {"model": "table", "profile": str(path)}})

    @cached_property
    def real(self) -> dict[str, Floats]:
        """What was measured, in seconds."""
        return measured_seconds(self.trace.path, self.trace.rows)

    @cached_property
    def places(self) -> np.ndarray:
        """The requests of which everything was measured."""
        return np.flatnonzero(~np.isnan(sum(self.real[kind] for kind in FITTED)))

    def shipped(self) -> float | None:
        """The greatest error with the shipped profile of the GPU; None: there is none."""
        config = make_config(self.run.settings)
        hardware = load_hardware(config.hardware_name)
        if profile_for(model_of(config), hardware, config) is None:
            return None
        return worst(percents(self._replay({}), self.places))

    def _replay(self, settings: dict[str, Any]) -> Matched:
        return matched(self.trace, simulate(self.trace, {**self.run.settings, **settings}))

    def worst(self, profile: Profile, **settings: Any) -> float:
        return worst(self.errors(profile, **settings))

    @cached_property
    def fitted(self) -> dict[str, Any]:
        """The constants of the first requests, judged on the others."""
        config = make_config(self.run.settings)
        return fit_run(self.profile, self.trace, config, FIRST).fitted


def measured_trace(where: Path, suffix: str = "") -> Trace:
    """The requests of a run, with their measured times."""
    lines = (where / f"measured{suffix}.jsonl").read_text(encoding="utf-8").splitlines()
    times = {line["id"]: line for line in map(json.loads, lines)}
    trace = open_trace(str(where / f"trace{suffix}.jsonl"))
    for row in trace.rows:
        row.observed = {key: times[row.id][key] for key in ("queue_s", "ttft_s", "e2e_s")}
    return trace


def with_link(profile: Profile, link: AllReduce | None) -> Profile:
    """`profile` with these all-reduces; None: with none at all."""
    return replace(profile, fit=replace(profile.fit, all_reduce=link or UNSET))


def with_tail(profile: Profile, used: bool) -> Profile:
    """`profile` with uneven batches priced, or not."""
    tail = profile.fit.tail
    assert isinstance(tail, Tail)
    return replace(profile, fit=replace(profile.fit, tail=replace(tail, used=used)))


def ingredients(bench: Bench) -> dict[str, float | None]:
    """The greatest of the twelve errors, with one thing changed at a time."""
    made, several = bench.profile, bench.run.tp > 1
    blocks = bench.run.settings["num_gpu_blocks_override"]
    return {
        "**imported tables, nothing fitted**": bench.worst(made),
        "the shipped profile of the GPU": bench.shipped(),
        "uneven batches priced": bench.worst(with_tail(made, True)),
        "uneven batches not priced": bench.worst(with_tail(made, False)),
        "no all-reduce": bench.worst(with_link(made, None)) if several else None,
        "all-reduces regressed on this run": bench.worst(bench.regressed) if several else None,
        "linear layers x 0.97": bench.worst(with_constants(made, {"linear_factor": 0.97})),
        "linear layers x 0.97, uneven batches priced": bench.worst(
            with_tail(with_constants(made, {"linear_factor": 0.97}), True)
        ),
        "0.3 ms of the host a step": bench.worst(with_constants(made, {"step_us": 300})),
        "5 ms of the host a step with prompts": bench.worst(
            with_constants(made, {"prompt_step_us": 5000})
        ),
        "without prefix cache": bench.worst(made, enable_prefix_caching=False),
        "5 % fewer blocks": bench.worst(made, num_gpu_blocks_override=round(blocks * 0.95)),
        "not asynchronous": bench.worst(made, async_scheduling=False),
    }


def regions(bench: Bench) -> list[list[str]]:
    """Errors of means, nothing fitted, of a third of the requests each: by how many were in flight
    when they came."""
    pairs, places = bench.replay(bench.profile), bench.places
    came = np.array([(bench.trace.rows[place].arrival_ns or 0) / 1e9 for place in places])
    over = came + bench.real["e2el"][places]
    flight = ((came <= came[:, None]) & (over > came[:, None])).sum(axis=1) - 1
    rows = []
    for part in np.array_split(np.argsort(flight, kind="stable"), 3):
        found = percents(pairs, places[part])
        means = [f"{found[f'{kind}_mean']:+.2f}" for kind in FITTED]
        span = f"{flight[part].min()} to {flight[part].max()}"
        rows.append([bench.run.title, span, str(len(part)), *means])
    return rows


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written(benches: list[Bench]) -> str:
    """The tables."""
    titles = [bench.run.title for bench in benches]
    columns = [ingredients(bench) for bench in benches]
    first = table(
        ["greatest of twelve errors, %", *titles],
        [
            [name, *("" if (each := c[name]) is None else f"{each:.2f}" for c in columns)]
            for name in columns[0]
        ],
    )
    fits = [bench.fitted for bench in benches]
    names = list(fits[0]["error_percent"])
    second = table(
        [f"on the requests after the first {FIRST}", *titles],
        [
            ["constants", *(_constants(found) for found in fits)],
            [
                "greatest error before, %",
                *(f"{worst(f['error_percent_before']):.2f}" for f in fits),
            ],
            ["**greatest error after, %**", *(f"{worst(f['error_percent']):.2f}" for f in fits)],
            *([name, *(f"{f['error_percent'][name]:+.2f}" for f in fits)] for name in names),
        ],
    )
    head = ["errors of means, nothing fitted, %", "in flight", "requests", "TTFT", "TPOT", "E2EL"]
    third = table(head, [row for bench in benches for row in regions(bench)])
    return f"{first}\n{third}\n{second}"


def _constants(found: dict[str, Any]) -> str:
    values = [f"`{name}` {value:g}" for name, value in found["constants"].items()]
    if found["uneven_batches"]:
        values.append("uneven batches priced")
    if found["start_s"]:
        values.append(f"first step {1000 * found['start_s']:.0f} ms late")
    return ", ".join(values) or "none: the run shows none"


def replaced(text: str, start: str, end: str, between: str) -> str:
    """The page with what is between two marks replaced."""
    before, rest = text.split(start)
    _, after = rest.split(end)
    return f"{before}{start}\n{between}\n{end}{after}"


def main() -> int:
    """Write the page, or compare it; the exit code."""
    text, folder = PAGE.read_text(encoding="utf-8"), Path(sys.argv[1])
    public = public_runs.written(folder / "public")
    fresh = replaced(text, PUBLIC_START, PUBLIC_END, public)
    if "--public" not in sys.argv:
        benches = [Bench(run, folder) for run in RUNS]
        fresh = replaced(fresh, START, END, written(benches))
    if "--check" in sys.argv:
        return int(fresh != text)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
