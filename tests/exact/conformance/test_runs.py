"""Whole runs decide and end as the recorded engines did: a trace file, settings, and one second a
step in place of the unit clock."""

import json
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from places import DATA

from kvsim.against.conform.cases import Case, read_cases
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
    | {"long_prefill_token_threshold"},
}
"""Engine → settings of a case that it has, beside those that all have."""
ALL = {"block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len"}
NAMES = {"policy": "scheduling_policy", "v1_reserve_full_isl": "scheduler_reserve_full_isl"}


SYNCHRONOUS = {
    "vllm-0.6.3": {"disable_async_output_proc": True},
    "vllm-v1": {"async_scheduling": False},
}


class Log:
    """Records of the steps of a run, as a watcher of it, but for those that do nothing."""

    def begin(self) -> None:
        self.records: list[Record] = []
        self.arrived, self.refused = 0, list[str]()

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        self.refused += [each.id for each in batch.ended if each.reason not in ("", ABORTED)]
        self.refused = [
            name for name in self.refused if name not in [each.id for each in plan.ignored]
        ]
        self.arrived += arrived
        if plan.computes:
            added = self.arrived - len(self.refused)
            record = step_record(batch, plan, len(self.records), now_ns / 1e9, added)
            record["ignored"] = self.refused + record["ignored"]
            self.records.append(record)
            self.arrived, self.refused = 0, []

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        if "finished" not in self.records[-1]:
            finish_record(self.records[-1], batch, ended)

    def stopped(self, outcome: Any) -> None: ...


def settings(engine: str, config: Any) -> dict[str, Any]:
    chosen = {
        NAMES.get(key, key.removeprefix("v1_")): config[key]
        for key in SETTINGS[engine] | ALL
        if config.get(key) is not None
    }
    chosen |= {"engine": engine, "cost": SECOND, **SYNCHRONOUS.get(engine, {})}
    chosen["num_gpu_blocks_override"] = config["num_gpu_blocks"]
    if engine in ("vllm-0.3.3", "vllm-0.6.3"):
        chosen["num_cpu_blocks_override"] = config.get("num_cpu_blocks", 0)
    if engine == "vllm-0.3.3":
        chosen["scheduler_args"] = {"max_paddings": config["max_paddings"]}
    if engine != "vllm-0.3.3" and not engine.startswith("nano"):
        chosen["enable_prefix_caching"] = config["enable_prefix_caching"]
    return chosen


def write(path: Path, case: Case) -> None:
    """A trace of the case. The unit clock composes at whole seconds, an engine when it is asked."""
    head = {"kvsim_trace": 1}
    rows = [
        {
            "id": row["id"],
            "arrival_s": ceil(row["arrival"]),
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


def plain(case: Case) -> bool:
    """Whether a trace and settings can say it: no samples, no result that is taken up a step later,
    and neither a deadlock nor a step that does nothing."""
    config, log = case.config, case.recorded or []
    return (
        not any(row.get("n", 1) > 1 or "prefix_pos" in row for row in case.trace)
        and not config.get("sliding_window")
        and config["max_model_len"] <= config["num_gpu_blocks"] * config["block_size"]
        and not config.get("async_output_proc" if "v1" not in case.name else "v1_async")
        and all("error" not in record and (record["prefill"] or record["decode"]) for record in log)
        and not any(record["swapped_out"] for record in log)  # which takes time in a run
    )


CASES = [
    pytest.param(engine, case, id=case.name)
    for engine in SETTINGS
    for case in read_cases(DATA / f"{engine}.jsonl.gz", engine)
    if plain(case)
]


def test_there_are_cases_of_each_engine() -> None:
    assert {case.values[0] for case in CASES} == set(SETTINGS)


@pytest.mark.parametrize(("engine", "case"), CASES)
def test_a_run_decides_and_ends_as_recorded(engine: str, case: Case, tmp_path: Path) -> None:
    trace, log = tmp_path / "trace.jsonl", Log()
    write(trace, case)
    result = simulate(trace, settings(engine, case.config), watcher=log)
    assert case.recorded is not None
    assert first_divergence(case.recorded, log.records) is None
    ends = {name: record["time"] + 1 for record in case.recorded for name in record["finished"]}
    finished = zip(result.requests["id"], result.requests["finish_ns"], strict=True)
    assert {name: ns / 1e9 for name, ns in finished if name in ends} == ends
