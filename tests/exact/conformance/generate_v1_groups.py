"""Small random cases for KV cache groups of vLLM V1: tiny pools and windows, few token values.

`make_case(seed)` returns a config and a trace of the step-log format, the same for the same seed.
"""

from math import lcm
from random import Random

from exact.conformance.generate_prompts import Row, make_arrivals, make_prompt


def make_case(seed: int) -> tuple[Row, list[Row]]:
    """A configuration and the requests to run under it."""
    rng = Random(seed)
    config = _config(rng)
    return config, _trace(rng, config)


def _config(rng: Random) -> Row:
    caching = rng.random() < 0.8
    most = rng.choice([40, 77, 120])
    spec = _spec(rng) if rng.random() < 0.3 else None
    drops = bool(spec) and spec["method"] == "eagle"
    states = rng.random() < 0.45
    groups = _states(rng, caching, most) if states else _windows(rng, chunks=not drops)
    if drops and rng.random() < 0.3:
        rng.choice(groups)["eagle"] = True
    align = lcm(*(group["block_size"] for group in groups))
    blocks = sum(-(-most // group["block_size"]) for group in groups)
    seqs = rng.choice([1, 2, 3, 5, 8, 15])
    config = {
        "block_size": groups[0]["block_size"],
        "num_gpu_blocks": 1 + max(2, int(blocks * rng.choice([0.4, 0.8, 1.0, 1.5, 3.0]))),
        "max_model_len": most,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": seqs + rng.choice([0, 3, 7, 16, 40, 200]),
        "enable_prefix_caching": caching,
        "prefix_cache_retention_interval": rng.choice(
            [0, 0, 0, None, None, align, 2 * align, 4 * align]
        ),
        "kv_groups": groups,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "v1_async": rng.random() < 0.5,
        "v1_watermark": rng.choice([0.0, 0.0, 0.05, 0.2]),
        "v1_reserve_full_isl": rng.random() < 0.7,
        "v1_enable_chunked_prefill": rng.random() < 0.85,
        "long_prefill_token_threshold": rng.choice([0, 0, 5, 20]),
        "max_steps": 200,
    }
    return config | ({"spec": spec} if spec else {})


def _windows(rng: Random, chunks: bool) -> list[Row]:
    """Groups of attention layers. Chunked attention takes neither EAGLE nor several block sizes."""
    size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    kinds: list[Row] = [{"type": "full"}]
    kinds += [{"type": "sliding", "window": rng.choice([1, 2, 5, 9, 20, 38])} for _ in range(2)]
    sizes = [size]
    if chunks and rng.random() < 0.5:
        kinds.append({"type": "chunked", "chunk": rng.choice([3, 8, 16, 24])})
    elif rng.random() < 0.4:
        sizes = [size, 2 * size, 3 * size]
    groups = [
        rng.choice(kinds) | {"block_size": rng.choice(sizes)} for _ in range(rng.randint(1, 4))
    ]
    return [dict(group) for group in groups]


def _states(rng: Random, caching: bool, most: int) -> list[Row]:
    """Groups of state-space layers, most of them beside full attention."""
    size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    state: Row = {"type": "mamba", "block_size": size if caching else most}
    if rng.random() < 0.6:
        state |= {"checkpoint": True, "checkpoint_alignment": rng.choice([1, 1, 2, 3, 4, 8])}
    groups = [dict(state) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.8:
        groups.append({"type": "full", "block_size": size})
    if rng.random() < 0.2:
        groups.append({"type": "sliding", "window": rng.choice([2, 9, 20]), "block_size": size})
    rng.shuffle(groups)
    return groups


def _spec(rng: Random) -> Row:
    spec: Row = {
        "num_spec_tokens": rng.randint(1, 4),
        "method": rng.choice(["ngram", "eagle", "eagle", "eagle", "draft_model", "dflash"]),
    }
    for key in ("disable_lookahead_block_hashes", "disable_eagle_block_drop"):
        if rng.random() < (0.5 if "lookahead" in key else 0.15):
            spec[key] = True
    return spec


def _trace(rng: Random, config: Row) -> list[Row]:
    longest = min(config["max_model_len"] - 1, rng.choice([30, 60, 110]))
    values = rng.choice([1, 2, 2, 5, 40])
    rows: list[Row] = []
    for number, arrival in enumerate(make_arrivals(rng, rng.randint(1, 20))):
        rows.append(
            {
                "id": f"r{number}",
                "arrival": arrival,
                "prompt_token_ids": make_prompt(rng, rows, values, longest),
                "output_len": rng.choice([1, 1, 2, rng.randint(1, 12), rng.randint(1, longest)]),
                "priority": rng.choice([0, 0, 0, 1, 2, -1]),
            }
        )
    return rows
