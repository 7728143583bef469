"""Runs the agent lab's study and fills the tables of `docs/results/agents.md`.

    nice -n 10 python docs/site/agents.py --weka FOLDER_OF_SESSIONS

Each run is a line of `docs/results/agents/runs.jsonl`; it goes on where it stopped. Without the
folder, WEKA's runs are left as they are. `--page` only fills the page from the runs that are there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "agents"
sys.path.insert(0, str(EXAMPLES))
RUNS = ROOT / "docs" / "results" / "agents" / "runs.jsonl"
PAGE = ROOT / "docs" / "results" / "agents.md"
SEEDS = (0, 1, 2)
PRESSURES = (0.5, 1, 2, 5)
REQUESTS = {"agentx": 300, "weka": 400, "agents": 500}
AGENTX_PER_S = 0.01
"""Sessions that begin."""
LONGEST = 200_000
"""Prompt tokens; sessions of WEKA with longer ones are left out, as the model has no room."""
DEFAULT = "lru"
VICTIMS = ("cost-aware", "least-computed", "srtf")
EVICTIONS = ("slru", "arc", "workload-aware", "ttl-hints", "retain", "superseded")
EVICTIONS += ("continuum-ttl", "clairvoyant")
QUEUES = ("programs-in-order", "continuum")
V1 = (DEFAULT, *VICTIMS, *EVICTIONS[:-1], *QUEUES, "clairvoyant")
TIERS = ("tier-arc", "sae")
SGLANG = (DEFAULT, "slru", "workload-aware", "ttl-hints", "superseded", "continuum-ttl")
PARTS = {
    "CPU tier": (DEFAULT, *TIERS, "ttl-hints", "continuum"),
    "SGLang": SGLANG,
    "four replicas": (DEFAULT, "ttl-hints", "continuum"),
}
HINTED = ("workload-aware", "ttl-hints", "retain", "superseded", "continuum")
WRONG = {
    "2x": {"factor": 2.0},
    "10x": {"factor": 10.0},
    "half missing": {"missing": 0.5},
    "a third pins all": {"greedy": 0.33},
}
QWEN = {"model": "qwen3-30b-a3b-2507", "hardware": "h200", "block_size": 256}
LLAMA = {"model": "llama-3.1-8b", "hardware": "h100", "block_size": 64}
SETTINGS = {"agentx": QWEN, "weka": QWEN, "agents": LLAMA}
BYTES_PER_TOKEN = {"agentx": 98_304, "weka": 98_304, "agents": 131_072}
REPLICAS = 4
COUNTED = ("slowest_s", "first_ms", "late_ms", "hits")
COUNTED += ("in_pauses", "between", "computed", "recomputed")
"""Figures of a run."""


class Case(NamedTuple):
    """One run."""

    part: str
    workload: str
    pressure: float
    policy: str
    seed: int
    hints: str = ""


def cases(weka: bool) -> Iterator[Case]:
    """Every run."""
    workloads = ("agentx", "agents", "weka") if weka else ("agentx", "agents")
    for seed in SEEDS:
        for pressure in (2, 1, 5, 0.5):
            for workload in workloads:
                shown = V1 if pressure > 1 else (each for each in V1 if each not in VICTIMS)
                yield from (Case("V1", workload, pressure, policy, seed) for policy in shown)
        for hints in WRONG:
            yield from (Case("V1", "agentx", 2, policy, seed, hints) for policy in HINTED)
            yield Case("V1", "agentx", 2, "ttl-hints-bounded", seed, hints)
        for workload in workloads:
            for part, policies in PARTS.items():
                yield from (Case(part, workload, 2, policy, seed) for policy in policies)


def settings(case: Case, pool_tokens: int) -> dict[str, Any]:
    """The settings of a run: those of the policy's TOML, on this machine."""
    found = {**SETTINGS[case.workload], **_toml(case.policy), "max_model_len": "auto"}
    if case.part == "SGLang":
        eviction = found.pop("block_manager_args", {}).get("eviction", "lru")
        found |= {"engine": "sglang", "block_size": 1}
        found["block_manager_args"] = {"radix_eviction_policy": eviction}
    if case.part == "CPU tier":
        # The tier holds what open sessions hold, the GPU half of it.
        held = case.pressure * pool_tokens * BYTES_PER_TOKEN[case.workload]
        found["kv_offloading_size"] = round(held / 2**30, 1)
    return {**found, "num_gpu_blocks_override": pool_tokens // found["block_size"]}


def _toml(policy: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / f"{policy}.toml").read_text())


def working_set(rows: Sequence[Any]) -> float:
    """Tokens of the sessions that are open at once, in the mean over the trace's recorded times."""
    members = defaultdict(list)
    for row in rows:
        members[row.session].append(row)
    span_ns = max(row.arrival_ns for row in rows) - rows[0].arrival_ns
    held = 0.0
    for turns in members.values():
        held += (turns[-1].arrival_ns - turns[0].arrival_ns) * turns[-1].input_length
    return held / span_ns


@cache
def trace_of(workload: str, seed: int, number: int, weka: str | None) -> Any:
    """The requests of a run. Seeds of WEKA's sessions are thirds of their files."""
    from kvsim.workload.open import open_trace
    from kvsim.workload.synthetic import synthesise
    from kvsim.workload.trace import beginning

    if workload == "agentx":
        return synthesise("agentx", seed, requests=number, rate=AGENTX_PER_S * number / 300)
    if workload == "agents":
        return synthesise("agents", seed, requests=number)
    assert weka is not None, "weka needs --weka"
    with TemporaryDirectory() as folder:
        for file in sorted(Path(weka).resolve().glob("*.json"))[seed :: len(SEEDS)]:
            if max(map(int, re.findall(r'"in": ?(\d+)', file.read_text()))) <= LONGEST:
                (Path(folder) / file.name).symlink_to(file)
        return beginning(open_trace(folder), number)


def figures(case: Case, weka: str | None) -> dict[str, Any]:
    """Runs one, and keeps what the page shows."""
    from wrong_hints import changed

    from kvsim.run.simulation import simulate
    from kvsim.settings.config import make_config

    replicas = REPLICAS if case.part == "four replicas" else 1
    number = REQUESTS[case.workload] * (2 if replicas > 1 else 1)
    trace = trace_of(case.workload, case.seed, number, weka)
    longest = max(row.input_length + row.output_length for row in trace.rows) + 1024
    pool = max(round(working_set(trace.rows) / case.pressure / replicas), longest)
    config = make_config(settings(case, pool), "agents.py")
    if case.hints:
        rows = [
            replace(row, extra=changed(row.extra or {}, row.session or "", **WRONG[case.hints]))
            for row in trace.rows
        ]
        trace = replace(trace, rows=rows)
    if replicas > 1:
        from kvsim.fleet.contender import contender, simulate_contender

        result = simulate_contender(trace, contender([config] * replicas, "session-affinity", {}))
    else:
        result = simulate(trace, config)
    summary = result.summary
    of = summary["sessions"]
    return {
        **case._asdict(),
        "pool_tokens": pool,
        "unserved": len(trace.rows) - summary["completed"],
        "sessions": of["num"],
        "mean_s": round(of["mean_s"], 1),
        "slowest_s": round(of["slowest_tenth_served_s"], 1),
        "first_ms": round(of["mean_ttft_ms"]["first"]),
        "late_ms": round(of["mean_ttft_ms"]["late"] or 0),
        "computed": of["computed_tokens"],
        "in_pauses": of.get("lost_in_pauses_tokens"),
        "between": of.get("lost_between_sessions_tokens"),
        "preemptions": summary.get("num_preemptions", 0),
        "recomputed": summary.get("recomputed_tokens") or 0,
        "hits": round(summary.get("prefix_cache_hit_rate") or 0, 4),
        "said": [note[7:] for note in summary["meta"].get("notes", ()) if note[:5] == "hints"],
    }


def run(weka: str | None) -> None:
    """Makes the runs that are missing."""
    done = read()
    for case in cases(weka is not None):
        if case in done:
            continue
        default = done.get(case._replace(policy=DEFAULT))
        if case.policy in VICTIMS and default and not default["preemptions"]:
            row = {**default, "policy": case.policy}  # Nobody gives way, whoever would.
        else:
            row = figures(case, weka)
        done[case] = row
        with RUNS.open("a") as file:
            print(json.dumps(row), file=file, flush=True)


def read() -> dict[Case, dict[str, Any]]:
    """The runs that are there."""
    if not RUNS.exists():
        return {}
    rows = (json.loads(line) for line in RUNS.read_text().splitlines())
    return {Case(*(row[name] for name in Case._fields)): row for row in rows}


Rows = dict[Case, dict[str, Any]]


def change(rows: Rows, case: Case, key: str = "mean_s") -> str:
    """A figure's change to the default's on the same requests, in percent, with its 95 % interval
    over the seeds that ran; bold where that excludes none and the change is above 1 %."""
    import numpy as np

    from kvsim.explain.certainty.estimates import paired

    pairs = [
        (rows[each._replace(policy=DEFAULT, hints="")][key], rows[each][key])
        for each in (case._replace(seed=seed) for seed in SEEDS)
        if each in rows and each._replace(policy=DEFAULT, hints="") in rows
    ]
    if not pairs:
        return ""
    shares = np.array([(other / first - 1) * 100 for first, other in pairs])
    middle = float(shares.mean())
    if len(pairs) == 1:
        return f"{middle:+.1f} %".replace("-", "−")
    low, _ = paired(np.zeros(len(pairs)), shares, whole=False, percentile=False).interval(0.05)
    words = f"{middle:+.1f} ± {middle - low:.1f} %".replace("-", "−")
    return f"**{words}**" if abs(middle) > max(middle - low, 1) else words


def average(rows: Rows, case: Case, key: str = "mean_s") -> float | None:
    """A figure over the seeds that ran."""
    found = [rows[each] for seed in SEEDS if (each := case._replace(seed=seed)) in rows]
    values = [row[key] for row in found if row[key] is not None]
    return mean(values) if values else None


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; lines with empty cells only are left out."""
    shown = [line for line in lines if any(line[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *shown))


def sessions(rows: Rows, policies: Sequence[str], columns: Mapping[str, Case]) -> str:
    """The default's mean session, and what the others change, in a column for each case."""
    base = {head: average(rows, case._replace(hints="")) for head, case in columns.items()}
    lines = [(DEFAULT, *(f"{seconds:,.0f} s" if seconds else "" for seconds in base.values()))]
    for policy in policies:
        of = (case._replace(policy=policy) for case in columns.values())
        lines.append((policy, *(change(rows, each) for each in of)))
    return table(("policy", *columns), lines)


def causes(rows: Rows, workload: str) -> str:
    """What else changes at pressure 2."""
    head = ("policy", "slowest tenth", "TTFT of first turns", "TTFT from turn 10 on", "hits")
    head += ("lost in pauses", "lost between sessions", "computed", "recomputed after preemptions")
    lines = []
    for policy in V1:
        case = Case("V1", workload, 2, policy, 0)
        of = {key: average(rows, case, key) for key in COUNTED}
        if None in of.values():
            continue
        slowest = f"{of['slowest_s']:,.0f} s" if policy == DEFAULT else None
        lines.append(
            (
                policy,
                slowest or change(rows, case, "slowest_s"),
                f"{of['first_ms'] / 1e3:,.1f} s",
                f"{of['late_ms'] / 1e3:,.1f} s",
                f"{of['hits'] * 100:.1f} %",
                *(f"{of[key] / 1e6:,.2f} M" for key in ("in_pauses", "between", "computed")),
                f"{of['recomputed']:,.0f}",
            )
        )
    return table(head, lines)


def refused(rows: Rows) -> str:
    """What became of hints, in one run of each policy that reads them."""
    cases = [Case("V1", "agentx", 2, policy, 0) for policy in (*HINTED, "continuum-ttl")]
    cases.append(Case("V1", "agentx", 2, "ttl-hints-bounded", 0, "a third pins all"))
    return "\n".join(
        f"* {case.policy}{', a third pins all' if case.hints else ''}: {said}."
        for case in cases
        for said in rows.get(case, {"said": ()})["said"]
    )


def page(rows: Rows) -> str:
    """The text of the page, with its tables filled in."""
    made = {f"causes on {workload}": causes(rows, workload) for workload in SETTINGS}
    for workload in SETTINGS:
        case = Case("V1", workload, 2, DEFAULT, 0)
        columns = {f"pressure {each:g}": case._replace(pressure=each) for each in PRESSURES}
        columns |= {f"{each}, 2": case._replace(part=each) for each in PARTS}
        made[f"sessions of {workload}"] = sessions(rows, (*V1[1:], *TIERS), columns)
    columns = {
        hints or "right": Case("V1", "agentx", 2, DEFAULT, 0, hints) for hints in ("", *WRONG)
    }
    made["wrong hints"] = sessions(rows, (*HINTED, "ttl-hints-bounded"), columns)
    made["refused"] = refused(rows)
    text = PAGE.read_text()
    for name, lines in made.items():
        text, number = re.subn(
            rf"(<!-- table: {name} -->\n)(\n[|*][^\n]*(\n[|*][^\n]*)*\n)?",
            lambda found, lines=lines: f"{found[1]}\n{lines}\n",
            text,
        )
        assert number == 1, f"{PAGE}: no place for {name}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weka")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if not given.page:
        run(given.weka)
    PAGE.write_text(page(read()))


if __name__ == "__main__":
    main()
