"""Runs the agent lab's study and writes `docs/results/agents.md`. It goes on where it stopped.

    nice -n 10 python docs/site/agents.py --weka FOLDER_OF_SESSIONS

Each run is a line of `docs/results/agents/runs.jsonl`; without the folder, WEKA's runs are left as
they are. `--page` only writes the page from the runs that are there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "examples" / "agents"))
RUNS = ROOT / "docs" / "results" / "agents" / "runs.jsonl"
PAGE = ROOT / "docs" / "results" / "agents.md"
TEMPLATE = ROOT / "docs" / "site" / "agents-page.txt"
"""The words of the page."""
WEKA_REQUESTS = 400
SEEDS = (0, 1, 2)


def _evicts(name: str) -> dict[str, Any]:
    return {"block_manager_args": {"eviction": name}}


POLICIES: dict[str, dict[str, Any]] = {
    "LRU (default)": {},
    "cost-aware victim": {"victim": "cost-aware"},
    "least computed first": {"victim": "least-computed"},
    "SRTF tie-break": {"victim": "srtf:most_remaining"},
    "SLRU": _evicts("slru"),
    "ARC": _evicts("arc"),
    "workload-aware": _evicts("workload_aware:WorkloadAware"),
    "TTL hints": _evicts("ttl_hints:TtlHints"),
    "Retain, release": _evicts("programmatic:Programmatic"),
    "superseded": _evicts("superseded:Superseded"),
    "Continuum": {"engine": "continuum:ProgramsInOrder", **_evicts("continuum:CacheTtl")},
    "programs in order, LRU": {"engine": "continuum:ProgramsInOrder"},
    "Continuum's TTL alone": _evicts("continuum:CacheTtl"),
    "clairvoyant": _evicts("belady"),
}
HINTED = ("workload-aware", "TTL hints", "Retain, release", "superseded", "Continuum")
SGLANG = {
    "LRU (default)": "lru",
    "SLRU": "slru",
    "workload-aware": "workload_aware:WorkloadAware",
    "TTL hints": "ttl_hints:TtlHints",
    "Retain, release": "programmatic:Programmatic",
    "superseded": "superseded:Superseded",
    "Continuum": "continuum:CacheTtl",
}
TIERS = {"LRU (default)": "lru", "ARC": "arc", "SAE": "sae:Sae"}
WRONG = {
    "2x": {"factor": 2.0},
    "10x": {"factor": 10.0},
    "half missing": {"missing": 0.5},
    "a third pins all": {"greedy": 0.33},
}
QWEN = {"model": "qwen3-30b-a3b-2507", "hardware": "h200", "block_size": 256}
SETTINGS = {
    "agentx": QWEN,
    "weka": QWEN,
    "agents": {"model": "llama-3.1-8b", "hardware": "h100", "block_size": 64},
}


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
    for pressure in (1, 5, 0.5):
        yield from (Case("V1", "agentx", pressure, policy, 0) for policy in POLICIES)
    for seed in SEEDS:
        for workload in workloads if seed == 0 else workloads[:2]:
            yield from (Case("V1", workload, 2, policy, seed) for policy in POLICIES)
        for tier in TIERS:
            yield Case("CPU tier", "agentx", 2, tier, seed)
        for hints in WRONG:
            yield from (Case("V1", "agentx", 2, policy, seed, hints) for policy in HINTED[1:])
        yield Case("V1", "agentx", 2, "TTL hints, bounded", seed, "a third pins all")
        yield from (Case("SGLang", "agentx", 2, policy, seed) for policy in SGLANG)
        for policy in ("LRU (default)", "superseded", "TTL hints", "Continuum"):
            yield Case("four replicas", "agentx", 2, policy, seed)


def settings(case: Case, pool_tokens: int) -> dict[str, Any]:
    """The settings of a run."""
    found = dict(SETTINGS[case.workload])
    if case.part == "SGLang":
        found |= {"engine": "sglang", "block_size": 1}
        found["block_manager_args"] = {"radix_eviction_policy": SGLANG[case.policy]}
    elif case.part == "CPU tier":
        found["kv_offloading_size"] = 64
        found["kv_connector_extra_config"] = {"eviction_policy": TIERS[case.policy]}
    elif case.policy == "TTL hints, bounded":
        found |= _evicts("ttl_hints:Bounded")
    else:
        found |= POLICIES[case.policy]
    blocks = pool_tokens // found["block_size"]
    return {**found, "num_gpu_blocks_override": blocks, "max_model_len": "auto"}


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


def trace_of(case: Case, weka: str | None) -> Any:
    """The requests of a run, with its hints."""
    from wrong_hints import changed

    from kvsim.workload.open import open_trace
    from kvsim.workload.synthetic import synthesise
    from kvsim.workload.trace import beginning

    if case.workload == "weka":
        trace = beginning(open_trace(weka), WEKA_REQUESTS)
    elif case.workload == "agentx":
        number = 1200 if case.part == "four replicas" else 500
        trace = synthesise("agentx", case.seed, requests=number, rate=number / 40_000)
    else:
        trace = synthesise("agents", case.seed, requests=500)
    if case.hints:
        rows = [
            replace(row, extra=changed(row.extra or {}, row.session or "", **WRONG[case.hints]))
            for row in trace.rows
        ]
        trace = replace(trace, rows=rows)
    return trace


def figures(case: Case, weka: str | None) -> dict[str, Any]:
    """Runs one, and keeps what the page shows."""
    from kvsim.run.simulation import simulate
    from kvsim.settings.config import make_config

    trace = trace_of(case, weka)
    replicas = 4 if case.part == "four replicas" else 1
    longest = max(row.input_length + row.output_length for row in trace.rows) + 1024
    pool = max(round(working_set(trace.rows) / case.pressure / replicas), longest)
    config = make_config(settings(case, pool), "agents.py")
    if replicas > 1:
        from kvsim.fleet.contender import contender, simulate_contender

        result = simulate_contender(trace, contender([config] * 4, "session-affinity", {}))
    else:
        result = simulate(trace, config)
    summary = result.summary
    return {
        **case._asdict(),
        "pool_tokens": pool,
        "requests": len(trace.rows),
        "outcome": summary["completed"],
        "sessions": summary["sessions"],
        "preemptions": summary.get("num_preemptions"),
        "recomputed": summary.get("recomputed_tokens"),
        "hit_rate": summary.get("prefix_cache_hit_rate"),
        "hints_said": [note for note in summary["meta"].get("notes", ()) if note[:5] == "hints"],
    }


def read() -> dict[Case, dict[str, Any]]:
    """The runs that are there."""
    if not RUNS.exists():
        return {}
    rows = (json.loads(line) for line in RUNS.read_text().splitlines())
    return {Case(*(row[name] for name in Case._fields)): row for row in rows}


def run(weka: str | None) -> None:
    """Makes the runs that are missing."""
    done = read()
    for case in cases(weka is not None):
        if case not in done:
            row = figures(case, weka)
            with RUNS.open("a") as file:
                print(json.dumps(row), file=file, flush=True)


def _change(row: dict[str, Any], default: dict[str, Any], key: str) -> float:
    return float(row["sessions"][key] / default["sessions"][key] - 1)


def _percent(share: float) -> str:
    return f"{share * 100:+.1f} %".replace("-", "−")


def table(
    rows: dict[Case, dict[str, Any]], part: str, workload: str, pressure: float, seed: int = 0
) -> Iterator[str]:
    """The policies of one part side by side."""
    found = {
        case.policy: row
        for case, row in rows.items()
        if case[:3] == (part, workload, pressure) and case.seed == seed and not case.hints
    }
    heads = "policy, session, at the engine, slowest tenth, TTFT from turn 10 on, hits"
    heads += ", hits lost in pauses, recomputed after preemptions"
    yield f"| {heads.replace(', ', ' | ')} |"
    yield "|---|---|---|---|---|---|---|---|"
    default = found["LRU (default)"]
    for policy, row in found.items():
        of = row["sessions"]
        lost = of.get("lost_in_pauses_tokens")
        cells = (
            f"{of['mean_s']:,.0f} s ({_percent(_change(row, default, 'mean_s'))})",
            f"{of['mean_served_s']:,.0f} s",
            f"{of['slowest_tenth_served_s']:,.0f} s",
            f"{of['mean_ttft_ms']['late'] / 1e3:,.1f} s",
            f"{row['hit_rate']:.1%}".replace("%", " %"),
            "" if lost is None else f"{lost / 1e6:,.1f} M",
            f"{row['recomputed'] or 0:,}",
        )
        yield f"| {policy} | {' | '.join(cells)} |"


def intervals(
    rows: dict[Case, dict[str, Any]], workload: str, policies: Sequence[str]
) -> list[str]:
    """Changes of the mean session over the seeds that ran, with 95 % intervals."""
    import numpy as np

    from kvsim.explain.certainty.estimates import paired

    lines = []
    for policy in policies:
        both = [
            [
                rows[Case("V1", workload, 2, each, seed)]["sessions"]["mean_s"]
                for each in ("LRU (default)", policy)
            ]
            for seed in SEEDS
            if Case("V1", workload, 2, policy, seed) in rows
        ]
        if len(both) < 2:
            continue
        one, two = np.array(both).T
        low, high = paired(one, two, whole=False, percentile=False).interval(0.05)
        lines.append(
            f"| {policy} | {len(both)} | {np.mean(two - one):+,.0f} s |"
            f" {low:+,.0f} … {high:+,.0f} s |".replace("-", "−")
        )
    return lines


def page(rows: dict[Case, dict[str, Any]]) -> str:
    """The text of the page, with its tables filled in."""
    text = TEMPLATE.read_text()
    for part, workload, pressure in dict.fromkeys(case[:3] for case in rows):
        made = "\n".join(table(rows, part, workload, pressure))
        text = text.replace(f"<!-- table: {part}, {workload}, {pressure:g} -->", made)
    known = [policy for policy in POLICIES if policy != "LRU (default)"]
    made = "\n".join(intervals(rows, "agentx", known))
    text = text.replace("<!-- intervals: agentx -->", made)
    wrong = defaultdict(dict)
    for case, row in rows.items():
        if case[:3] == ("V1", "agentx", 2) and case.seed == 0:
            wrong[case.policy][case.hints] = f"{row['sessions']['mean_s']:,.0f} s"
    lines = [
        f"| {policy} | " + " | ".join(of.get(hints, "") for hints in ("", *WRONG)) + " |"
        for policy, of in wrong.items()
        if len(of) > 1 or "bounded" in policy
    ]
    return text.replace("<!-- wrong hints -->", "\n".join(lines))


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
