"""Traces and settings drawn from a seed: every engine, every manager, small and short of memory."""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from places import ROOT

from kvsim.policies.eviction import EVICTIONS
from kvsim.workload import HashContent, ParentContent, Row, SegmentContent, TokenContent, Trace
from kvsim.workload.trace import Content

TICK_NS = 10_000_000
ENGINES = (
    "vllm-0.6.3",
    "vllm-0.6.3",
    "vllm-0.6.3",
    "vllm-v1",
    "vllm-v1",
    "vllm-v1",
    "vllm-0.3.3",
    "nano-vllm",
    "nano-vllm-2025-08",
    "sglang",
)
"""As often as there is something in them to be found."""
MANAGERS = {
    "vllm-0.3.3": (None,),
    "vllm-0.6.3": (None, "naive", "prefix-caching", "contiguous"),
    "vllm-v1": (None, "vllm-v1", "vllm-v1-prefix-caching", "naive"),
    "nano-vllm": (None,),
    "nano-vllm-2025-08": (None,),
    "sglang": (None,),
}
"""Engine -> its block managers; None: as `enable_prefix_caching` says."""
RULES: dict[str, tuple[str, ...]] = {
    "growth": ("one-each", "when-needed"),
    "idle_order": ("stack", "top-stack", "queue"),
    "eviction": ("vllm-0.6.3", "lru", *EVICTIONS),
    "publish_at": ("allocation", "computed"),
    "hits_save": ("computation", "charge", "admission"),
    "full_hit": ("last-block", "last-token", "nothing"),
}
"""Argument of a block manager -> its values."""
_SHARING = ("publish_at", "hits_save", "full_hit")
RULES_OF = {
    "naive": ("growth", "idle_order"),
    "prefix-caching": ("growth", "idle_order", "eviction", *_SHARING),
    "vllm-v1-prefix-caching": ("eviction",),
    "nano-vllm": ("eviction", *_SHARING),
    "nano-vllm-2025-08": ("eviction", *_SHARING),
}
"""Block manager -> the rules that can be set."""
VICTIMS = ("tail", "head", "least-computed", "most-computed", "random", "cost-aware", "priority")


# -- load --------------------------------------------------------------------------------------


def draw_trace(rng: random.Random) -> Trace:
    """Requests in one of many shapes of load, with one or several kinds of content."""
    trace = Trace("drawn", "native", "", [])
    trace.block_size = rng.choice((1, 2, 3, 4, 7, 16, 64))
    trace.hash_kind = rng.choice(("prefix", "prefix", "content"))
    trace.partial_hash = rng.random() < 0.5
    kinds = rng.choice(("none", "tokens", "hashes", "hashes", "segments", "parents", "mixed"))
    salts: tuple[str | None, ...] = rng.choice(((None,), (None,), (None, "s"), (None, "s", "t")))
    sessions = rng.random() < 0.25
    longest = rng.choice((6, 12, 40, 90, 200))
    outputs = rng.choice((1, 3, 12, 60, 150))
    gap_ns = _draw_gaps(rng)
    now_ns = 0
    for index in range(rng.choice((1, 2, rng.randrange(3, 12), rng.randrange(3, 40)))):
        now_ns += gap_ns()
        length = rng.randrange(1, longest + 1)
        output = rng.choice((1, rng.randrange(1, outputs + 1)))
        kind = rng.choice(tuple(_CONTENTS)) if kinds == "mixed" else kinds
        content = _CONTENTS[kind](rng, trace, length, output)
        row = Row(index, f"r{index}", index + 2, now_ns, length, output, content)
        row.salt = rng.choice(salts)
        row.priority = rng.randrange(3)
        if isinstance(content, HashContent):
            row.input_length, row.output_length = _lengths_of(content, trace, row)
        if sessions and index and rng.random() < 0.6:
            row.after = rng.randrange(index)
            row.delay_ns = rng.choice((0, TICK_NS, rng.randrange(3 * TICK_NS)))
        trace.rows.append(row)
    return trace


def draw_heirs(rng: random.Random) -> Trace:
    """Requests whose outputs are in the prompts, or the outputs, of others."""
    trace = Trace("drawn", "native", "", [], block_size=rng.choice((1, 2, 4)), hash_kind="prefix")
    now_ns = 0
    for index in range(rng.randrange(3, 25)):
        now_ns += rng.choice((0, 0, TICK_NS, 3 * TICK_NS, rng.randrange(30 * TICK_NS)))
        length, output = rng.randrange(1, 30), rng.randrange(1, rng.choice((4, 40, 80)))
        content: Content | None = None
        draw = rng.random()
        if draw < 0.4:
            # All of them have the same text, some of them more of it.
            content = TokenContent((0,) * length, (0,) * output)
        elif draw < 0.8 and index:
            parent = rng.choice(trace.rows)
            most = parent.input_length + parent.output_length
            keep = rng.randrange(most + 1)
            length = keep + rng.randrange(1, 9)
            content = ParentContent(parent.index, keep)
        trace.rows.append(Row(index, f"r{index}", index + 2, now_ns, length, output, content))
    return trace


def draw_pressure(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings with small blocks, and a pool in which somebody has to give way."""
    size = rng.choice((1, 1, 2, 4))
    longest = rng.choice((60, 120, 200))
    blocks = longest // size + rng.choice((1, 3, 20, 60))
    small = {"block_size": size, "max_model_len": longest, "num_gpu_blocks_override": blocks}
    tokens = {"max_num_batched_tokens": max(64, longest)}
    return {**settings, **small, **tokens, "max_num_seqs": rng.choice((3, 8, 32))}


def _draw_gaps(rng: random.Random) -> Callable[[], int]:
    """Gaps between arrivals: bursts, ties with the clock of the engine, or sparse requests."""
    shape = rng.choice(("at once", "bursts", "ties", "sparse", "odd"))
    if shape == "at once":
        return lambda: 0
    if shape == "bursts":
        return lambda: rng.randrange(1, 60) * TICK_NS if rng.random() < 0.2 else 0
    if shape == "ties":
        return lambda: rng.randrange(0, 12) * TICK_NS
    if shape == "sparse":
        return lambda: rng.randrange(20, 200) * TICK_NS
    return lambda: rng.randrange(0, 5 * TICK_NS)


def _unique(rng: random.Random, trace: Trace, length: int, output: int) -> Content | None:
    return None


def _tokens(rng: random.Random, trace: Trace, length: int, output: int) -> Content:
    known = [row.content for row in trace.rows if isinstance(row.content, TokenContent)]
    prompt = [rng.randrange(2)] * length
    if known and rng.random() < 0.5:
        earlier = rng.choice(known)
        prompt = [*earlier.prompt, *(earlier.output or ()), *prompt][:length]
    made = tuple([rng.randrange(2)] * output) if rng.random() < 0.5 else None
    return TokenContent(tuple(prompt), made)


def _hashes(rng: random.Random, trace: Trace, length: int, output: int) -> Content:
    """The ids of a family or of an earlier stream, then ids of its own, chained as a file's are."""
    assert trace.block_size is not None
    index, size = len(trace.rows), trace.block_size
    known = [row.content for row in trace.rows if isinstance(row.content, HashContent)]
    if known and rng.random() < 0.1:
        return rng.choice(known)
    full, tail = divmod(length, size)
    partial = bool(trace.partial_hash and tail)
    family = 1_000 * rng.randrange(3)
    stream = [family + place for place in range(full)]
    if known and rng.random() < 0.4:
        earlier = rng.choice(known)
        stream = [start for start, _ in earlier.prompt if start < 10**8]
        stream += [start for start, _ in earlier.output]
    shared = rng.randrange(min(full, len(stream)) + 1)
    own = 10**6 + 1_000 * index
    ids = stream[:shared] + [own + place for place in range(full - shared)]
    ids += [10**8 + index] * partial
    most = 0 if partial else (length + output) // size - full
    made = [own + 500 + place for place in range(rng.choice((0, most)))]
    return HashContent(tuple((each, 1) for each in ids), tuple((each, 1) for each in made))


def _lengths_of(content: HashContent, trace: Trace, row: Row) -> tuple[int, int]:
    """The lengths of the row that has this content already, or else its own."""
    for earlier in trace.rows:
        if earlier.content is content:
            return earlier.input_length, earlier.output_length
    return row.input_length, row.output_length


def _segments(rng: random.Random, trace: Trace, length: int, output: int) -> Content:
    left, segments = length, []
    while left and rng.random() < 0.7:
        name = rng.choice("abc")
        tokens = min(left, {"a": 5, "b": 16, "c": 33}[name])
        segments.append((name, tokens))
        left -= tokens
    return SegmentContent(tuple(segments))


def _parents(rng: random.Random, trace: Trace, length: int, output: int) -> Content | None:
    if not trace.rows:
        return None
    parent = rng.choice(trace.rows)
    most = min(length, parent.input_length + parent.output_length)
    return ParentContent(parent.index, rng.choice((most, rng.randrange(most + 1))))


_CONTENTS: dict[str, Callable[[random.Random, Trace, int, int], Content | None]] = {
    "none": _unique,
    "tokens": _tokens,
    "hashes": _hashes,
    "segments": _segments,
    "parents": _parents,
}


# -- settings ----------------------------------------------------------------------------------


def draw_settings(rng: random.Random, engine: str = "", manager: str = "") -> dict[str, Any]:
    """An engine with some of its knobs turned; it and its manager are drawn where not given."""
    engine = engine or rng.choice(ENGINES)
    settings = draw_room(rng, smallest_block=2 if engine.startswith("nano") else 1)
    settings |= {"engine": engine, "cost": draw_cost(rng)} | draw_clients(rng)
    chosen = manager or rng.choice(MANAGERS[engine])
    if chosen is not None:
        settings["block_manager"] = chosen
    settings |= {
        "vllm-0.3.3": _draw_vllm033,
        "vllm-0.6.3": _draw_vllm063,
        "vllm-v1": _draw_vllm_v1,
        "nano-vllm": _draw_nano,
        "nano-vllm-2025-08": _draw_nano,
        "sglang": _draw_sglang,
    }[engine](rng, settings)
    _draw_choices(rng, settings)
    _draw_rules(rng, settings)
    return settings


def draw_room(rng: random.Random, smallest_block: int = 1) -> dict[str, Any]:
    """A pool, often of very few blocks, and what may be in it."""
    size = max(smallest_block, rng.choice((1, 2, 3, 4, 7, 8, 16, 32, 64)))
    blocks = rng.choice((rng.randrange(2, 21), rng.randrange(2, 21), rng.randrange(20, 200)))
    room = blocks * size
    longest = min(room, rng.choice((room, rng.randrange(2, room + 1), 60, 160, 400)))
    return {
        "model": "tiny",
        "block_size": size,
        "num_gpu_blocks_override": blocks,
        "num_cpu_blocks_override": rng.choice((0, 5, 20, 200)),
        "max_model_len": longest,
        "max_num_seqs": rng.choice((1, 2, 5, 16, 64)),
        "seed": rng.randrange(1_000),
        "on_engine_error": rng.choice(("stop", "reject")),
    }


def draw_cost(rng: random.Random) -> dict[str, Any]:
    """A cost model: with ties of all clocks, with odd numbers, or of many terms."""
    draw = rng.random()
    if draw < 0.1:
        return {"model": "roofline"}
    if draw < 0.2:
        return {"model": "fuzz.outsiders:Longest"}
    if draw < 0.4:
        return {"model": "constant"}
    if draw < 0.6:
        terms = {"step_us": 7_000, "prefill_token_us": 1_000}
        return {"model": "constant", **terms, "decode_seq_us": 300.001, "context_token_ns": 1_003}
    tick_us = TICK_NS // 1_000
    return {
        "model": "constant",
        "step_us": tick_us,
        "prefill_token_us": rng.choice((0, 0, tick_us)),
        "decode_seq_us": rng.choice((0, tick_us)),
        "context_token_ns": 0,
    }


def draw_clients(rng: random.Random) -> dict[str, Any]:
    """How the requests of a trace are sent."""
    settings: dict[str, Any] = {}
    if rng.random() < 0.3:
        settings["max_concurrency"] = rng.randrange(1, 8)
    if rng.random() < 0.1:
        settings["sessions"] = "recorded"
    if rng.random() < 0.1:
        settings["request_rate"] = rng.choice((2.0, 20.0, float("inf")))
    if rng.random() < 0.1:
        settings["time_scale"] = rng.choice((0.1, 3.0))
    return settings


def _draw_vllm063(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    manager = settings.get("block_manager")
    drawn: dict[str, Any] = {"watermark": rng.choice((0.0, 0.0, 0.01, 0.1, 0.3))}
    if manager is None:
        drawn["enable_prefix_caching"] = rng.random() < 0.5
    size, seqs = settings["block_size"], settings["max_num_seqs"]
    if rng.random() < 0.45:
        drawn["enable_chunked_prefill"] = True
        tokens = max(seqs, rng.choice((1, 2, 7, 16, 64, 512)))
        drawn["max_num_batched_tokens"] = -(-tokens // size) * size
    elif rng.random() < 0.5:
        drawn["max_num_batched_tokens"] = max(seqs, settings["max_model_len"])
    if rng.random() < 0.2:
        drawn["scheduling_policy"] = "priority"
    swaps = manager != "contiguous"
    if rng.random() < 0.2:
        drawn["n"] = rng.randrange(2, 4)
    elif rng.random() < 0.4:
        drawn["disable_async_output_proc"] = True
    if swaps and rng.random() < 0.4:
        drawn["preemption_mode"] = rng.choice(("swap", "swap", "recompute", "auto"))
    return drawn


def _draw_sglang(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    drawn: dict[str, Any] = {"async_scheduling": rng.random() < 0.5}
    drawn["max_num_batched_tokens"] = rng.choice((1, 2, 16, 64, 512))
    drawn["enable_prefix_caching"] = cached = rng.random() < 0.7
    if rng.random() < 0.2:
        drawn["enable_chunked_prefill"] = False
    policies = ("fcfs", "lof", "routing-key", "lpm", "dfs-weight", "hrrn")
    args: dict[str, Any] = {"schedule_policy": rng.choice(policies)}
    if rng.random() < 0.6:
        args["schedule_conservativeness"] = rng.choice((0.01, 0.1, 0.5, 2.0))
    if rng.random() < 0.2:
        args |= {"schedule_policy": "fcfs", "enable_priority_scheduling": True}
    if rng.random() < 0.3:
        args["enable_mixed_chunk"] = True
    if rng.random() < 0.2:
        args["prefill_decode_interval"] = rng.choice((1, 3))
    if rng.random() < 0.2:
        args["max_queued_requests"] = rng.choice((1, 3))
    if cached:
        eviction = rng.choice(("lru", "lfu", "slru", "priority", "tlru"))
        drawn["block_manager_args"] = {"radix_eviction_policy": eviction}
    return drawn | {"scheduler_args": args}


def _draw_vllm_v1(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    seqs, longest = settings["max_num_seqs"], settings["max_model_len"]
    drawn: dict[str, Any] = {"async_scheduling": rng.random() < 0.5}
    drawn["max_num_batched_tokens"] = max(seqs, rng.choice((1, 2, 16, 64, 512)))
    if "block_manager" not in settings and rng.random() < 0.5:
        drawn["enable_prefix_caching"] = False
    if rng.random() < 0.15:
        drawn["enable_chunked_prefill"] = False
        drawn["max_num_batched_tokens"] = max(seqs, longest)
    if rng.random() < 0.2:
        drawn["scheduling_policy"] = "priority"
    if rng.random() < 0.2:
        drawn["scheduler_reserve_full_isl"] = False
    if rng.random() < 0.2:
        drawn["long_prefill_token_threshold"] = rng.choice((1, 5, 20))
    if rng.random() < 0.3:
        drawn["watermark"] = rng.choice((0.01, 0.1, 0.3))
    return drawn


def draw_features(rng: random.Random) -> dict[str, Any]:
    """vLLM V1 with a model whose layers differ, a tier in CPU memory, or both."""
    settings = draw_settings(rng, "vllm-v1")
    if rng.random() < 0.9:  # The others name a manager, or its rules, which groups do not have.
        settings.pop("block_manager", None)
        settings.pop("block_manager_args", None)
    drawn = rng.choice((("model",), ("tier",), ("model", "tier")))
    if rng.random() < 0.8:  # The others may be longer than the blocks of all groups hold.
        settings["max_model_len"] = max(2, settings["max_model_len"] // 3)
    if "model" in drawn:
        settings["model"] = rng.choice(layered_models())
        if Path(settings["model"]).stem == COMPRESSED and rng.random() < 0.95:
            settings["block_size"] = 256  # Others are refused.
        if rng.random() < 0.3:
            settings["disable_hybrid_kv_cache_manager"] = True
        if rng.random() < 0.5:
            size = settings["block_size"]
            settings["prefix_cache_retention_interval"] = rng.choice(("none", 0, size, 4 * size))
    if "tier" in drawn:
        settings["kv_offloading_size"] = rng.choice((1e-5, 1e-4, 1e-4, 1e-3))
        settings["cost"] = {**settings["cost"], "link": {"block_us": rng.choice((1, 300, 10_000))}}
        extra = {key: rng.choice(values) for key, values in TIER.items() if rng.random() < 0.3}
        settings["kv_connector_extra_config"] = extra
    return settings


TIER: dict[str, tuple[Any, ...]] = {
    "blocks_per_chunk": (1, 2, 3),
    "eviction_policy": ("lru", "arc"),
    "store_threshold": (0, 2, 3),
    "max_tracker_size": (1, 100),
    "offload_prompt_only": (True, False),
    "sync_load_budget_bytes": (0, 10_000, 1 << 30),
}
"""Argument of the tier in CPU memory -> its values."""


@cache
def layered_models() -> tuple[str, ...]:
    """Files of small models: windows and full attention, windows only, chunks, states, layers of
    unlike sizes, and compressed ones. They last as long as this process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    plain = (ROOT / "configs" / "models" / "tiny.toml").read_text()
    for name, lines in _LAYERED.items():
        (folder / f"{name}.toml").write_text(plain.replace('"tiny"', f'"{name}"') + lines)
    return tuple(sorted(str(path) for path in folder.iterdir()))


COMPRESSED = "compressed"
_MIXED = "layer_types = [{first!r}, 'full_attention']\n"
_LAYERED = {
    "windows": "sliding_window = 9\n" + _MIXED.format(first="sliding_attention"),
    "wide": "sliding_window = 70\n" + _MIXED.format(first="sliding_attention"),
    "only-windows": "sliding_window = 24\n",
    "chunks": "attention_chunk_size = 32\n" + _MIXED.format(first="chunked_attention"),
    "states": _MIXED.format(first="linear_attention")
    + "[linear]\nlinear_num_key_heads = 1\nlinear_num_value_heads = 1\nlinear_key_head_dim = 8\n"
    "linear_value_head_dim = 8\nlinear_conv_kernel_dim = 2\n",
    "unlike": "sliding_window = 9\n"
    + _MIXED.format(first="sliding_attention")
    + "[heads.full_attention]\nnum_attention_heads = 4\nnum_key_value_heads = 1\nhead_dim = 16\n",
    COMPRESSED: "sliding_window = 128\n[compressed]\nq_lora_rank = 32\no_lora_rank = 32\n"
    "o_groups = 2\nqk_rope_head_dim = 8\ncompress_ratios = [4, 128]\n"
    "[indexer]\nindex_n_heads = 2\nindex_head_dim = 8\nindex_topk = 16\n",
}
"""Name of a model -> what makes it one, in TOML."""


def _draw_vllm033(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    drawn: dict[str, Any] = {"watermark": rng.choice((0.0, 0.01, 0.1, 0.3))}
    drawn["max_num_batched_tokens"] = max(settings["max_num_seqs"], settings["max_model_len"])
    if rng.random() < 0.3:
        drawn["n"] = rng.randrange(2, 4)
    if rng.random() < 0.4:
        drawn["preemption_mode"] = rng.choice(("swap", "recompute", "auto"))
    if rng.random() < 0.2:
        drawn["scheduler_args"] = {"max_paddings": rng.choice((1, 20))}
    if rng.random() < 0.2:
        drawn["block_manager_args"] = {"sliding_window": settings["block_size"] * 3}
    return drawn


def _draw_nano(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    tokens = rng.choice((4, 16, 64, 512))
    if settings["engine"] == "nano-vllm-2025-08":
        tokens = max(tokens, settings["max_model_len"])
    return {"max_num_batched_tokens": tokens}


def _draw_choices(rng: random.Random, settings: dict[str, Any]) -> None:
    """Who gives way, and where it waits, where that is for the user to choose."""
    if settings["engine"] == "sglang":
        return
    if rng.random() < 0.3:
        settings["victim"] = rng.choice(VICTIMS)
    if rng.random() < 0.15:
        requeue = rng.choice(("tail", "arrival", "kvsim.policies.requeue:tail"))
        if "scheduling_policy" in settings:
            requeue = "priority"
        settings["scheduler_args"] = {**settings.get("scheduler_args", {}), "requeue": requeue}


def _draw_rules(rng: random.Random, settings: dict[str, Any]) -> None:
    """Rules of the block manager other than its engine's."""
    rules = RULES_OF.get(_manager_of(settings), ())
    if rng.random() < 0.4:
        chosen = [rule for rule in rules if rng.random() < 0.4]
        drawn = {rule: rng.choice(RULES[rule]) for rule in chosen}
        if drawn:
            settings["block_manager_args"] = drawn


def _manager_of(settings: dict[str, Any]) -> str:
    if "block_manager" in settings:
        return str(settings["block_manager"])
    engine, caching = settings["engine"], settings.get("enable_prefix_caching", True)
    if engine == "vllm-0.6.3":
        return "prefix-caching" if caching else "naive"
    if engine == "vllm-v1":
        return "vllm-v1-prefix-caching" if caching else "vllm-v1"
    return str(engine)


def draw_configuration(seed: int) -> tuple[Trace, dict[str, Any]]:
    """The case of a seed."""
    rng = random.Random(seed)
    return draw_trace(rng), draw_settings(rng)
