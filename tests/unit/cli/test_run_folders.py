"""Every feature of `kvsim run` crossed with every command that reads its folder.

Engines, routers and commands join by themselves; a new flag of `kvsim run` does once a feature uses
it, which a test demands.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command import run_here
from marks import long
from places import ROOT

from kvsim.cli.commands import COMMANDS, load
from kvsim.core.schema import TABLES
from kvsim.engines import ENGINES
from kvsim.fleet import ROUTERS
from kvsim.report import is_fleet
from kvsim.report.files import read_summary
from kvsim.results.ledger import standings

DRAFTS = "--speculative-config " + shlex.quote(
    json.dumps({"method": "ngram", "num_speculative_tokens": 3, "acceptance_rate": 0.5})
)
SIMPLE = "--kv-transfer-config " + shlex.quote(
    json.dumps({"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"})
)
ARC = "--kv-connector-extra-config " + shlex.quote(
    json.dumps({"eviction_policy": "arc", "blocks_per_chunk": 2})
)
LOADED = "--trace plain.jsonl --num-gpu-blocks-override 34 --max-model-len 500"
"""Blocks are scarce, so that whatever can happen to a request happens to some."""

QUICK = {
    "as it is": "",
    "swap": "--engine vllm-0.6.3 --preemption-mode swap --num-cpu-blocks-override 200",
    "chunks": "--engine vllm-0.6.3 --enable-chunked-prefill --max-num-seqs 16"
    " --max-num-batched-tokens 32",
    "sglang": "--engine sglang",
    "offload": "--kv-offloading-size 0.1 --kv-offloading-backend native --block-map",
    "drafts": DRAFTS,
    "pipeline": "--pipeline-parallel-size 2",
    "adapters": "--trace adapters.jsonl --enable-lora --max-loras 2 --max-lora-rank 32",
    "aborts": "--trace aborts.jsonl",
    "fleet": "--replicas 2 --router dynamo-kv --router-set temperature=0.5",
    "split": "--prefill-replicas 1 --decode-replicas 1",
    "engine dies": "--engine vllm-0.6.3 --watermark 0.9 --on-engine-error reject",
}
FEATURES = {
    **QUICK,
    **{f"engine {name}": f"--engine {name}" for name in ENGINES},
    **{f"router {name}": f"--replicas 2 --router {name}" for name in ROUTERS},
    "arc": f"--kv-offloading-size 0.1 {ARC}",
    "simple": SIMPLE,
    "offload and drafts": f"--kv-offloading-size 0.1 {DRAFTS}",
    "offload, steps one by one": "--kv-offloading-size 0.1 --no-async-scheduling",
    "split and drafts": f"--prefill-replicas 2 --decode-replicas 2 {DRAFTS}",
    "ranks": "--data-parallel-size 2",
    "ranks of experts": "--data-parallel-size 2 --model qwen3-30b-a3b --enable-expert-parallel",
    "closed": "--trace closed.jsonl --sessions closed --think-time-scale 0.5 --max-think-time-s 1",
    "closed fleet": "--trace closed.jsonl --replicas 2",
    "windows": "--model gemma-3-1b --num-gpu-blocks-override 300"
    " --prefix-cache-retention-interval none",
    "no windows": "--model gemma-3-1b --num-gpu-blocks-override 300"
    " --disable-hybrid-kv-cache-manager",
    "states": "--model qwen3-next-80b-a3b --tensor-parallel-size 4 --mamba-cache-mode align"
    " --mamba-ssm-cache-dtype float32",
    "latent": "--model deepseek-v2-lite",
    "no cache": "--no-enable-prefix-caching",
    "limits of a step": "--max-num-active-seqs 8 --max-num-scheduled-tokens 64"
    " --long-prefill-token-threshold 32 --long-prefill-token-threshold-adaptive"
    " --prefill-schedule-interval 2",
    "contiguous": "--engine vllm-0.6.3 --block-manager contiguous",
    "samples": "--engine vllm-0.6.3 --n 2",
    "auto": "--engine vllm-0.6.3 --preemption-mode auto --swap-space 1",
    "victims": "--engine vllm-0.6.3 --victim most-computed --disable-async-output-proc",
    "priorities": "--scheduling-policy priority --spread-ties --seed 3",
    "small steps": "--block-size 32 --max-num-seqs 4 --max-num-batched-tokens 64"
    " --long-prefill-token-threshold 32 --no-scheduler-reserve-full-isl",
    "all at once": "--request-rate inf --goodput ttft:500 tpot:50",
    "random": "--request-rate 30 --burstiness inf",
    "few at once": "--max-concurrency 2 --time-scale 0.5 --num-prompts 8",
    "workload": "--workload victims --num-prompts 8 --max-model-len auto"
    " --num-gpu-blocks-override 400",
    "configuration": "--config prefix-caching",
    "server": "--vllm 'vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 8'",
    "memory": "--vllm-version 0.19.0 --hardware h100 --gpu-memory-utilization 0.8 --enforce-eager"
    " --cpu-offload-gb 1 --memory-formula vllm",
    "bytes": "--kv-cache-memory-bytes 1G --dtype bfloat16 --kv-cache-dtype fp8 --quantization fp8",
    "graphs": "--engine sglang --cuda-graph-max-bs 8 --ignore-eos",
    "constant": "--cost-model constant --set cost.step_us=5000 --csv --no-report",
}
"""Feature → flags of `kvsim run`."""

UNUSED = {
    *("--out", "--json", "--step-log", "--trace-format", "--columns", "--startup-log"),
    "--vllm-file",
}
"""Flags of `kvsim run` that change no run: where it is written and in which form its input is."""


def names_of(command: Any) -> list[set[str]]:
    """The names of each option of a command."""
    options = [each for each in command.params if each.param_type_name == "option"]
    return [{*each.opts, *each.secondary_opts} for each in options]


def every_command(inside: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[Any, str]]:
    """Every command, those in groups too, with its words."""
    named = {name: load(name) for name in COMMANDS} if inside is None else inside.commands
    for name, command in named.items():
        if hasattr(command, "commands"):
            yield from every_command(command, (*words, name))
        else:
            yield command, " ".join((*words, name))


@cache
def readers() -> dict[str, Any]:
    """Words → command, of those that take the folder of a run."""
    return {
        words: command
        for command, words in every_command()
        if any((each.metavar or "").startswith("RUN") for each in command.params)
    }


def test_the_commands_that_read_a_folder_are_known_by_their_arguments() -> None:
    reads = re.compile(r"\b(read_results|read_fleet|kind\.read)\(")
    files = (ROOT / "kvsim" / "cli").glob("*.py")
    found = {f"kvsim.cli.{file.stem}" for file in files if reads.search(file.read_text())}
    assert found == {each.callback.__module__ for each in readers().values()}


def test_every_flag_of_a_run_belongs_to_a_feature() -> None:
    used = {word for flags in (LOADED, *FEATURES.values()) for word in shlex.split(flags)}
    left = [names for names in names_of(load("run")) if not names & (used | UNUSED)]
    assert not left, f"give each a feature: {left}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the traces."""
    folder = tmp_path_factory.mktemp("features")
    rows = [
        {
            "id": f"r{i}",
            "arrival_s": 0.1 * (i // 2),
            "input_length": 168 + 7 * (i % 5),
            "output_length": 24 + 9 * (i % 4),
            "prefix": [[f"system {i // 2 % 4}", 128]],
            "priority": i % 3,
        }
        for i in range(16)
    ]
    changes: dict[str, list[dict[str, Any]]] = {
        "plain": [{}] * 16,
        "adapters": [{"lora": ("sql", "legal")[i % 2]} for i in range(16)],
        "aborts": [{} if i % 4 else {"abort_after_s": 0.2} for i in range(16)],
        "closed": [
            {"session": f"s{i // 4}", "after": f"r{i - 1}", "delay_s": 0.1} if i % 4 else {}
            for i in range(16)
        ],
    }
    for name, each in changes.items():
        lines = [{"kvsim_trace": 1}, *map(dict.__or__, rows, each)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def ran(place: Path, feature: str) -> Path:
    """The folder of a run with a feature."""
    out = place / feature
    if not out.exists():
        flags = shlex.split(f"{LOADED} {FEATURES[feature]}")
        done = run_here(["run", *flags, "--out", str(out)], place)
        assert done.returncode == 0, done.stderr
    return out


def folders_of(run: Path) -> list[Path]:
    """The folder of a run, and those of its replicas."""
    return [run, *sorted(run.glob("replica-*"))]


def busiest(folder: Path) -> str:
    """The request of a folder to which most happened."""
    inside = folder / "replica-0" if is_fleet(folder) else folder
    ids = pq.read_table(inside / "requests.parquet")["id"].to_pylist()
    happened = Counter(pq.read_table(inside / "transitions.parquet")["request"].to_pylist())
    return ids[max(happened, key=lambda index: (happened[index], index), default=0)]


def requests_of(folder: Path) -> list[str]:
    """Ids of the requests that a run served, or a replica."""
    ids: list[str] = pq.read_table(folder / "requests.parquet")["id"].to_pylist()
    return ids


def refusal(words: str, folder: Path, other: Path) -> str | None:
    """Why a command rightly refuses a folder, or to compare another one with it."""
    if is_fleet(folder):
        return "holds several replicas" if words == "timeline" else None
    meta = read_summary(folder / "summary.json")["meta"]
    if words == "cache audit" and not meta["prefix_caching"]:
        return "without prefix caching"
    if words == "diff" and requests_of(folder) != requests_of(other):
        return "had different requests"
    return None


def arguments(command: Any, words: str, folder: Path, other: Path, written: Path) -> list[str]:
    """A command's line, with every file that it can write."""
    files = {"--out": str(written / "out"), "--html": str(written / "page.html")}
    given = {"--request": busiest(folder), **files}
    line = words.split()
    for each in command.params:
        if each.param_type_name == "argument":
            line.append(str(other if each.metavar == "RUN_A" else folder))
        elif each.opts[0] in given:
            line += [each.opts[0], given[each.opts[0]]]
    return line


@pytest.mark.parametrize(
    "feature", [each if each in QUICK else pytest.param(each, marks=long) for each in FEATURES]
)
def test_every_command_reads_a_run_with(feature: str, place: Path, tmp_path: Path) -> None:
    run, plain = ran(place, feature), ran(place, "as it is")
    for number, folder in enumerate(folders_of(run)):
        same = not is_fleet(folder) and "--trace" not in FEATURES[feature]
        for words, command in readers().items():
            written = tmp_path / str(number) / words
            written.mkdir(parents=True)
            other = plain if same else folder
            line = arguments(command, words, folder, other, written)
            done, why = run_here(line, place), refusal(words, folder, other)
            assert done.returncode == (2 if why else 0), (line, done.stderr)
            assert (why or "") in done.stderr and done.stderr.count("\n") == bool(why), line


def test_the_quick_features_reach_every_standing_and_every_column(
    place: Path, tmp_path: Path
) -> None:
    """So that the commands above have met them."""
    found: dict[str, set[str]] = {table.name: set() for table in TABLES}
    shown = set()
    for feature in QUICK:
        for folder in folders_of(ran(place, feature)):
            for name, columns in found.items():
                if (folder / f"{name}.parquet").exists():
                    columns.update(pq.read_schema(folder / f"{name}.parquet").names)
            if not is_fleet(folder):
                run_here(["timeline", str(folder), "--out", str(tmp_path / "t.json")])
                events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
                shown |= {event["name"] for event in events}
    assert set(standings.NAMES) <= shown
    assert found == {table.name: {each.name for each in table.columns} for table in TABLES}
