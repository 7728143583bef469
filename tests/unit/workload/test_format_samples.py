"""Every sample of public formats loads, or is refused with one sentence that helps."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from shared import SHARED, needs_shared

from kvsim.errors import TraceError
from kvsim.workload import open_trace

EXPECTED = {
    "BurstGPT_1.csv": ("burstgpt", 19),
    "BurstGPT_3.csv": ("burstgpt", 40),
    "aiperf.jsonl": ("aiperf", 40),
    "azure2024.csv": ("azure", 40),
    "custom.jsonl": ("custom", 39),
    "guidellm.json": ("guidellm", 1),
    "openai-batch.jsonl": ("openai-batch", 40),
    "qwen_traceA_blksz_16.jsonl": ("qwen", 40),
    "sglang.jsonl": ("sglang-bench", 2),
    "sharegpt.json": ("sharegpt", 40),
    "toolagent_trace.jsonl": ("mooncake", 40),
    "vidur.csv": ("vidur", 40),
    "vllm-bench.json": ("vllm-bench", 40),
}
REFUSED = {
    "simple.csv": "--columns arrival_s=arrival_time,input=prompt_tokens,output=output_tokens",
    "vllm.log": "for its settings give it as --startup-log",
}
WEKA = "traces/weka-claude-code/traces-710-of-739.tar.xz"
WEKA_NATIVE = "traces/native-samples/weka_100_sessions.jsonl.gz"


@needs_shared("formats")
def test_there_is_an_expectation_for_every_sample() -> None:
    assert {path.name for path in (SHARED / "formats").iterdir()} == {*EXPECTED, *REFUSED}


@needs_shared("formats")
@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_loads(name: str) -> None:
    trace = open_trace(str(SHARED / "formats" / name))
    assert (trace.format, len(trace.rows)) == EXPECTED[name]


@needs_shared("formats")
@pytest.mark.parametrize("name", REFUSED)
def test_a_sample_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(TraceError) as refusal:
        open_trace(str(SHARED / "formats" / name))
    assert REFUSED[name] in str(refusal.value)
    assert "\n" not in str(refusal.value)


@needs_shared("formats")
def test_the_sample_without_units_loads_as_its_refusal_says() -> None:
    columns = "arrival_s=arrival_time,input=prompt_tokens,output=output_tokens"
    assert len(open_trace(str(SHARED / "formats/simple.csv"), columns=columns).rows) == 40


@needs_shared(WEKA)
@needs_shared(WEKA_NATIVE)
def test_a_weka_session_is_what_the_native_sample_has_of_it(tmp_path: Path) -> None:
    """Lengths, ids, ids of outputs, and think times of the main thread, request by request."""
    by_session: dict[str, list] = {}
    for row in open_trace(str(SHARED / WEKA_NATIVE)).rows:
        by_session.setdefault(row.session or "", []).append(row)
    with tarfile.open(SHARED / WEKA) as archive:
        for _ in range(12):
            member = archive.next()
            assert member is not None
            file = archive.extractfile(member)
            assert file is not None
            session = json.load(io.TextIOWrapper(file))
            known = by_session.get(session["id"].replace("trace_", "w"))
            if known is None:
                continue
            path = tmp_path / "x.json"
            path.write_text(json.dumps(session))
            rows = [r for r in open_trace(str(path)).rows if r.session == session["id"]]
            for row, other in zip(rows, known, strict=True):
                assert row.content == other.content
                assert (row.input_length, row.output_length) == (
                    other.input_length,
                    other.output_length,
                )
                assert row.delay_ns == other.delay_ns
            return
    pytest.fail("none of the first sessions is in the native sample")
