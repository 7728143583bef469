"""What a trace says of requests beyond what engines know reaches policies as `request.extra`."""

from pathlib import Path
from typing import Any

import pytest
from made import jsonl

from kvsim.engines.vllm_v1.scheduler import VllmV1Async
from kvsim.errors import ConfigError
from kvsim.run.simulation import simulate
from kvsim.workload import open_trace
from kvsim.workload.clients import make_requests
from kvsim.workload.formats.table import parse_columns, read_table
from kvsim.workload.source import Source

ROW = '"input_length":5,"output_length":2'


def extras(path: str) -> list[dict[str, Any]]:
    trace = open_trace(path)
    return [each.extra for each in make_requests(trace, trace.rows)]


def test_keys_of_ones_own_tags_and_the_deadline(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        '{"kvsim_trace":1}',
        f'{{{ROW},"arrival_s":0,"x_tenant":"a","x_predicted":7,"deadline_s":1.5}}',
        f'{{{ROW},"arrival_s":1,"tags":{{"kind":"chat"}},"observed":{{"ttft_s":1}}}}',
        f'{{{ROW},"arrival_s":2}}',
    )
    assert extras(path) == [
        {"tenant": "a", "predicted": 7, "deadline_s": 1.5},
        {"kind": "chat"},
        {},
    ]


def test_columns_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("ts,in,out,team,guess\n0,5,2,007,9\n1,5,2,b_1,2.5\n")
    columns = parse_columns("arrival_s=ts,input=in,output=out,x_tenant=team,x_predicted=guess")
    with Source(str(path)) as source:
        rows = read_table(source, columns).rows
    assert [row.extra for row in rows] == [
        {"tenant": "007", "predicted": 9},
        {"tenant": "b_1", "predicted": 2.5},
    ]


def test_a_column_of_ones_own_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"'x_' is not a role; .*x_NAME"):
        parse_columns("arrival_s=ts,input=in,output=out,x_=team")


class Notes(VllmV1Async):
    """Counts in `extra` how often a request was looked at."""

    seen: dict[str, Any] = {}  # noqa: RUF012

    def after_step(self, batch: Any, plan: Any, now_ns: int) -> None:
        for request in batch.running:
            request.extra["steps"] = request.extra.get("steps", 0) + 1
            self.seen[request.id] = request.extra


def test_a_policy_reads_and_writes_it_and_the_trace_stays(tmp_path: Path) -> None:
    rows = [f'{{{ROW},"arrival_s":0,"x_tenant":"{each}"}}' for each in "ab"]
    trace = open_trace(jsonl(tmp_path, '{"kvsim_trace":1}', *rows))
    simulate(trace, {"engine": f"{__name__}:Notes"})
    assert {each["tenant"] for each in Notes.seen.values()} == {"a", "b"}
    assert all(each["steps"] > 0 for each in Notes.seen.values())
    assert [row.extra for row in trace.rows] == [{"tenant": "a"}, {"tenant": "b"}]
