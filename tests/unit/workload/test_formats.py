"""What each foreign format becomes: rows, times, contents, and notes on what was changed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from foreign import SAMPLES, weka

from kvsim.errors import TraceError
from kvsim.workload import READERS, HashContent, TokenContent, Trace, native, open_trace

MS = 1_000_000


def opened(folder: Path, format: str) -> Trace:
    """The sample of a format, under a name that says nothing."""
    path = folder / "data"
    path.write_text(SAMPLES[format], newline="")
    return open_trace(str(path))


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(row.input_length, row.output_length) for row in trace.rows]


def times_ms(trace: Trace) -> list[float]:
    return [row.arrival_ns / MS for row in trace.rows if row.arrival_ns is not None]


def test_there_is_a_sample_of_every_format() -> None:
    assert {*SAMPLES, "native"} == set(READERS)


@pytest.mark.parametrize("format", SAMPLES)
def test_a_format_is_recognised_and_converts_to_native(format: str, tmp_path: Path) -> None:
    trace = opened(tmp_path, format)
    assert trace.format == trace.source["format"] == format
    native.write(trace, str(tmp_path / "native.jsonl"))
    again = open_trace(str(tmp_path / "native.jsonl"))
    for row, copy in zip(trace.rows, again.rows, strict=True):
        copy.line = row.line
        assert row == copy


@pytest.mark.parametrize("format", SAMPLES)
def test_gzip_and_byte_order_marks_change_nothing(format: str, tmp_path: Path) -> None:
    plain = opened(tmp_path, format)
    for number, stored in enumerate(
        (gzip.compress(SAMPLES[format].encode()), b"\xef\xbb\xbf" + SAMPLES[format].encode())
    ):
        path = tmp_path / str(number)
        path.write_bytes(stored)
        assert open_trace(str(path)).rows == plain.rows


def test_vllm_bench(tmp_path: Path) -> None:
    trace = opened(tmp_path, "vllm-bench")
    assert lengths(trace) == [(300, 2), (100, 3)]
    assert times_ms(trace) == [0, 250]
    assert [row.id for row in trace.rows] == ["2", "0"]
    assert trace.rows[1].observed == {
        "ttft_s": 0.1,
        "e2e_s": 0.13,
        "client_queue_s": 0.0,
        "itl_s": [0.01, 0.02],
    }
    assert "1 of 3 requests left out: they failed" in trace.notes
    assert "--request-rate 2 --max-concurrency 8" in trace.notes[0]


def test_a_bench_result_is_recognised_where_its_lists_begin_late(tmp_path: Path) -> None:
    path = tmp_path / "x"
    many = json.loads(SAMPLES["vllm-bench"])
    for key, value in many.items():
        many[key] = value * 20_000 if isinstance(value, list) else value
    path.write_text(json.dumps(many))
    assert len(open_trace(str(path)).rows) == 40_000


def test_sglang_bench(tmp_path: Path) -> None:
    trace = opened(tmp_path, "sglang-bench")
    assert lengths(trace) == [(100, 3), (300, 2)]
    assert times_ms(trace) == []
    assert trace.rows[0].observed == {
        "ttft_s": 0.1,
        "itl_s": [0.01, 0.02],
        "e2e_s": pytest.approx(0.13),
    }
    assert "--request-rate inf --max-concurrency 8" in trace.notes[0]


@pytest.mark.parametrize("format", ["vllm-bench", "sglang-bench"])
def test_results_that_cannot_be_replayed_are_refused(format: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(SAMPLES[format] * 2)
    with pytest.raises(TraceError, match="2 results in one file; keep one of them"):
        open_trace(str(path))
    short = json.loads(SAMPLES[format])
    for key in ("input_lens", "output_lens"):
        del short[key]
    path.write_text(json.dumps(short))
    option = "--save-detailed" if format == "vllm-bench" else "--output-details"
    with pytest.raises(TraceError, match=f"without lists per request; .* {option}$"):
        open_trace(str(path))


def test_qwen_times_are_seconds_and_turns_follow_their_parents(tmp_path: Path) -> None:
    trace = opened(tmp_path, "qwen")
    assert times_ms(trace) == [0, 9000, 9500]
    assert (trace.block_size, trace.hash_kind, trace.partial_hash) == (16, "prefix", True)
    assert [row.after for row in trace.rows] == [-1, 0, -1]
    assert [(row.session, row.turn) for row in trace.rows] == [("10", 0), ("10", 1), ("12", 0)]
    assert any("parent_chat_id is not on an earlier row" in note for note in trace.notes)


def test_qwen_ids_that_are_not_chained_stand_for_their_block(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(SAMPLES["qwen"].replace("[1, 2, 4, 5]", "[3, 2, 1, 5]"))
    assert open_trace(str(path)).hash_kind == "content"


def test_a_mooncake_file_in_seconds_of_16_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(SAMPLES["qwen"].replace("chat_id", "c").replace("parent_", "p"))
    with pytest.raises(TraceError, match="block size 512 does not fit: the id counts admit"):
        open_trace(str(path))


def test_weka(tmp_path: Path) -> None:
    trace = opened(tmp_path, "weka")
    assert [row.id for row in trace.rows] == ["trace_1/0", "trace_1/1/0", "trace_1/2"]
    assert times_ms(trace) == [0, 3500, 9000]
    assert [(row.after, row.delay_ns / MS) for row in trace.rows] == [(-1, 0), (0, 0), (0, 2000)]
    assert (trace.block_size, trace.hash_kind, trace.partial_hash) == (64, "prefix", False)
    # 130 and 200 tokens: block 2 is filled by the output, and the next prompt names it.
    assert trace.rows[0].content == HashContent(((1, 2),), ((3, 1),))
    assert trace.rows[1].output_length == 1
    assert trace.rows[0].observed == {"e2e_s": 1.5}
    assert {row.scope for row in trace.rows} == {"trace_1"}


def test_a_weka_folder(tmp_path: Path) -> None:
    for number in range(3):
        name = f"trace_{number}"
        (tmp_path / f"{name}.json").write_text(json.dumps(weka(name)))
    trace = open_trace(str(tmp_path))
    assert len(trace.rows) == 9
    starts = [row.arrival_ns or 0 for row in trace.rows if row.id.endswith("/0") and row.after < 0]
    assert len(set(starts)) == 3 and max(starts) < 3600 * 10**9
    assert open_trace(str(tmp_path)).rows == trace.rows
    assert any("2 of 3 sessions begin with the same 3 requests" in note for note in trace.notes)
    for row in trace.rows:
        assert row.after < row.index
        assert row.after < 0 or trace.rows[row.after].scope == row.scope
    (tmp_path / "trace_9.json").write_text(json.dumps(weka("trace_0")))
    with pytest.raises(TraceError, match=r'"trace_0" is also in trace_0.json; keep one'):
        open_trace(str(tmp_path))


def test_burstgpt_drops_failures_and_keeps_sessions(tmp_path: Path) -> None:
    trace = opened(tmp_path, "burstgpt")
    assert lengths(trace) == [(610, 289), (30, 5)]
    assert times_ms(trace) == [0, 750]
    assert [row.session for row in trace.rows] == ["0", "1"]
    assert trace.notes[0].startswith("1 of 3 requests left out: no prompt or no output tokens")
    old = tmp_path / "old"
    old.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,GPT-4,2,3,5,x\n"
    )
    assert lengths(open_trace(str(old))) == [(2, 3)]


def test_vidur_may_have_no_arrivals(tmp_path: Path) -> None:
    assert times_ms(opened(tmp_path, "vidur")) == [0, 250]
    path = tmp_path / "x"
    path.write_text("num_prefill_tokens,num_decode_tokens,ratio\n5,6,0.8\n")
    trace = open_trace(str(path))
    assert (lengths(trace), times_ms(trace)) == ([(5, 6)], [])


def test_sharegpt_turns_share_their_history(tmp_path: Path) -> None:
    trace = opened(tmp_path, "sharegpt")
    # 130, 70, 4 and 160 characters: 32 tokens, then 50 with the answer, then 51 and 91.
    assert lengths(trace) == [(32, 18), (51, 40), (32, 1)]
    assert [row.after for row in trace.rows] == [-1, 0, -1]
    first, second, other = (row.content for row in trace.rows)
    assert isinstance(first, HashContent) and isinstance(second, HashContent)
    assert isinstance(other, HashContent)
    assert first == HashContent(((0, 2),), ((2, 1),))
    assert second.prompt == ((0, 3),)
    assert other.prompt == ((0, 2),)
    assert any("4 characters a token" in note for note in trace.notes)


def test_texts_with_equal_beginnings_share_ids(tmp_path: Path) -> None:
    trace = opened(tmp_path, "custom")
    assert lengths(trace) == [(32, 10), (32, 20)]
    assert [row.content for row in trace.rows] == [
        HashContent(((0, 2),)),
        HashContent(((0, 1), (2, 1))),
    ]
    assert "1 of 3 requests left out: the prompt is empty" in trace.notes
    batch = opened(tmp_path, "openai-batch")
    assert lengths(batch) == [(161, 100), (160, 100)]
    assert all(row.content == HashContent(((0, 10),)) for row in batch.rows)
    assert batch.notes[0].startswith("outputs are as long as their limit (max_tokens)")


def test_aiperf(tmp_path: Path) -> None:
    trace = opened(tmp_path, "aiperf")
    assert lengths(trace) == [(50, 7), (51, 7)]
    assert times_ms(trace) == [0, 3000]
    assert (trace.rows[1].after, trace.rows[1].delay_ns) == (0, 2 * 10**9)
    assert trace.rows[0].observed == {"ttft_s": 0.08, "e2e_s": 1.0}
    assert "1 of 4 requests left out: they belong to the warm-up" in trace.notes
    assert "1 of 4 requests left out: they were cancelled" in trace.notes


def test_claude_code(tmp_path: Path) -> None:
    trace = opened(tmp_path, "claude-code")
    assert [row.id for row in trace.rows] == ["m1", "s1", "m2"]
    assert lengths(trace) == [(1010, 40), (500, 8), (1043, 20)]
    assert times_ms(trace) == [0, 5000, 8000]
    first, side, second = trace.rows
    assert (second.after, second.delay_ns) == (first.index, 5 * 10**9)
    assert first.observed == {"e2e_s": 3.0}
    assert first.content == HashContent(((0, 63),))
    assert side.content == HashContent(((65, 31),))
    assert second.content == HashContent(((0, 65),))
    assert "1 of 4 requests left out: they called no model" in trace.notes


def test_a_gateways_log_and_spans_are_requests_that_were_served(tmp_path: Path) -> None:
    spans = opened(tmp_path, "otel")
    assert lengths(spans) == [(7, 9), (1200, 300)]
    assert [row.id for row in spans.rows] == ["03", "02"]
    assert [row.arrival_ns for row in spans.rows] == [0, 500]
    perf = opened(tmp_path, "inference-perf")
    assert lengths(perf) == [(30, 5), (591, 140)]
    assert times_ms(perf) == [0, 250]
    assert perf.rows[0].observed == {"ttft_s": 0.125, "e2e_s": 2.0}
    generations = opened(tmp_path, "langfuse")
    assert lengths(generations) == [(50, 5), (100, 9)]
    assert generations.rows[1].observed == {"ttft_s": 1.0, "e2e_s": 3.0}
    spent = opened(tmp_path, "litellm")
    assert lengths(spent) == [(11, 9), (10, 8)]
    assert times_ms(spent) == [0, 1000]
    assert "1 of 4 requests left out: they failed" in spent.notes
    assert "1 of 4 requests left out: LiteLLM's own cache answered them" in spent.notes


@pytest.mark.parametrize("format", ["langfuse", "litellm"])
def test_a_log_is_lines_a_list_or_a_page(format: str, tmp_path: Path) -> None:
    whole = json.loads(SAMPLES[format])
    entries = whole if isinstance(whole, list) else whole["observations"]
    path = tmp_path / "data"
    stored = []
    for text in (
        "\n".join(map(json.dumps, entries)),
        json.dumps(entries),
        json.dumps({"data": entries}),
        json.dumps({"data": entries}, indent=1),
    ):
        path.write_text(text)
        trace = open_trace(str(path))
        assert trace.format == format
        stored.append([(row.id, row.arrival_ns, row.input_length) for row in trace.rows])
    assert stored[1:] == stored[:1] * 3


def test_results_of_a_batch_have_the_counts_of_tokens(tmp_path: Path) -> None:
    body = {"id": "chatcmpl", "usage": {"prompt_tokens": 10, "completion_tokens": 5}}
    lines = [
        {"id": "b1", "custom_id": "q2", "response": {"status_code": 200, "body": body}},
        {"id": "b2", "custom_id": "q1", "response": None, "error": {"code": "server_error"}},
    ]
    path = tmp_path / "data"
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = open_trace(str(path))
    assert [(row.id, row.input_length, row.output_length) for row in trace.rows] == [("q2", 10, 5)]
    assert trace.notes[0] == "1 of 2 requests left out: they failed, or count no tokens"


def test_an_unknown_format_ends_with_the_line_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text('{"when": 1, "asked": 2}\n')
    with pytest.raises(TraceError, match=r"jq -r '\[\.TIME,.*@csv' FILE\) >t\.csv$"):
        open_trace(str(path))


def test_guidellm(tmp_path: Path) -> None:
    trace = opened(tmp_path, "guidellm")
    assert [row.id for row in trace.rows] == ["b", "a"]
    assert times_ms(trace) == [0, 250]
    assert trace.rows[0].observed == {"ttft_s": 0.09, "e2e_s": 2.0}
    assert "2 of 5 requests left out: they were not complete" in trace.notes
    report = json.loads(SAMPLES["guidellm"])
    report["benchmarks"] *= 2
    path = tmp_path / "x"
    path.write_text(json.dumps(report))
    with pytest.raises(TraceError, match="2 benchmarks, as of a sweep; keep one"):
        open_trace(str(path))


@pytest.mark.parametrize("format", ["azure", "lmcache", "mooncake", "table"])
def test_unsorted_rows_are_sorted_with_a_note(format: str, tmp_path: Path) -> None:
    trace = opened(tmp_path, format)
    times = times_ms(trace)
    assert times == sorted(times)
    assert [row.line for row in trace.rows] != sorted(row.line for row in trace.rows)
    assert "rows before the row above them in time: sorted (1 of 2 " in "; ".join(trace.notes)
    if format == "azure":
        assert trace.origin == "2024-05-10T00:00:00.009930+00:00"


def test_lmcache_hashes_are_numbered_and_outputs_unknown(tmp_path: Path) -> None:
    trace = opened(tmp_path, "lmcache")
    assert lengths(trace) == [(512, 1), (600, 1)]
    assert [row.content for row in trace.rows] == [
        HashContent(((0, 1), (2, 1))),
        HashContent(((0, 2),)),
    ]
    assert (trace.block_size, trace.hash_kind, trace.partial_hash) == (256, "prefix", False)
    assert "outputs are not in the log" in trace.notes[0]


def test_llmservingsim_has_real_tokens(tmp_path: Path) -> None:
    trace = opened(tmp_path, "llmservingsim")
    assert trace.rows[1].content == TokenContent((1, 2))
    assert [row.arrival_ns for row in trace.rows] == [0, 2]


def test_a_vllm_log(tmp_path: Path) -> None:
    trace = opened(tmp_path, "vllm-log")
    assert lengths(trace) == [(3, 16), (2, 8)]
    assert times_ms(trace) == [0, 2000]
    assert trace.rows[0].content == TokenContent((1, 2, 3))
    assert any("1 of 3 requests left out: no prompt token ids" in note for note in trace.notes)


def test_a_vllm_log_without_requests_is_for_another_option(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(SAMPLES["vllm-log"].splitlines()[0])
    with pytest.raises(TraceError, match=r"a log of vLLM without requests; .* --startup-log"):
        open_trace(str(path))


def test_a_document_of_many_mebibytes_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the pieces are cut, and whatever the limit of a line is."""
    monkeypatch.setattr("kvsim.settings.limits.LINE_BYTES", 100)
    whole = opened(tmp_path, "sharegpt").rows
    for size in (1, 7, 64):
        monkeypatch.setattr("kvsim.workload.source._TEXT_BYTES", size)
        assert opened(tmp_path, "sharegpt").rows == whole
