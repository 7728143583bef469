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
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "agents"
RUNS = ROOT / "docs" / "results" / "agents" / "runs.jsonl"
PAGE = ROOT / "docs" / "results" / "agents.md"
SEEDS = (0, 1, 2)
REQUESTS = {"agentx": 300, "weka": 400, "agents": 500}
AGENTX_PER_S = 0.01
"""Sessions that begin."""
LONGEST = 200_000
"""Prompt tokens; sessions of WEKA with longer ones are left out, as the model has no room."""
DEFAULT, VICTIMS = "lru", ("cost-aware", "least-computed", "srtf")
V1 = (DEFAULT, *VICTIMS, "slru", "arc", "workload-aware", "ttl-hints", "retain", "superseded")
V1 += ("continuum-ttl", "programs-in-order", "continuum", "clairvoyant")
HINTED = ("workload-aware", "ttl-hints", "ttl-hints-bounded", "retain", "superseded", "continuum")
PRESSURES = (0.5, 1.0, 2.0, 5.0)
PARTS = {
    "V1": V1,
    "CPU tier": (*V1, "tier-arc", "sae"),
    "SGLang": (DEFAULT, *V1[6:11], "slru"),
    "four replicas": V1,
}
EVERY_SEED = {
    "CPU tier": (DEFAULT, "tier-arc", "sae", "ttl-hints", "programs-in-order", "continuum"),
    "SGLang": (DEFAULT, "slru", "workload-aware", "ttl-hints", "superseded", "continuum-ttl"),
    "four replicas": (DEFAULT, "ttl-hints", "continuum"),
}
"""What runs at pressure 2 on every seed."""
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
CAUSES = {
    "slowest tenth": ("slowest_s", "{:,.0f} s"),
    "TTFT of first turns": ("first_ms", "{:,.0f} ms"),
    "TTFT from turn 10 on": ("late_ms", "{:,.0f} ms"),
    "hits": ("hits", "{:.1%}"),
    "lost in pauses": ("in_pauses", "{:,.0f}"),
    "lost between sessions": ("between", "{:,.0f}"),
    "computed": ("computed", "{:,.0f}"),
    "after preemptions": ("recomputed", "{:,.0f}"),
}
"""Column → figure of a run, and how it is written; the last four are prompt tokens."""


class Case(NamedTuple):
    """One run."""

    part: str
    workload: str
    pressure: float
    policy: str
    seed: int
    hints: str = ""


Rows = dict[Case, dict[str, Any]]


def cases(weka: bool) -> Iterator[Case]:
    """Every run, first those that say most."""
    workloads = tuple(SETTINGS) if weka else ("agentx", "agents")
    rarely = tuple(each for each in V1 if each not in VICTIMS)
    parts = [("V1", 2.0, V1), ("V1", 1.0, rarely), ("V1", 0.5, rarely), ("V1", 5.0, V1)]
    parts += [(part, 2.0, policies) for part, policies in EVERY_SEED.items()]
    every = [(part, each, policies) for part, policies in PARTS.items() for each in PRESSURES]
    for seeds, asked in ((SEEDS[:1], parts), (SEEDS[1:], parts), (SEEDS[:1], every)):
        for part, pressure, policies in asked:
            for seed, workload, policy in product(seeds, workloads, policies):
                yield Case(part, workload, pressure, policy, seed)
        if asked is parts:
            for seed, hints, policy in product(seeds, WRONG, HINTED):
                yield Case("V1", "agentx", 2, policy, seed, hints)


def settings(case: Case, pool_tokens: int) -> dict[str, Any]:
    """The settings of a run: those of the policy's TOML, on this machine."""
    policy = tomllib.loads((EXAMPLES / f"{case.policy}.toml").read_text())
    found = {**SETTINGS[case.workload], **policy, "max_model_len": "auto"}
    if case.part == "SGLang":
        eviction = found.get("block_manager_args", {}).get("eviction", "lru")
        found |= {"engine": "sglang", "block_size": 1}
        found["block_manager_args"] = {"radix_eviction_policy": eviction}
    if case.part == "CPU tier":
        # The tier holds what open sessions hold, the GPU half of it.
        held = case.pressure * pool_tokens * BYTES_PER_TOKEN[case.workload]
        found["kv_offloading_size"] = round(held / 2**30, 1)
    return {**found, "num_gpu_blocks_override": pool_tokens // found["block_size"]}


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


def trace_of(workload: str, seed: int, number: int, weka: str | None) -> Any:
    """The requests of a run."""
    from kvsim.workload.synthetic import synthesise
    from kvsim.workload.trace import beginning

    if workload == "agentx":
        return synthesise("agentx", seed, requests=number, rate=AGENTX_PER_S * number / 300)
    if workload == "agents":
        return synthesise("agents", seed, requests=number)
    return beginning(sessions_of(weka, seed), number)


@cache
def sessions_of(weka: str | None, seed: int) -> Any:
    """WEKA's sessions; seeds are thirds of their files."""
    from kvsim.workload import open_trace

    assert weka is not None, "weka needs --weka"
    with TemporaryDirectory() as folder:
        for file in sorted(Path(weka).resolve().glob("*.json"))[seed :: len(SEEDS)]:
            if max(map(int, re.findall(r'"in": ?(\d+)', file.read_text()))) <= LONGEST:
                (Path(folder) / file.name).symlink_to(file)
        return open_trace(folder)


def figures(case: Case, weka: str | None) -> dict[str, Any]:
    """Runs one, and keeps what the page shows."""
    from wrong_hints import changed

    from kvsim.fleet import contender, simulate_contender
    from kvsim.run.simulation import simulate
    from kvsim.settings.config import make_config

    replicas = 4 if case.part == "four replicas" else 1
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


def read() -> Rows:
    """The runs that are there."""
    rows = (json.loads(line) for line in RUNS.read_text().splitlines())
    return {Case(*(row[name] for name in Case._fields)): row for row in rows}


def values(rows: Rows, case: Case, key: str) -> list[float]:
    """A figure of the seeds that ran."""
    found = (rows.get(case._replace(seed=seed), {}) for seed in SEEDS)
    return [row[key] for row in found if row.get(key) is not None]


def change(rows: Rows, case: Case) -> str:
    """The mean session's change to the default's on the same requests, in percent, with its 95 %
    interval over the seeds that ran; bold where that excludes none and the change is above 1 %."""
    import numpy as np

    from kvsim.explain.certainty import paired

    other = values(rows, case, "mean_s")
    first = values(rows, case._replace(policy=DEFAULT, hints=""), "mean_s")
    if not other:
        return ""
    shares = np.array([(b / a - 1) * 100 for a, b in zip(first, other, strict=False)])
    middle, words = float(shares.mean()), f"{shares.mean():+.1f}"
    if len(shares) > 1:
        low, _ = paired(0 * shares, shares, whole=False, percentile=False).interval(0.05)
        words = f"{words} ± {middle - low:.1f}"
        if abs(middle) > max(middle - low, 1):
            words = f"**{words}**"
    return words.replace("-", "−")


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; lines with empty cells only are left out."""
    shown = [line for line in lines if any(line[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *shown))


def sessions(rows: Rows, policies: Sequence[str], columns: Mapping[str, Case]) -> str:
    """The default's mean session, and what those change that change any, a column for each case."""
    base = (values(rows, case._replace(hints=""), "mean_s") for case in columns.values())
    lines = [(DEFAULT, *(f"{mean(each):,.0f} s" if each else "" for each in base))]
    for policy in policies:
        cells = [change(rows, case._replace(policy=policy)) for case in columns.values()]
        if not all(re.fullmatch(r"(.0\.0( ± 0\.0)?)?", cell) for cell in cells):
            lines.append((policy, *cells))
    return table(("policy", *columns), lines)


def causes(rows: Rows, workload: str) -> str:
    """What else changes at pressure 2; without policies that change none of it."""
    lines: list[tuple[str, ...]] = []
    for policy in V1:
        case, cells = Case("V1", workload, 2, policy, 0), []
        for key, words in CAUSES.values():
            found = values(rows, case, key)
            cells += [words.format(mean(found)).replace("%", " %") if found else ""]
        if not lines or tuple(cells) != lines[0][1:]:
            lines.append((policy, *cells))
    return table(("policy", *CAUSES), lines)


def page(rows: Rows) -> str:
    """The text of the page, with its tables filled in."""
    made = {f"causes on {workload}": causes(rows, workload) for workload in SETTINGS}
    for workload, (part, policies) in product(SETTINGS, PARTS.items()):
        case = Case(part, workload, 2, DEFAULT, 0)
        columns = {f"pressure {each:g}": case._replace(pressure=each) for each in PRESSURES}
        made[f"{workload}, {part}"] = sessions(rows, policies[1:], columns)
    right = Case("V1", "agentx", 2, DEFAULT, 0)
    columns = {"right": right} | {each: right._replace(hints=each) for each in WRONG}
    made["wrong hints"] = sessions(rows, HINTED, columns)
    asked = [
        right._replace(policy=policy, hints=each) for policy in HINTED for each in ("", *WRONG)
    ]
    said = [(each, *rows[each]["said"]) for each in asked if each in rows and rows[each]["said"]]
    lines = [(case.policy, case.hints or "right", *words) for case, *words in said]
    made["refused"] = table(("policy", "hints", "what became of them"), lines)
    text = PAGE.read_text()
    for name, lines in made.items():
        place = rf"(<!-- table: {name} -->\n)(\n\|[^\n]*(\n\|[^\n]*)*\n)?"
        text, number = re.subn(place, lambda found, of=lines: f"{found[1]}\n{of}\n", text)
        assert number == 1, f"{PAGE}: no place for {name}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weka")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if not given.page:
        sys.path.insert(0, str(EXAMPLES))
        run(given.weka)
    PAGE.write_text(page(read()))


if __name__ == "__main__":
    main()
