"""Real clients talk to the simulated server. Each is installed here, so they take minutes."""

from __future__ import annotations

import json
import subprocess
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvsim.against.serve.kv_events import KVEvents, KVEventsConfig, Publisher
from kvsim.against.serve.session import Session
from kvsim.core.host import NEVER_NS
from kvsim.run.simulation import read_config
from kvsim.workload.streams import TokenStream
from tests.support.clients import installed
from tests.support.marks import long, whole
from tests.support.serving import SMALL, serving
from tests.unit.against.serve.test_http import families, values
from tests.unit.against.serve.test_kv_events import free_port
from tests.unit.against.serve.test_session import made_trace, prompt_of

pytestmark = [long, whole]


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A program at work, which is ended afterwards."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


OPENAI = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=30, stream=True,
    stream_options={"include_usage": True}, extra_body={"ignore_eos": True})
*tokens, last = stream
print(len("".join(each.choices[0].delta.content for each in tokens).split()))
print(last.usage.completion_tokens, tokens[-1].choices[0].finish_reason)
done = client.completions.create(
    model=model, prompt=[1, 2, 3], max_tokens=5, extra_body={"ignore_eos": True})
print(done.usage.total_tokens, done.usage.prompt_tokens_details.cached_tokens)
"""


def test_the_client_of_openai(tmp_path: Path) -> None:
    python = installed(tmp_path, "openai==3.57.0") / "python"
    with serving(speed=inf) as (url, _):
        done = subprocess.run([python, "-c", OPENAI, url], capture_output=True, text=True)
    assert done.stdout.split() == ["30", "30", "length", "8", "0"], done.stderr


def test_vllm_router_before_two_replicas(tmp_path: Path) -> None:
    router, port = installed(tmp_path, "vllm-router==0.1.17") / "vllm-router", free_port()
    with serving(speed=inf) as (one, _), serving(speed=inf) as (other, _):
        command = [router, "--worker-urls", one, other, "--policy", "cache_aware"]
        with running(*command, "--port", str(port), "--prometheus-port", str(free_port())):
            url, answers = f"http://127.0.0.1:{port}/v1/completions", []
            until = time.monotonic() + 60
            while len(answers) < 12:
                body = {"model": "small", "prompt": "the same words again " * 20, "max_tokens": 4}
                try:
                    answer = httpx.post(url, json=body, timeout=30)
                except httpx.TransportError:
                    assert time.monotonic() < until, "the router does not answer"
                    time.sleep(0.5)
                    continue
                answers.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        served = [
            values(families(each), "generation_tokens", "_total")[""] for each in (one, other)
        ]
    assert answers[0] == 0 and answers[-1] > 0
    assert min(served) == 0 < max(served), "requests that begin alike go to one replica"


VLLM_BENCH = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[2])
import aiohttp
from endpoint_request_func import RequestFuncInput, async_request_openai_chat_completions
from endpoint_request_func import async_request_openai_completions
async def main(url):
    asked = dict(prompt_len=100, output_len=25, model="small", ignore_eos=True)
    async with aiohttp.ClientSession() as session:
        for path, send, prompt in (
            ("completions", async_request_openai_completions, list(range(100))),
            ("chat/completions", async_request_openai_chat_completions, "some words " * 50),
        ):
            given = RequestFuncInput(prompt=prompt, api_url=f"{url}/v1/{path}", **asked)
            found = await send(given, session)
            print(found.success, found.output_tokens, len(found.itl), found.prompt_len, found.error)
asyncio.run(main(sys.argv[1]))
"""


def test_the_requests_of_vllm_bench_serve(tmp_path: Path) -> None:
    programs = installed(tmp_path, "aiohttp==3.14.5", "regex", "tqdm", "pip")
    wheel = [programs / "pip", "download", "-q", "--no-deps", "-d", tmp_path, "vllm==0.33.0"]
    done = subprocess.run(wheel, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"vllm cannot be had: {done.stderr.splitlines()[-1]}")
    with zipfile.ZipFile(next(tmp_path.glob("vllm-*.whl"))) as files:
        name = "vllm/benchmarks/lib/endpoint_request_func.py"
        (tmp_path / Path(name).name).write_bytes(files.read(name))
    with serving(speed=1.0) as (url, _):
        command = [programs / "python", "-c", VLLM_BENCH, url, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [["True", "25"]] * 2, done.stderr
    assert lines[0][3] == "100" and all(0 < int(line[2]) <= 24 for line in lines)


TOKENIZER = """
import json
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
letters = {each: k for k, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
made = Tokenizer(models.BPE(letters, []))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
Path("bytes").mkdir()
made.save("bytes/tokenizer.json")
said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"}
Path("bytes/tokenizer_config.json").write_text(json.dumps(said))
"""


def run_with_tokenizer(folder: Path, programs: Path, *command: str) -> None:
    """Runs a load generator with a tokenizer that needs no network: each byte is a token."""
    for each in ([programs / "python", "-c", TOKENIZER], [programs / command[0], *command[1:]]):
        done = subprocess.run(each, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr


def test_aiperf(tmp_path: Path) -> None:
    programs = installed(tmp_path, "aiperf==0.13.0")
    load = "--request-count 20 --concurrency 4 --isl 100 --osl 20 --extra-inputs ignore_eos:true"
    with serving(speed=10.0) as (url, _):
        command = (
            f"aiperf profile --model small --url {url} --endpoint-type chat --streaming {load}"
        )
        further = "--tokenizer bytes --use-server-token-count --artifact-dir out --ui none"
        run_with_tokenizer(tmp_path, programs, *f"{command} {further}".split())
        found = families(url)
    said = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert said["request_count"]["avg"] == 20 and said["output_sequence_length"]["min"] == 20
    assert said["time_to_first_token"]["min"] > 0
    scraped = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())
    assert "vllm:generation_tokens" in json.dumps(scraped)
    assert values(found, "request_success", "_total")["length"] >= 20


def test_guidellm(tmp_path: Path) -> None:
    programs = installed(tmp_path, "guidellm==0.8.1")
    with serving(speed=10.0) as (url, _):
        run_with_tokenizer(
            *(tmp_path, programs, "guidellm", "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},model=small"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", "kind=max_requests,count=12"),
            *("--tokenizer", "kind=hf_auto,model=bytes"),
            *("--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=20"),
            *("--output", "kind=json,path=out.json"),
        )
        found = families(url)
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    done = benchmark["requests"]["successful"]
    assert len(done) == 12 and {each["output_tokens"] for each in done} == {20}
    assert values(found, "request_success", "_total")["length"] >= 12


DYNAMO = """
import asyncio, json, sys
from dynamo.llm import SelectionService
async def main():
    service = SelectionService()
    await service.upsert_worker({
        "worker_id": 1, "model_name": "small", "block_size": 16, "endpoint": "http://127.0.0.1:1",
        "kv_events_endpoint": sys.argv[1], "data_parallel_size": 1, "total_kv_blocks": 119,
        "max_num_batched_tokens": 256})
    print('ready', flush=True)
    for line in sys.stdin:
        asked = {"model_name": "small", "token_ids": json.loads(line)}
        print(json.dumps(await service.overlap_scores(asked)), flush=True)
asyncio.run(main())
"""


def overlap(process: subprocess.Popen[str], tokens: list[int]) -> int:
    """Leading blocks of a prompt that Dynamo's router believes to be cached."""
    ask, answer = process.stdin, process.stdout
    assert ask is not None and answer is not None
    print(json.dumps(tokens), file=ask, flush=True)
    found = json.loads(next(line for line in answer if line[0] == "{"))
    return int(found["workers"][0]["device_blocks"])


def test_dynamos_router_knows_the_cache_after_every_step(tmp_path: Path) -> None:
    python = installed(tmp_path, "ai-dynamo-runtime==1.6.1") / "python"
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    publisher = Publisher(KVEventsConfig(endpoint=endpoint))
    session, trace = Session(read_config(SMALL)), made_trace(60, 5)
    events, pool = KVEvents(16, session.asked.of), session.parts.blocks.gpu
    assert session.parts.blocks.report(events)
    prompts = [prompt_of(row) for row in trace.rows]
    looked_up = [TokenStream(each).keys(0, len(each) // 16, 16) for each in prompts]
    steps: list[int] = []
    with running(python, "-c", DYNAMO, endpoint) as dynamo:
        assert dynamo.stdout is not None
        assert "ready" in (line.strip() for line in dynamo.stdout)
        time.sleep(1)  # A subscription takes its time, and nobody tells when it is there.

        def compare(*_: Any) -> None:
            if (batch := events.batch(0)) is None:
                return
            publisher.publish(batch)
            known = {pool.keys[pool.content(k)] for k in range(1, pool.fresh) if pool.content(k)}
            place = len(steps) % len(prompts)
            keys = looked_up[place]
            expected = next((k for k, key in enumerate(keys) if key not in known), len(keys))
            until = time.monotonic() + 5
            while (found := overlap(dynamo, list(prompts[place]))) != expected:
                assert time.monotonic() < until, (len(steps), found, expected)
            steps.append(expected)

        session.steps.listeners.append(compare)
        for row in trace.rows:
            session.send(row)
        while session.next_ns < NEVER_NS:
            session.step()
    publisher.close()
    assert len(steps) > 200 and sum(each > 0 for each in steps) > 50
