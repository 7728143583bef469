"""Small random cases for vLLM 0.6.3: tiny pools, swaps, samples, priorities, few token values.

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
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    number = rng.choice([4, 5, 8, 13, 21, 40, 60])
    room = block_size * number
    chunked, caching = rng.random() < 0.5, rng.random() < 0.6
    max_model_len = rng.choice([room, room, room + 5, max(4, room // 2), 64])
    max_num_seqs = rng.choice([1, 2, 4, 8, 30])
    most = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    most += rng.choice([0, 1, 3, 8, 16, 40])
    if chunked and caching and rng.random() < 0.97:
        most = -(-most // block_size) * block_size
    mode = rng.choice([None, None, None, "swap", "swap", "recompute"])
    return {
        "block_size": block_size,
        "num_gpu_blocks": number,
        "num_cpu_blocks": rng.choice([0, number // 2, 2 * number, 4 * number, 4 * number]),
        "watermark": rng.choice([0.01, 0.01, 0.1, 0.25, 0.5]),
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": most,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": caching,
        "preemption_mode": mode,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "async_output_proc": rng.random() < 0.4,
        "max_steps": 250,
    }


def _trace(rng: Random, config: Row) -> list[Row]:
    room = config["block_size"] * config["num_gpu_blocks"]
    longest = max(1, min(room // rng.choice([1, 2, 4]), config["max_model_len"], 60))
    values = rng.choice([1, 2, 2, 5, 40])
    most = 1 if config["async_output_proc"] else 5
    samples = rng.random() < 0.5
    rows: list[Row] = []
    for number, arrival in enumerate(make_arrivals(rng, rng.randint(1, 20))):
        row: Row = {
            "id": f"r{number}",
            "arrival": arrival,
            "prompt_token_ids": make_prompt(rng, rows, values, longest),
            "output_len": rng.choice([1, 1, 2, rng.randint(1, 12), rng.randint(1, longest)]),
            "priority": rng.choice([0, 0, 0, 1, 2, -1]),
        }
        if samples and rng.random() < 0.6:
            row.update(_samples(rng, row["output_len"], config["max_num_seqs"], most))
        rows.append(row)
    return rows


def _samples(rng: Random, output_len: int, max_num_seqs: int, most: int) -> Row:
    """Several samples, mostly of different lengths; now and then more than can ever run."""
    n = min(rng.randint(1, most), max_num_seqs + (rng.random() < 0.05))
    if rng.random() < 0.3:
        return {"n": n}
    return {"n": n, "output_lens": [rng.randint(1, output_len) for _ in range(n)]}
