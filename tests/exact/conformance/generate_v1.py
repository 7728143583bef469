"""Small random cases for vLLM V1: tiny pools, few token values, many ties.

`make_case(seed)` returns a config and a trace of the step-log format, the same for the same seed.
"""

from random import Random

from exact.conformance.generate_prompts import Row, make_arrivals, make_prompt


def make_case(seed: int) -> tuple[Row, list[Row]]:
    """A configuration and the requests to run under it."""
    rng = Random(seed)
    config = _config(rng)
    return config, _trace(rng, config)


def _config(rng: Random) -> Row:
    block_size = rng.choice([1, 1, 2, 3, 4, 5, 8, 16])
    usable = rng.choice([1, 3, 5, 8, 13, 21, 40, 60])
    room = block_size * usable
    max_num_seqs = rng.choice([1, 2, 3, 5, 8, 30])
    return {
        "block_size": block_size,
        "num_gpu_blocks": usable + 1,
        "max_model_len": rng.choice([7, room, room + 1, 2 * room, 120, 120]),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice([0, 1, 3, 7, 16, 40, 200]),
        "enable_prefix_caching": rng.random() < 0.6,
        "policy": rng.choice(["fcfs", "priority"]),
        "v1_async": rng.random() < 0.5,
        "v1_watermark": rng.choice([0.0, 0.0, 0.05, 0.2, 0.5]),
        "v1_reserve_full_isl": rng.random() < 0.6,
        "v1_enable_chunked_prefill": rng.random() < 0.8,
        "long_prefill_token_threshold": rng.choice([0, 0, 1, 4, 12]),
        "max_steps": 250,
    }


def _trace(rng: Random, config: Row) -> list[Row]:
    room = config["block_size"] * (config["num_gpu_blocks"] - 1)
    longest = max(1, min(room, config["max_model_len"] - 1, 60))
    values = rng.choice([1, 2, 2, 5, 40])
    rows: list[Row] = []
    for number, arrival in enumerate(make_arrivals(rng, rng.randint(1, 22))):
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
