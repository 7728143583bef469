"""Whole runs decide and end as the recorded engines did: a trace file, settings, and one second a
step in place of the unit clock.

On the unit clock, a step without work takes a second, too, and one that is composed while another
runs is composed a second after it. A run has neither; so each request comes when the run composes
the step that saw it first (`Course`), and steps without work are left out.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest
from marks import long
from places import DATA

from kvsim.against.conform.cases import Case, files_in, read_named, stem
from kvsim.against.conform.step_log import Record, finish_record, first_divergence, step_record
from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import ABORTED, Request
from kvsim.run.simulation import simulate

SECOND = {"model": "constant", "step_us": 1e6}
SECOND |= {"prefill_token_us": 0, "decode_seq_us": 0, "context_token_ns": 0}
SETTINGS = {
    "vllm-0.3.3": {"preemption_mode", "watermark"},
    "vllm-0.6.3": {"enable_chunked_prefill", "preemption_mode", "watermark", "policy"},
    "nano-vllm": set[str](),
    "nano-vllm-2025-08": set[str](),
    "vllm-v1": {"v1_enable_chunked_prefill", "v1_watermark", "v1_reserve_full_isl", "policy"}
    | {"long_prefill_token_threshold", "vllm_version"},
}
"""Engine → settings of a case that it has, beside those that all have."""
ALL = {"block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len"}
NAMES = {"policy": "scheduling_policy", "v1_reserve_full_isl": "scheduler_reserve_full_isl"}
ASYNC = {
    "vllm-0.6.3": ("async_output_proc", "disable_async_output_proc", False),
    "vllm-v1": ("v1_async", "async_scheduling", True),
}
"""Engine → what says in a case that it does not wait for results, what in settings, and how."""
SCHEDULES_REFUSED = {"vllm-0.3.3", "vllm-0.6.3"}
"""Engines in which a step that only gives up prompts takes a step's time."""


class Log:
    """Records of the steps of a run, as a watcher of it, but for those that do nothing."""

    def begin(self) -> None:
        self.records: list[Record] = []
        self.arrived, self.refused = 0, list[str]()
        self.open: list[Record] = []

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        self.refused += [each.id for each in batch.ended if each.reason not in ("", ABORTED)]
        self.arrived += arrived
        if plan.computes:
            given_up = {each.id for each in plan.ignored}
            self.refused = [name for name in self.refused if name not in given_up]
            added = self.arrived - len(self.refused)
            record = step_record(batch, plan, len(self.records), now_ns / 1e9, added)
            record["ignored"] = self.refused + record["ignored"]
            self.records.append(record)
            self.open = [record]
            self.arrived, self.refused = 0, []

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        for record in self.open:
            finish_record(record, batch, ended)
        self.open = []

    def stopped(self, outcome: Any) -> None: ...


class Course(NamedTuple):
    """When a run composes the steps of a recorded log, and when it ends its requests."""

    arrives_s: dict[str, float]
    ends_s: dict[str, int]
    possible: bool
    """Whether no request has to come between two steps that are composed at once."""


def course(engine: str, case: Case) -> Course:
    """One second for each step with work, none for others. vLLM V1 may have two in flight; vLLM
    0.6.3 may process what a step put out while the next one runs."""
    most = 2 if engine == "vllm-v1" and case.config.get("v1_async") else 1
    late = engine == "vllm-0.6.3" and case.config.get("async_output_proc")
    arrives, ends, possible = dict[str, float](), dict[str, int](), True
    rows, flying = deque(sorted(case.trace, key=lambda row: row["arrival"])), deque[int]()
    by_arrival = case.config.get("policy") == "priority"
    now, before, busy = 0, -1, False
    for record in case.recorded or ():
        new = dict[str, float]()
        while rows and rows[0]["arrival"] <= record["time"]:
            row = rows.popleft()
            new[row["id"]] = record["time"] - row["arrival"]
        if new and now == before:
            possible = possible and not flying and not busy
            now += 1
        if by_arrival and busy:  # Those that come earlier are better, and not only first.
            arrives |= {name: now - early / 1000 for name, early in new.items()}
        else:
            possible = possible and not (by_arrival and len({*new.values()}) > 1)
            arrives |= dict.fromkeys(new, now)
        before = now
        busy = any(record.get(queue) for queue in ("waiting", "running", "swapped"))
        if works(record) or (record["ignored"] and engine in SCHEDULES_REFUSED and not flying):
            flying.append(max(now, flying[-1] if flying else 0) + 1)
        if flying and not (works(record) and len(flying) < most):
            now = max(now, flying.popleft())
        ends |= dict.fromkeys(record["finished"], before if late else now)
    return Course(arrives, ends, possible)


def works(record: Record) -> bool:
    return bool(record.get("prefill") or record.get("decode"))


def settings(engine: str, config: Any) -> dict[str, Any]:
    chosen = {
        NAMES.get(key, key.removeprefix("v1_")): config[key]
        for key in SETTINGS[engine] | ALL
        if config.get(key) is not None
    }
    chosen |= {"engine": engine, "cost": SECOND}
    chosen["num_gpu_blocks_override"] = config["num_gpu_blocks"]
    if engine in ASYNC:
        key, name, how = ASYNC[engine]
        chosen[name] = how == bool(config.get(key))
    if engine in ("vllm-0.3.3", "vllm-0.6.3"):
        chosen["num_cpu_blocks_override"] = config.get("num_cpu_blocks", 0)
    if engine == "vllm-0.3.3":
        chosen["scheduler_args"] = {"max_paddings": config["max_paddings"]}
    if engine != "vllm-0.3.3" and not engine.startswith("nano"):
        chosen["enable_prefix_caching"] = config["enable_prefix_caching"]
    return chosen


def write(path: Path, case: Case, arrives_s: dict[str, float]) -> None:
    head = {"kvsim_trace": 1}
    rows = [
        {
            "id": row["id"],
            "arrival_s": arrives_s[row["id"]],
            "input_length": len(row["prompt_token_ids"]),
            "output_length": row["output_len"],
            "tokens": row["prompt_token_ids"],
            "output_tokens": [
                crc32(f"{row['id']}:{number}".encode()) % 32000
                for number in range(row["output_len"])
            ],
            "priority": row.get("priority", 0),
        }
        for row in sorted(case.trace, key=lambda row: row["arrival"])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)))


def plain(engine: str, case: Case) -> bool:
    """Whether a trace and settings can say it: one sample, no window, no deadlock; and whether
    kvsim starts with such settings."""
    config = case.config
    whole = engine.startswith("nano") or not config.get("v1_enable_chunked_prefill", True)
    return (
        not any(row.get("n", 1) > 1 or "prefix_pos" in row for row in case.trace)
        and not config.get("sliding_window")
        and config["max_model_len"] <= config["num_gpu_blocks"] * config["block_size"]
        and not (whole and config["max_num_batched_tokens"] < config["max_model_len"])
        and all("error" not in record for record in case.recorded or ())
        and course(engine, case).possible
    )


RELEASES = [file for file in files_in(DATA) if stem(file).removeprefix("vllm-v1-")[0].isdigit()]
"""Files of features have parts that settings name otherwise."""
FILES = [*RELEASES, *(DATA / f"{engine}.jsonl.gz" for engine in SETTINGS)]
QUICK = 3
"""Cases of a release that always run; those of an engine all do."""


def cases(file: Path) -> list[tuple[str, Case]]:
    """Those of a file that a run can repeat, with their engines."""
    read = list(read_named(file))
    return [(name, each) for name, each in read if isinstance(each, Case) and plain(name, each)]


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_runs_decide_and_end_as_recorded(file: Path, tmp_path: Path) -> None:
    found = cases(file)
    assert found
    for engine, case in found[: QUICK if file in RELEASES else None]:
        check(engine, case, tmp_path / "trace.jsonl")


@long
@pytest.mark.parametrize("file", RELEASES, ids=stem)
def test_more_runs_decide_and_end_as_recorded(file: Path, tmp_path: Path) -> None:
    for engine, case in cases(file)[QUICK:]:
        check(engine, case, tmp_path / "trace.jsonl")


def check(engine: str, case: Case, trace: Path) -> None:
    log, expected = Log(), course(engine, case)
    write(trace, case, expected.arrives_s)
    result = simulate(trace, settings(engine, case.config), watcher=log)
    divergence = first_divergence(list(told(case.recorded or ())), list(told(log.records)))
    assert divergence is None, f"{case.name}: {divergence}"
    finished = dict(zip(result.requests["id"], result.requests["finish_ns"], strict=True))
    ended = {name: finished[name] // 10**9 for name in expected.ends_s}
    assert ended == expected.ends_s, case.name


def told(records: Iterable[Record]) -> Iterator[Record]:
    """Steps with work, without their times; who was refused before them counts as of them."""
    ignored: list[str] = []
    for record in records:
        ignored += record["ignored"]
        if works(record):
            yield {**{k: v for k, v in record.items() if k not in TIMES}, "ignored": ignored}
            ignored = []


TIMES = {"step", "time", "added"}
