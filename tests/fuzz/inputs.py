"""Malformed files and flags: each is refused in one line, or taken as it says; never half of it.

What is taken has to be right, by a judge of its own for each kind: the plain values of the file,
the run done again, or the result that the folder held before it was damaged.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import random
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from command import run_here
from foreign import SAMPLES
from fuzz.equal import LIMIT_S, assert_equal_runs, imbalance, limited
from fuzz.spoil import NUMBERS, STRANGE, spoil
from hostile.damage import damaged
from places import ROOT
from startup_logs import v0_log, v1_log

from kvsim.errors import KvsimError
from kvsim.machine import load_model
from kvsim.report import read_results
from kvsim.run.simulation import simulate
from kvsim.settings.config import SIZES, RunConfig, load_config, to_table
from kvsim.settings.parsing import human_readable_int
from kvsim.workload import Trace, native, open_trace

REFUSED, TAKEN = "refused", "taken"
SMALL = {"model": "tiny", "num_gpu_blocks_override": 40, "max_model_len": 256}
_CODES = (0, 1, 2)
_LONGEST_LINE = 1500


def check_trace(seed: int, limit_s: float = LIMIT_S) -> str:
    """A spoilt trace of any format."""
    rng = random.Random(f"traces {seed}")
    format = rng.choice(sorted(_traces()))
    with _room(_traces()[format], rng, "trace") as path, limited(limit_s):
        try:
            trace = open_trace(str(path), rng.choice((None, None, format)))
        except KvsimError as error:
            return _refused(error)
        _assert_rows_are_those_of_the_file(trace, path)
        _assert_written_and_read_again(trace)
        if rng.random() < 0.2:
            _command(["cache", "curve", str(path), "--json"])
    engine = rng.choice(("vllm-v1", "vllm-0.6.3", "nano-vllm"))
    settings = SMALL | {"engine": engine, "max_num_batched_tokens": 512}
    if engine == "nano-vllm":
        settings |= {"num_gpu_blocks_override": 4}
    assert_equal_runs(trace, settings, f"traces {seed}", limit_s=limit_s)
    return TAKEN


def check_toml(seed: int, limit_s: float = LIMIT_S) -> str:
    """Spoilt settings: what is taken is what the file says, and runs."""
    rng = random.Random(f"toml {seed}")
    with _room(rng.choice(_settings()), rng, "settings.toml") as path, limited(limit_s):
        try:
            config = load_config(str(path))
        except KvsimError as error:
            return _refused(error)
        taken = to_table(config)
        for key, value in tomllib.loads(path.read_text()).items():
            assert _same(key, value, taken[key]), f"{key}: {value!r} became {taken[key]!r}"
        return _run(config)


def check_description(seed: int, limit_s: float = LIMIT_S) -> str:
    """A spoilt model (TOML or `config.json`), GPU, workload, start-up log or command line."""
    rng = random.Random(f"descriptions {seed}")
    name, data = rng.choice(_descriptions())
    with _room(data, rng, name) as path, limited(limit_s):
        if name == "config.json":
            try:
                model = load_model(str(path))
            except KvsimError as error:
                return _refused(error)
            said = json.loads(path.read_bytes())
            for key in _GEOMETRY & said.keys() if "text_config" not in said else ():
                assert getattr(model, key) == said[key], f"{key}: {said[key]!r} became another"
            return _run({"model": str(path), "max_model_len": "auto"})
        match name:
            case "model.toml":
                return _run({"model": str(path), "max_model_len": "auto"})
            case "hardware.toml":
                return _run({"hardware": str(path), "model": "tiny"})
            case "workload.toml":
                asked = ["--workload", str(path), "--num-prompts", "5"]
            case "server.log":
                asked = ["--trace", "chat", "--num-prompts", "5", "--startup-log", str(path)]
            case _:
                asked = ["--trace", "chat", "--num-prompts", "5", "--vllm-file", str(path)]
        return _command(["run", *asked, "--json"])[0]


def check_profile(seed: int, limit_s: float = LIMIT_S) -> str:
    """A spoilt profile of kernels: what is taken prices steps, each time the same."""
    rng = random.Random(f"profiles {seed}")
    with _room(rng.choice(_profiles()), rng, "profile.json") as path:
        if rng.random() < 0.1:
            with limited(limit_s):
                return _command(["profile", "show", str(path)])[0]
        settings = {"cost": {"model": "table", "profile": str(path)}, "num_prompts": 5}
        run = assert_equal_runs(_chat(), settings, f"profiles {seed}", limit_s=limit_s)
        if run.result is None:
            return REFUSED
        assert (run.result.steps["end_ns"] > run.result.steps["start_ns"]).all()
        return TAKEN


def check_flags(seed: int, limit_s: float = LIMIT_S) -> str:
    """A command with strange flags: a setting that is taken is the one that was given."""
    rng = random.Random(f"flags {seed}")
    strange = [_word_of(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    keys = [rng.choice(RunConfig.__struct_fields__) for _ in strange]
    name, *command = rng.choice(_COMMANDS)
    if name != "run":
        words = [*command, *strange]
        if rng.random() < 0.5:
            rng.shuffle(words)
    else:
        flags = [f"--{key.replace('_', '-')}" for key in keys]
        words = [*command, *(word for pair in zip(flags, strange, strict=True) for word in pair)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), limited(limit_s):
        end, printed = _command([*name.split(), *words])
        if end == TAKEN and name == "run" and printed.startswith("{"):
            taken = json.loads(printed)["meta"]["config"]
            for key, word in dict(zip(keys, strange, strict=True)).items():
                if isinstance(taken.get(key), bool):  # its flag takes no word
                    continue
                found = taken.get(key)
                assert _same(key, word, found), f"{key}: {word!r} became {found!r}"
    return f"{name}: {end}"


def check_folder(seed: int, limit_s: float = LIMIT_S) -> str:
    """A damaged run folder: refused, or its figures are those that it held before."""
    whole, before = _whole_run()
    with tempfile.TemporaryDirectory() as room, limited(limit_s):
        folder = Path(room) / "run"
        fault = damaged(whole, folder, seed)
        end, _ = _command(["report", str(folder)])
        words = random.Random(seed).choice(
            (
                ["why", str(folder), "--request", "3"],
                ["timeline", str(folder), "--out", f"{room}/t.json"],
                ["diff", str(folder), str(whole), "--json"],
                ["diff", str(whole), str(folder), "--out", f"{room}/diff"],
                ["cache", "audit", str(folder), "--out", f"{room}/audit.html"],
            )
        )
        _command(words)
        if end == TAKEN:
            now = _figures(read_results(str(folder))[0])
            assert now == before, f"{fault}: other figures are taken"
    return end


def check_fleet_folder(seed: int, limit_s: float = LIMIT_S) -> str:
    """A damaged folder of a fleet: what reads it, or one of its replicas, refuses it or works."""
    with tempfile.TemporaryDirectory() as room, limited(limit_s):
        folder = Path(room) / "fleet"
        damaged(_whole_fleet(seed % 3 == 0), folder, seed)
        words = random.Random(seed).choice(
            (
                ["cache", "audit", str(folder)],
                ["cache", "audit", str(folder), "--out", f"{room}/audit.html"],
                ["cache", "audit", str(folder / "replica-1"), "--json"],
                ["report", str(folder / "replica-0")],
                ["report", str(folder)],
                ["diff", str(folder), str(_whole_fleet(seed % 3 == 0))],
            )
        )
        return _command(words)[0]


INPUTS: dict[str, Callable[..., str]] = {
    "traces": check_trace,
    "toml": check_toml,
    "descriptions": check_description,
    "profiles": check_profile,
    "flags": check_flags,
    "folders": check_folder,
    "fleet-folders": check_fleet_folder,
}
"""Kind of malformed input -> what checks the case of a seed."""

_GEOMETRY = frozenset({"num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"})
_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_MIXED: dict[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        **_LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
}
_SPLIT = ("run ", "--trace", "chat", "--num-prompts", "3", "--prefill-replicas", "1")
_COMMANDS: tuple[tuple[str, ...], ...] = (
    *[("run", "--trace", "chat", "--num-prompts", "5", "--json")] * 8,
    ("run ", "--trace", "chat", "--num-prompts", "3", "--replicas", "2", "--router-set"),
    ("run ", "--trace", "chat", "--num-prompts", "3", "--replicas", "2", "--router"),
    ("run ", "--trace", "chat", "--num-prompts", "3", "--json", "--replicas"),
    (*_SPLIT, "--decode-replicas"),
    (*_SPLIT, "--decode-replicas", "1", "--kv-transfer-config"),
    ("run ", "--trace", "chat", "--num-prompts", "3", "--pipeline-parallel-size"),
    ("run ", "--trace", "chat", "--num-prompts", "3", "--speculative-config"),
    ("run ", "--trace", "chat", "--num-prompts", "3", "--data-parallel-size"),
    ("compare", "naive", "prefix-caching", "--trace", "chat", "--num-prompts", "3"),
    ("sweep", "--trace", "chat", "--num-prompts", "3", "--jobs", "1", "--out", "o", "--grid"),
    ("size", "--trace", "chat", "--num-prompts", "3", "--jobs", "1", "--slo", "--find"),
    ("trace synth", "--requests", "5", "--out", "o.jsonl"),
    ("trace info",),
    ("trace convert", "chat", "o.jsonl", "--to"),
    ("trace check", "chat"),
    ("cache curve",),
    ("cache curve", "chat", "--model", "tiny", "--gib"),
    ("cache curve", "chat", "--json", "--warm-up"),
    ("cache sample", "chat", "--capacity", "64", "--rate"),
    ("cache policies", "chat", "--block-size", "512", "--capacity", "9", "--policy"),
    ("cache audit",),
    ("cache stream",),
    ("crossover", "--tokens", "64"),
    ("profile show",),
    ("policies",),
    ("why", "--request"),
    ("report",),
    ("diff",),
    ("timeline", "--out", "t.json"),
)
"""Commands; what follows the first of the words are arguments that make sense."""
_WORDS = (
    *("x", "", " ", "-", "--", "-1", "--help", "1K", "1k", "2M", "auto", "inf", "nan", "true"),
    *(
        "tiny",
        "llama-3-8b",
        "h100",
        "naive",
        "chat",
        "random",
        "kvsim:__name__",
        "os:system",
        "a:b",
    ),
    *("seed=1,2", "max_num_seqs=2,8", "max_num_seqs=lin(1,4,2)", "p99_ttft<2s", "ttft:5", "a.b=c"),
    *("num_gpu_blocks_override", "request_rate", "\udcff", "\x1b[31m", "/", "/dev/null"),
    *("." * 300, "a:b", "32", "64", "8192", "0.5", "100", "fcfs", "float16", "7"),
    *("gpt-oss-20b", "sglang", "lru", "arc", "sglang-slru", "least-loaded", "sglang-cache_aware"),
    *("temperature=0.5", "cache_threshold=x", "use_kv_events=false", "cost.link.block_us=2"),
)


def _word_of(rng: random.Random) -> str:
    if rng.random() < 0.45:
        return rng.choice(_WORDS)
    raw = rng.choice(NUMBERS if rng.random() < 0.6 else STRANGE).replace(b"\0", b"")
    return raw.decode(errors="surrogateescape")


@contextlib.contextmanager
def _room(data: bytes, rng: random.Random, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(spoil(data, rng))
        yield path


def _command(words: list[str]) -> tuple[str, str]:
    """How a command ends in this process, and what it prints."""
    done = run_here(words)
    assert done.returncode in _CODES, f"exit code {done.returncode}: {words}"
    if done.returncode != 2:
        return TAKEN, done.stdout
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    one = len(lines) == 1 and lines[0].startswith("kvsim: ") and len(lines[0]) < _LONGEST_LINE
    assert one or (not lines and "Usage" in done.stdout), f"{words}: {lines}"
    return REFUSED, done.stdout


def _refused(error: KvsimError) -> str:
    text = str(error)
    assert text and len(text.splitlines()) == 1 and len(text) < _LONGEST_LINE, repr(text)
    return REFUSED


def _run(config: RunConfig | Mapping[str, Any]) -> str:
    try:
        result = simulate(_chat(), config)
        found = imbalance(result)
    except KvsimError as error:
        return _refused(error)
    assert not found, found
    return TAKEN


def _assert_rows_are_those_of_the_file(trace: Trace, path: Path) -> None:
    """Lengths as a plain reading of the lines gives them, for formats that keep every row."""
    if trace.format not in ("native", "mooncake"):
        return
    lines = [line for line in _text(path).splitlines() if line.strip()]
    tables = [json.loads(line) for line in lines[trace.format == "native" :]]
    for key in ("input_length", "output_length"):
        said = sorted(table[key] for table in tables)
        # Mooncake has outputs of 0 tokens, which count as 1.
        assert [max(1, length) for length in said] == sorted(_lengths(trace, key)), key


def _lengths(trace: Trace, key: str) -> list[int]:
    return [getattr(row, key) for row in trace.rows]


def _text(path: Path) -> str:
    import gzip

    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    return data.decode("utf-8-sig").replace("\u2028", "").replace("\x85", "")


def _assert_written_and_read_again(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/again.jsonl"
        native.write(trace, path)
        again = open_trace(path)
    for ours, theirs in zip(trace.rows, again.rows, strict=True):
        for key in _KEPT:
            old, new = getattr(ours, key), getattr(theirs, key)
            assert old == new, f"row {ours.index}: {key}: {old!r}, read again {new!r}"


_KEPT = (
    *("input_length", "output_length", "content", "after"),
    *("session", "turn", "priority", "salt", "scope"),
)


def _same(key: str, given: Any, taken: Any) -> bool:
    """Whether a setting has the value that was given, as a file or a flag writes it."""
    if taken == given or str(taken) == str(given):
        return True
    if isinstance(given, dict):
        return isinstance(taken, dict) and given.items() <= taken.items()
    if key in SIZES and str(given).strip() in ("auto", "-1", "AUTO"):
        return taken == "auto" or isinstance(taken, int)  # A result has the length that fits.
    if key in SIZES:
        return bool(taken == _size(given))
    if isinstance(taken, bool) or taken is None:
        return False
    try:
        return float(taken) == float(given) or taken != taken
    except (TypeError, ValueError):
        return False


def _size(given: Any) -> int:
    return human_readable_int(given) if isinstance(given, str) else int(given)


@cache
def _traces() -> dict[str, bytes]:
    """Format -> a small sound file of it."""
    files = {name: text.encode() for name, text in SAMPLES.items()}
    lines = (ROOT / "traces" / "chat.jsonl").read_bytes().splitlines(keepends=True)
    agents = (ROOT / "traces" / "agents.jsonl").read_bytes().splitlines(keepends=True)
    return files | {"native": b"".join(lines[:12]), "native ": b"".join(agents[:12])}


@cache
def _settings() -> list[bytes]:
    wide = {key: value for key, value in to_table(RunConfig()).items() if value is not None}
    rows = (f"{key} = {json.dumps(value)}\n" for key, value in wide.items() if value != {})
    files = sorted((ROOT / "configs" / "runs").glob("*.toml"))
    texts = ["".join(rows)] * 10 + list(_FEATURES) * 4
    return [path.read_bytes() for path in files] + [text.encode() for text in texts]


_FEATURES = (
    """engine = "vllm-v1"
hardware = "h100"
model = "gpt-oss-20b"
kv_offloading_size = 0.5
prefix_cache_retention_interval = 64
disable_hybrid_kv_cache_manager = false
num_gpu_blocks_override = 900
max_model_len = 2048
cost.link.block_us = 100
[kv_connector_extra_config]
blocks_per_chunk = 2
eviction_policy = "arc"
store_threshold = 2
max_tracker_size = 100
offload_prompt_only = false
sync_load_budget_bytes = 1000000
""",
    """engine = "sglang"
block_size = 16
num_gpu_blocks_override = 300
max_model_len = 2048
max_num_batched_tokens = 512
async_scheduling = true
[scheduler_args]
schedule_policy = "lpm"
schedule_conservativeness = 0.3
max_prefill_tokens = 1024
prefill_max_requests = 4
max_queued_requests = 100
enable_mixed_chunk = true
prefill_decode_interval = 2
retraction_policy = "length"
environment = {init_new_token_ratio = 0.5}
[block_manager_args]
radix_eviction_policy = "slru"
""",
    """engine = "vllm-v1"
hardware = "h100"
model = "qwen3-next-80b-a3b"
tensor_parallel_size = 4
mamba_cache_mode = "align"
max_model_len = 4096
[block_manager_args]
""",
    """engine = "vllm-v1"
hardware = "h100"
model = "llama-3-8b"
pipeline_parallel_size = 2
max_model_len = 2048
enable_lora = true
max_loras = 2
max_lora_rank = 8
cost.stage_link.latency_us = 20.0
cost.stage_link.bandwidth_gb_s = 10.0
cost.front_end.request_ms = 3.0
""",
    """engine = "vllm-v1"
hardware = "h100"
model = "llama-3-8b"
max_model_len = 2048
data_parallel_size = 1
[speculative_config]
method = "eagle3"
num_speculative_tokens = 3
acceptance_rate = 0.7
""",
    """engine = "vllm-v1"
hardware = "h100"
model = "llama-3-8b"
max_model_len = 2048
cost.kv_transfer.bandwidth_gb_s = 20.0
cost.kv_transfer.handshake_ms = 10.0
[kv_transfer_config]
kv_connector = "NixlConnector"
kv_role = "kv_producer"
[kv_transfer_config.kv_connector_extra_config]
kv_lease_duration = 10
""",
)
"""Settings of groups of layers, of a tier in CPU memory, of SGLang, of a pipeline, of drafts, and
of a prefill/decode split."""


@cache
def _descriptions() -> list[tuple[str, bytes]]:
    found = [("config.json", json.dumps(each, indent=1).encode()) for each in (_LLAMA, _MIXED)] * 4
    for name in (
        *("tiny", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-2-2b"),
        *("gpt-oss-20b", "qwen3-next-80b-a3b"),
    ):
        found.append(("model.toml", (ROOT / f"configs/models/{name}.toml").read_bytes()))
    found += [("hardware.toml", (ROOT / "configs/hardware/l4.toml").read_bytes())] * 2
    for path in (ROOT / "configs" / "workloads").glob("*.toml"):
        found.append(("workload.toml", path.read_bytes()))
    found += [("server.log", v0_log().encode()), ("server.log", v1_log().encode())]
    command = "vllm serve meta-llama/Meta-Llama-3-8B --max-model-len 8K --block-size 16 \\\n"
    command += "  --gpu-memory-utilization 0.9 --max-num-seqs=64 --no-enable-prefix-caching\n"
    return [*found, ("s.sh", command.encode()), ("sglang.sh", _SGLANG.encode())]


_SGLANG = """SGLANG_INIT_NEW_TOKEN_RATIO=0.5 python3 -m sglang.launch_server \\
  --model-path meta-llama/Llama-3.1-8B --page-size 16 --schedule-policy lpm --tp 2 \\
  --mem-fraction-static 0.8 --chunked-prefill-size 2048 --radix-eviction-policy slru \\
  --max-running-requests 64 --schedule-conservativeness 0.5 --enable-mixed-chunk
"""


@cache
def _profiles() -> list[bytes]:
    folder = ROOT / "configs" / "hardware"
    return [path.read_bytes() for path in (folder / "cpu-small.json",)]


@cache
def _chat() -> Trace:
    trace = open_trace("chat")
    del trace.rows[5:]
    return trace


@cache
def _whole_run() -> tuple[Path, dict[str, Any]]:
    """A sound run with a block map, which lasts as long as this process, and its figures."""
    folder = _ran("--block-map")
    return folder, _figures(read_results(str(folder))[0])


@cache
def _whole_fleet(split: bool) -> Path:
    """A sound run of two replicas, which lasts as long as this process; `split`: one computes
    prompts for the other."""
    kind = ("--prefill-replicas", "1", "--decode-replicas", "1") if split else ("--replicas", "2")
    return _ran(*kind)


def _ran(*how: str) -> Path:
    """The folder of a small run."""
    folder = Path(tempfile.mkdtemp()) / "run"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    small = ["--num-gpu-blocks-override", "150", "--max-model-len", "2048", "--num-prompts", "25"]
    words = ["run", "--trace", "chat", *small, "--out", str(folder), "--no-report", *how]
    assert _command(words)[0] == TAKEN
    return folder


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Of a summary, to twelve digits; those of gaps between tokens are in no table."""
    kept = {key: value for key, value in summary.items() if key != "meta" and "_itl_" not in key}
    rounded: dict[str, Any] = json.loads(
        json.dumps(kept), parse_float=lambda text: float(f"{float(text):.12g}")
    )
    return rounded
