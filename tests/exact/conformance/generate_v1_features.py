"""Small random cases for vLLM V1 with features: tiny pools and tiers, few token values, many ties.

`make_case(family, seed)` returns a config and a trace of the step-log format, the same for the same
family and seed.
"""

from random import Random

from exact.conformance.generate_prompts import Row, make_arrivals, make_prompt
from exact.conformance.generate_v1_groups import make_case as make_groups

FAMILIES = ("misc", "offload", "simple", "spec", "pd", "pp", "mixed")
"""What a case is about: requests with wishes, the two CPU tiers, drafts, prefill/decode roles,
pipelines, and everything together."""


def make_case(family: str, seed: int) -> tuple[Row, list[Row]]:
    """A configuration and the requests to run under it."""
    rng = Random(f"{family}/{seed}")
    config = _base(rng)
    if family != "misc" and rng.random() < (0.5 if family == "mixed" else 0.25):
        config |= _groups(rng, config)
    if family in ("offload", "simple", "pd"):
        config |= CONNECTORS[family](rng)
    if family == "mixed" and rng.random() < 0.8:
        config |= CONNECTORS[rng.choice(sorted(CONNECTORS))](rng)
    if family == "pp":
        config["pipeline_parallel_size"] = rng.choice([2, 2, 3, 4])
        config |= CONNECTORS["offload"](rng) if rng.random() < 0.4 else {}
    drafts = {"spec": 1.0, "mixed": 0.4, "simple": 0.2, "pp": 0.2}.get(family, 0.0)
    # Drafts in a synchronous pipeline are not in the rules.
    if rng.random() < drafts and (family != "pp" or config["v1_async"]):
        config["spec"] = _spec(rng)
        config |= {"kv_groups": _unmarked(config)} if "kv_groups" in config else {}
    if family in ("misc", "mixed") and rng.random() < 0.5:
        config["max_loras"] = rng.choice([1, 1, 2, 3])
    return config, _trace(rng, config, family)


def _base(rng: Random) -> Row:
    size = rng.choice([1, 2, 2, 3, 4, 8, 16])
    seqs = rng.choice([1, 2, 3, 5, 8, 15])
    most = rng.choice([28, 40, 77, 120])
    blocks = -(-most // size)
    return {
        "block_size": size,
        "num_gpu_blocks": 1 + max(2, int(blocks * rng.choice([0.6, 1.0, 1.0, 1.5, 2.0, 4.0]))),
        "max_model_len": most,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": seqs + rng.choice([0, 3, 7, 16, 40, 200]),
        "enable_prefix_caching": rng.random() < 0.8,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "v1_async": rng.random() < 0.5,
        "v1_watermark": rng.choice([0.0, 0.0, 0.05, 0.2]),
        "v1_reserve_full_isl": rng.random() < 0.7,
        "v1_enable_chunked_prefill": rng.random() < 0.85,
        "long_prefill_token_threshold": rng.choice([0, 0, 5, 20]),
        "max_steps": 250,
    }


def _groups(rng: Random, config: Row) -> Row:
    """Groups of attention layers, from the cases that are about groups."""
    while True:
        other, _ = make_groups(rng.randrange(1 << 30))
        kinds = {group["type"] for group in other["kv_groups"]}
        if "mamba" not in kinds and "full" in kinds:
            break
    groups = [{k: v for k, v in group.items() if k != "eagle"} for group in other["kv_groups"]]
    return {
        "kv_groups": groups,
        "prefix_cache_retention_interval": other["prefix_cache_retention_interval"],
        "num_gpu_blocks": config["num_gpu_blocks"] * len(groups),
    }


def _unmarked(config: Row) -> list[Row]:
    """Chunked attention does not go with EAGLE."""
    return [group for group in config["kv_groups"] if group["type"] != "chunked"]


def _offload(rng: Random) -> Row:
    return {
        "kv_connector": "offloading",
        "offload": {
            "cpu_chunks": rng.choice([2, 5, 12, 30, 80]),
            "blocks_per_chunk": rng.choice([1, 1, 2, 3]),
            "eviction_policy": rng.choice(["lru", "arc"]),
            "store_threshold": rng.choice([0, 0, 2, 3]),
            "max_tracker_size": rng.choice([3, 10, 64_000]),
            "offload_prompt_only": rng.random() < 0.5,
            "sync_load_budget_bytes": rng.choice([0, 0, 60, 400]),
            "load_steps": rng.choice([0, 1, 1, 3]),
            "store_steps": rng.choice([0, 1, 1, 3, 6]),
        },
    }


def _simple(rng: Random) -> Row:
    return {
        "kv_connector": "simple",
        "simple": {
            "cpu_blocks": rng.choice([3, 8, 25, 80]),
            "lazy_offload": rng.random() < 0.4,
            "load_steps": rng.choice([0, 1, 1, 3, 6]),
            "store_steps": rng.choice([0, 1, 1, 3, 8]),
        },
    }


def _nixl(rng: Random) -> Row:
    return {
        "kv_connector": "nixl",
        "kv_role": rng.choice(["kv_producer", "kv_consumer", "kv_both"]),
        "nixl": {
            "send_steps": rng.choice([0, 1, 3, 8]),
            "send_spread": rng.choice([0, 0, 4]),
            "load_steps": rng.choice([0, 1, 3, 8]),
            "load_spread": rng.choice([0, 0, 4]),
        },
    }


CONNECTORS = {"offload": _offload, "simple": _simple, "pd": _nixl}


def _spec(rng: Random) -> Row:
    spec: Row = {
        "num_spec_tokens": rng.randint(1, 5),
        "method": rng.choice(["ngram", "eagle", "eagle", "draft_model", "dflash"]),
    }
    for key in ("disable_lookahead_block_hashes", "disable_eagle_block_drop"):
        if rng.random() < 0.3:
            spec[key] = True
    if rng.random() < 0.2:
        spec["accept"] = rng.randint(0, spec["num_spec_tokens"])
    return spec


def _trace(rng: Random, config: Row, family: str) -> list[Row]:
    longest = min(config["max_model_len"] - 1, rng.choice([30, 60, 110]))
    values = rng.choice([1, 2, 2, 5, 40])
    wishes, pd = rng.random() < 0.7, config.get("kv_connector") == "nixl"
    rows: list[Row] = []
    for number, arrival in enumerate(make_arrivals(rng, rng.randint(1, 20))):
        row: Row = {
            "id": f"r{number}",
            "arrival": arrival,
            "prompt_token_ids": make_prompt(rng, rows, values, longest),
            "output_len": rng.choice([1, 1, 2, rng.randint(1, 12), rng.randint(1, longest)]),
            "priority": rng.choice([0, 0, 0, 1, 2, -1]),
        }
        if family == "misc" or wishes:
            row |= _wishes(rng, arrival, "max_loras" in config)
        if pd:
            row |= _part(rng, config["kv_role"])
        rows.append(row)
    return rows


def _wishes(rng: Random, arrival: float, adapters: bool) -> Row:
    row: Row = {}
    if adapters and rng.random() < 0.7:
        row["lora"] = rng.choice("ABCD")
    if rng.random() < 0.2:
        row["cache_salt"] = rng.choice(["x", "y"])
    if rng.random() < 0.15:
        row["n"] = rng.randint(2, 3)
    if rng.random() < 0.25:
        row["abort"] = arrival + rng.choice([0, 0.5, 1, 3, 8, 20])
        row["abort_mid"] = rng.random() < 0.4
    if rng.random() < 0.15:
        row["grammar_ready"] = arrival + rng.choice([0, 0.5, 2, 7])
    if rng.random() < 0.15:
        row["skip_prefix_read"] = True
    return row


def _part(rng: Random, role: str) -> Row:
    parts = {"kv_producer": ["prefill"], "kv_consumer": ["decode"]}
    part = rng.choice([*parts.get(role, ["prefill", "decode"]), None])
    return {"pd": part} if part else {}
