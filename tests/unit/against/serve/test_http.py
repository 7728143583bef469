"""The HTTP interface: what clients of vLLM send and get, and what they cannot break."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvsim.against.serve.metrics import COUNTERS, GAUGES, HISTOGRAMS
from kvsim.against.serve.protocol import Answer, Completion, Reply
from kvsim.against.serve.server import Clock, Server
from kvsim.against.serve.session import Options, Said, Session, adapters_of, said_in
from kvsim.against.serve.watch import Entry, Steps
from kvsim.errors import ConfigError
from kvsim.run.simulation import read_config, simulate
from kvsim.settings.server.command import arguments
from kvsim.workload import TokenContent, Trace
from tests.support.places import ROOT
from tests.support.serving import SMALL, run_apart, serving
from tests.unit.against.serve.test_session import made_trace, row_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def send_all(url: str, server: Server, trace: Trace) -> list[httpx.Response]:
    """Every request of a trace at its simulated time. Each is sent once the server has taken the
    one before it; the server holds its clock until it has all."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
        sent: list[asyncio.Future[httpx.Response]] = []
        for row in trace.rows:
            while len(server.session.steps.entries) < len(sent):
                assert not any(each.done() for each in sent), "one is answered while others wait"
                await asyncio.sleep(0.001)
            assert isinstance(row.content, TokenContent) and row.arrival_ns is not None
            body = {
                "prompt": list(row.content.prompt),
                "max_tokens": row.output_length,
                "ignore_eos": True,
                "request_id": row.id,
            }
            headers = {"x-kvsim-arrival-s": f"{row.arrival_ns / 1e9:.9f}"}
            sent.append(asyncio.ensure_future(client.post(COMPLETIONS, json=body, headers=headers)))
        return await asyncio.gather(*sent)


def families(url: str) -> dict[str, Any]:
    text = httpx.get(f"{url}/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(found: dict[str, Any], name: str, suffix: str = "") -> dict[str, float]:
    """The values of a metric by its further label."""
    known = {"model_name", "engine", "le"}
    return {
        "".join(value for key, value in sample.labels.items() if key not in known): sample.value
        for sample in found[f"vllm:{name}"].samples
        if sample.name == f"vllm:{name}{suffix}"
    }


def test_a_trace_through_http_gives_the_tables_of_kvsim_run() -> None:
    trace, config = made_trace(100, 11), read_config(SMALL)
    expected = simulate(trace, config)
    with serving(records=True, speed=inf, hold=100) as (url, server):
        # In a thread of its own: in this one, the browser of other tests keeps a loop.
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(asyncio.run, send_all(url, server, trace)).result()
        found = families(url)
    result, table = server.session.result(), expected.requests_frame()
    columns = [each for each in table if each != "id"]
    pd.testing.assert_frame_equal(result.steps_frame(), expected.steps_frame())
    ids = [f"cmpl-{each}" for each in table["id"]]
    assert result.requests_frame()["id"].tolist() == ids
    pd.testing.assert_frame_equal(result.requests_frame()[columns], table[columns])
    for row, answer in zip(table.to_dict("records"), answers, strict=True):
        used = answer.json()["usage"]
        assert used["prompt_tokens"] == row["input_length"]
        assert used["completion_tokens"] == row["output_length"]
        assert used["prompt_tokens_details"]["cached_tokens"] == row["num_cached_tokens"]
        assert float(answer.headers["x-kvsim-finish-s"]) == pytest.approx(row["finish_s"])
    check_metrics(found, expected.summary, table)


def check_metrics(found: dict[str, Any], summary: dict[str, Any], table: pd.DataFrame) -> None:
    """The metrics at the end say what the tables say."""
    prompts, outputs = table["input_length"].sum(), table["output_length"].sum()
    assert values(found, "prompt_tokens", "_total")[""] == prompts
    assert values(found, "generation_tokens", "_total")[""] == outputs
    assert values(found, "num_preemptions", "_total")[""] == summary["num_preemptions"] > 0
    assert values(found, "prefix_cache_hits", "_total")[""] == table["num_cached_tokens"].sum()
    assert sum(values(found, "prompt_tokens_by_source", "_total").values()) == prompts
    assert values(found, "request_success", "_total")["length"] == len(table)
    ttft_s = (table["first_token_s"] - table["arrival_s"]).sum()
    assert values(found, "time_to_first_token_seconds", "_sum")[""] == pytest.approx(ttft_s)
    gaps = outputs - len(table)
    assert values(found, "inter_token_latency_seconds", "_count")[""] == gaps
    e2e_s = (table["finish_s"] - table["arrival_s"]).sum()
    assert values(found, "e2e_request_latency_seconds", "_sum")[""] == pytest.approx(e2e_s)
    assert values(found, "num_requests_running") == {"": 0}
    info = found["vllm:cache_config_info"].samples[0].labels
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", "120")


def test_metrics_are_those_of_vllm() -> None:
    with serving(speed=inf) as (url, _):
        found = families(url)
    names = {*GAUGES, *COUNTERS, *HISTOGRAMS, "cache_config_info"}
    assert {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")} == names
    for name in HISTOGRAMS:
        assert found[f"vllm:{name}"].type == "histogram"
    itl = found["vllm:inter_token_latency_seconds"].samples
    assert [sample.labels["le"] for sample in itl if "le" in sample.labels][:3] == [
        "0.01",
        "0.025",
        "0.05",
    ]


def test_waiting_is_the_sum_of_its_reasons() -> None:
    config = SMALL | {"max_num_seqs": 2}
    with serving(config, speed=0.01) as (url, _):
        body = {"prompt": "go", "max_tokens": 500, "n": 6, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body) as answer:
            next(answer.iter_lines())
            found = wait_for(lambda: families(url), lambda f: values(f, "num_requests_waiting")[""])
    assert sum(values(found, "num_requests_waiting_by_reason").values()) == 4
    assert values(found, "num_requests_running")[""] == 2
    assert 0 < values(found, "kv_cache_usage_perc")[""] < 1


def wait_for(look: Any, enough: Any, seconds: float = 30) -> Any:
    """What `look` finds, once it is enough."""
    until = time.monotonic() + seconds
    while not enough(found := look()):
        assert time.monotonic() < until, found
        time.sleep(0.02)
    return found


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it should."""
    *events, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("chat", [False, True])
def test_streams_tell_each_token_and_what_was_used(chat: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi there"}]} if chat else {"prompt": "Hi"}
    body = {
        **asked,
        "max_tokens": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with serving(speed=inf) as (url, _):
        answer = httpx.post(url + (CHAT if chat else COMPLETIONS), json=body)
        plain = httpx.post(url + (CHAT if chat else COMPLETIONS), json=body | {"stream": False})
    *events, last = events_of(answer)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 7
    choices = [event["choices"][0] for event in events]
    if chat:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"]["content"] for choice in choices)
        assert plain.json()["choices"][0]["message"]["role"] == "assistant"
    else:
        text = "".join(choice["text"] for choice in choices)
    assert len(text.split()) == 7
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert float(events[-1]["kvsim"]["x-kvsim-finish-s"]) > 0


def test_the_next_turn_finds_the_answer_in_the_cache() -> None:
    turns = [{"role": "user", "content": "Tell me a long story about caches " * 8}]
    asked = {"messages": turns, "max_tokens": 200, "ignore_eos": True}
    with serving(speed=inf) as (url, _):
        first = httpx.post(url + CHAT, json=asked).json()
        turns += [first["choices"][0]["message"], {"role": "user", "content": "Go on"}]
        second = httpx.post(url + CHAT, json=asked).json()
        salted = httpx.post(url + CHAT, json=asked | {"cache_salt": "mine"}).json()
        counted = httpx.post(f"{url}/tokenize", json={"messages": turns}).json()
    written = first["usage"]["prompt_tokens"] + 200 - 1  # The last token has no KV yet.
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == written // 16 * 16
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert counted["count"] == len(counted["tokens"]) == second["usage"]["prompt_tokens"]


def test_answers_end_by_themselves_where_nobody_ignores_eos() -> None:
    body = {"prompt": ["a b c", "d e f"], "n": 40, "max_tokens": 300, "min_tokens": 3}
    with serving(SMALL | {"num_gpu_blocks_override": 2000}, speed=inf, mean_output_tokens=20) as (
        url,
        _,
    ):
        choices = httpx.post(url + COMPLETIONS, json=body).json()["choices"]
    lengths = [len(choice["text"].split()) for choice in choices]
    assert [choice["index"] for choice in choices] == list(range(80))
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert min(lengths) >= 3 and 10 < sum(lengths) / 80 < 40


BAD: list[tuple[str, Any, int, str]] = [
    (COMPLETIONS, b"{bad", 400, "malformed"),
    (COMPLETIONS, b"", 400, "truncated"),
    (COMPLETIONS, b"\xff\xfe", 400, ""),
    (COMPLETIONS, b"[" * 100_000, 400, ""),
    (COMPLETIONS, {"max_tokens": 5}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "empty"),
    (COMPLETIONS, {"prompt": ""}, 400, "empty"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "empty"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "token ids among"),
    (COMPLETIONS, {"prompt": [-1]}, 400, ">= 0"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1e30}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 10**9}, 400, "n"),
    (COMPLETIONS, {"prompt": [1] * 1024}, 400, "maximum context length is 1024"),
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "other"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    ("/tokenize", {}, 400, "prompt"),
    ("/nowhere", {}, 404, ""),
]


def test_what_is_wrong_is_refused_in_one_line() -> None:
    with serving(speed=inf) as (url, server):
        for path, body, status, word in BAD:
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            answer = httpx.post(url + path, **given)
            assert answer.status_code == status and word in answer.text, (body, answer.text)
        early = {"x-kvsim-arrival-s": "-1"}
        body = {"prompt": "a", "max_tokens": 10**9, "ignore_eos": True}
        assert httpx.post(url + COMPLETIONS, json=body, headers=early).status_code == 400
        used = httpx.post(url + COMPLETIONS, json=body).json()["usage"]
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/version").json() == {"version": "0.33.0"}
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "small"
    assert used["total_tokens"] == 1024
    assert server.session.parts.blocks.gpu.used == 0


def test_who_goes_away_gives_his_blocks_back() -> None:
    with serving(speed=0.05) as (url, server):
        body = {"prompt": [5] * 500, "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body) as answer:
            next(answer.iter_lines())
            assert server.session.parts.blocks.gpu.used > 500 // 16
        wait_for(lambda: server.session.parts.blocks.gpu.used, lambda used: used == 0)
        wait_for(lambda: len(server.session.steps.entries), lambda left: left == 0)


def raw(url: str, body: dict[str, Any] | None = None) -> socket.socket:
    """A connection of one's own, on which so much was asked and nothing is read."""
    host, _, port = url.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)))
    if body is not None:
        text = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
        made.sendall(head.encode() + text)
    return made


def read_to_the_end(connection: socket.socket) -> list[list[dict[str, Any]]]:
    """The choices of all events of a stream, which ends as it should."""
    connection.settimeout(60)
    got = bytearray()
    while not got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        part = connection.recv(1 << 20)
        assert part, got[-200:]
        got += part
    return [json.loads(each)["choices"] for each in re.findall(rb"data: (\{.*\})", got)]


def test_neither_idle_connections_nor_slow_readers_hold_up_others() -> None:
    with serving(SMALL | {"num_gpu_blocks_override": 3000}, speed=inf) as (url, server):
        idle = [raw(url) for _ in range(1000)]
        body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 16}
        body["request_id"] = "long" * 500  # So that no buffer of the system holds all events.
        slow = raw(url, body)
        wait_for(lambda: server.session.now_ns, bool)
        answer = httpx.post(url + COMPLETIONS, json={"prompt": "b", "max_tokens": 5}, timeout=60)
        assert answer.status_code == 200
        wait_for(lambda: len(server.session.steps.entries), lambda left: left == 0)
        got = read_to_the_end(slow)
        slow.close()
        for each in idle:
            each.close()
    assert server.session.parts.blocks.gpu.used == 0
    choices = [choice for event in got for choice in event]
    for sample in range(16):
        texts = [each["text"] for each in choices if each["index"] == sample]
        assert sum(len(text.split()) for text in texts) == 1000 > len(texts)


def test_an_answer_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(answer: Answer, entries: Sequence[Entry]) -> bytes:
        if answer.id.endswith("bad"):
            raise RuntimeError("broken")
        return told(answer, entries)

    told = Answer.whole
    monkeypatch.setattr(Answer, "whole", whole)
    with serving(speed=inf) as (url, server):
        body = {"prompt": "a b c", "max_tokens": 5}
        bad = httpx.post(url + COMPLETIONS, json=body | {"request_id": "bad"}, timeout=60)
        good = httpx.post(url + COMPLETIONS, json=body, timeout=60)
        health = httpx.get(f"{url}/health")
    assert (bad.status_code, good.status_code, health.status_code) == (500, 200, 200)
    assert server.session.parts.blocks.gpu.used == 0


def test_a_whole_answer_is_sent_once_to_a_slow_reader() -> None:
    async def sent() -> list[str]:
        kinds, may = list[str](), asyncio.Event()

        async def send(message: Any) -> None:
            kinds.append(message["type"])
            await may.wait()

        entry = Session(read_config(SMALL)).send(row_of("a", range(40), 5))
        asked = Completion(prompt="a")
        answer = Answer(False, "a", 0, "m")
        Reply({"type": "http"}, None, send, answer, asked, [entry], Options())  # type: ignore[arg-type]
        entry.reason = "length"
        entry.client()
        may.set()
        for _ in range(10):
            await asyncio.sleep(0)
        return kinds

    assert run_apart(sent()) == ["http.response.start", "http.response.body"]


class Behind:
    """A session that never catches up."""

    now_ns = next_ns = 0

    def __init__(self) -> None:
        self.steps, self.until_s = Steps(), time.monotonic() + 20

    def step(self) -> None:
        assert time.monotonic() < self.until_s, "nobody else was heard"


@pytest.mark.parametrize("speed", [1.0, 1e9])
def test_others_are_heard_however_far_behind_a_session_is(speed: float) -> None:
    async def heard() -> None:
        clock = Clock(Behind(), Options(speed=speed), CollectorRegistry())  # type: ignore[arg-type]
        playing = asyncio.ensure_future(clock.play())
        for _ in range(5):
            await asyncio.sleep(0.001)
        clock.closing = True
        await playing

    run_apart(heard())


def test_an_engine_that_stops_ends_everything_with_an_error() -> None:
    config = SMALL | {
        "engine": "vllm-0.6.3",
        "num_gpu_blocks_override": 40,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "preemption_mode": "swap",
        "swap_space": 0,
    }
    with serving(config, speed=inf) as (url, _):
        body = {"prompt": [[k] * 200 for k in range(4)], "max_tokens": 200, "ignore_eos": True}
        answer = httpx.post(url + COMPLETIONS, json=body, timeout=60)
        health = httpx.get(f"{url}/health")
        again = httpx.post(url + COMPLETIONS, json=body)
    assert answer.status_code == again.status_code == 500, answer.text
    assert "swap" in answer.json()["error"]["message"]
    assert health.status_code == 503


def test_lateness_is_measured() -> None:
    with serving(speed=1.0) as (url, server):
        httpx.post(url + COMPLETIONS, json={"prompt": "a", "max_tokens": 20, "ignore_eos": True})
        text = httpx.get(f"{url}/metrics").text
    assert "kvsim:lateness_seconds_count" in text
    said = server.clock.report()
    assert "steps, tokens late by" in said[0]
    late = Server(server.session, "small", Options(speed=1.0)).clock
    late._late_s.extend([0.5] * 10)
    late._steps_s.extend([0.01] * 10)
    assert "exceeds a step" in late.report()[1]


def said(command: str) -> Said:
    return said_in(arguments(command, None))


def test_a_command_says_address_and_name() -> None:
    found = said(
        "vllm serve org/model --port 9001 --host=0.0.0.0 --served-model-name a b"
        ' --kv-events-config \'{"publisher": "zmq"}\' --max-num-seqs 4'
    )
    assert (found.name, found.host, found.port) == ("a", "0.0.0.0", 9001)
    assert found.kv_events_config == '{"publisher": "zmq"}'
    assert said("python -m vllm.entrypoints.openai.api_server --model m").name == "m"
    assert said("vllm serve org/model").name == "org/model"
    assert said("vllm serve m --kv-events-config.topic t").kv_events_config == {"topic": "t"}
    sglang = said("python -m sglang.launch_server --model-path m --served-model-name n --port 1")
    assert (sglang.name, sglang.port) == ("n", 1)
    assert said_in([]).name is None
    with pytest.raises(ConfigError, match=r"vllm serve: .*port"):
        said("vllm serve m --port high")


ADAPTERS = {"sql": "org/sql", "prose": "org/prose"}


def test_adapters_are_models_whose_blocks_are_their_own() -> None:
    asked = {"prompt": list(range(200)), "max_tokens": 2}
    lora = SMALL | {"enable_lora": True, "max_loras": 2}
    with serving(lora, records=True, speed=inf, adapters=ADAPTERS) as (url, server):
        models = httpx.get(f"{url}/v1/models").json()["data"]
        cached = [
            httpx.post(url + COMPLETIONS, json=asked | {"model": name}).json()
            for name in ("small", "sql", "prose", "sql", "small")
        ]
        other = httpx.post(url + COMPLETIONS, json=asked | {"model": "none"})
    assert [(each["id"], each["root"], each["parent"]) for each in models] == [
        ("small", "small", None),
        ("sql", "org/sql", "small"),
        ("prose", "org/prose", "small"),
    ]
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in cached] == [
        *(0, 0, 0, 192, 192)
    ]
    assert cached[1]["model"] == "sql" and other.status_code == 404
    table = server.session.result().requests_frame()
    assert table["lora"].tolist() == ["", "sql", "prose", "sql", ""]


def test_metrics_name_the_adapters_with_requests() -> None:
    lora = SMALL | {"enable_lora": True, "max_loras": 2}
    body = {"prompt": "go", "max_tokens": 900, "ignore_eos": True, "stream": True, "model": "sql"}
    begun_s = time.time()
    with serving(lora, speed=0.01, adapters=ADAPTERS) as (url, _):
        with httpx.stream("POST", url + COMPLETIONS, json=body) as answer:
            next(answer.iter_lines())
            line = next(each for each in httpx.get(f"{url}/metrics").text.splitlines()
                        if each.startswith("vllm:lora_requests_info"))  # fmt: skip
        labels = 'max_lora="2",running_lora_adapters="sql",waiting_lora_adapters="sql"'
        told, value = line.rsplit(" ", 1)
        assert told == f"vllm:lora_requests_info{{{labels}}}"
        assert begun_s <= float(value) <= time.time()
        found = wait_for(lambda: families(url)["vllm:lora_requests_info"].samples, lambda s: s[1:])
    assert found[1].labels == dict.fromkeys(found[1].labels, "") | {"max_lora": "2"}
    assert found[1].value >= found[0].value


def test_adapters_are_named_as_for_vllm() -> None:
    found = said("""vllm serve m --lora-modules a=x/y '{"name": "b", "path": "z"}' --port 1""")
    assert adapters_of(found.lora_modules) == {"a": "x/y", "b": "z"} and found.port == 1
    for wrong in ("a", "{", '{"name": "b"}'):
        with pytest.raises(ConfigError, match="--lora-modules"):
            adapters_of([wrong])
    with pytest.raises(ConfigError, match="--enable-lora"):
        Server(Session(read_config(SMALL)), "m", Options(adapters={"a": "b"}))


def test_an_interval_makes_events_fewer() -> None:
    body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": True}
    with serving(speed=inf, stream_interval=10) as (url, _):
        events = events_of(httpx.post(url + COMPLETIONS, json=body))
    texts = [len(event["choices"][0]["text"].split()) for event in events]
    assert texts == [1, 10, 10, 9]


VLLMS_BOARD = """
    e2e_request_latency_seconds_bucket generation_tokens_total inter_token_latency_seconds_bucket
    kv_cache_usage_perc num_requests_running num_requests_waiting prompt_tokens_total
    request_decode_time_seconds_sum request_generation_tokens_bucket
    request_max_num_generation_tokens_sum request_prefill_time_seconds_sum
    request_prompt_tokens_bucket request_queue_time_seconds_sum request_success_total
    time_to_first_token_seconds_bucket
"""
"""What vLLM's own dashboard asks for: `examples/observability/prometheus_grafana/grafana.json`."""


def test_boards_show_what_is_there() -> None:
    board = json.loads((ROOT / "docs/examples/grafana/vllm.json").read_text())
    with serving(speed=1.0) as (url, _):
        there = {sample.name for each in families(url).values() for sample in each.samples}
    said = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    said += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    used = [set(re.findall(r"\b(?:vllm|kvsim):\w+", each)) for each in said]
    assert len(used) > 10 and all(used)
    assert set().union(*used) <= there
    assert {f"vllm:{name}" for name in VLLMS_BOARD.split()} <= there


def test_a_signal_ends_streams_properly_and_no_prompt_is_written(tmp_path: Path) -> None:
    secret = "xylophonesecret"
    command = [sys.executable, "-m", "kvsim", "serve", "--port", "0", "--out", "run"]
    command += ["--vllm", "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 4096"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            told = process.stdout.readline()
            url = told.split()[-1].removesuffix("/v1")
            body = {"prompt": secret, "max_tokens": 4000, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                begin = next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert begin.startswith("data: ") and rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "abort"
    assert process.returncode == 0
    assert "meta-llama/Llama-3.1-8B-Instruct" in told
    assert "tokens late by" in output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["aborted"] == 1
    for path in (tmp_path / "run").iterdir():
        assert secret.encode() not in path.read_bytes(), path
