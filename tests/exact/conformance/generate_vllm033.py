"""Small random cases for vLLM 0.3.3: tiny pools, swaps, samples, windows, declared prefixes.

`make_case(seed)` returns a config and a trace of the step-log format, the same for the same seed.
"""

from random import Random

from exact.conformance.generate_prompts import Row, make_arrivals, make_prompt

CROWDED: Row = {
    "num_gpu_blocks": 18,
    "num_cpu_blocks": 99,
    "watermark": 0.01,
    "sliding_window": None,
    "max_model_len": 40,
    "max_num_seqs": 30,
    "max_num_batched_tokens": 90,
    "preemption_mode": None,
}
"""Where preempted requests return and meet others: some recomputed, some swapped."""


def make_case(seed: int) -> tuple[Row, list[Row]]:
    """A configuration and the requests to run under it."""
    rng = Random(seed)
    config = _config(rng)
    crowded = rng.random() < 0.4
    if crowded:
        config.update(CROWDED)
    values = rng.choice([1, 2, 5, 40])
    room = config["block_size"] * config["num_gpu_blocks"]
    longest = max(1, min(room // rng.choice([1, 2, 4]), config["max_model_len"], 40))
    samples, prefixes = crowded or rng.random() < 0.4, rng.random() < 0.35
    if crowded:
        longest = min(longest, 8)
    rows: list[Row] = []
    for index, arrival in enumerate(make_arrivals(rng, rng.randint(1, 22))):
        row: Row = {
            "id": f"r{index}",
            "arrival": arrival,
            "prompt_token_ids": make_prompt(rng, rows, values, longest),
            "output_len": rng.choice([1, rng.randint(1, 12), rng.randint(1, 30)]),
        }
        if samples and rng.random() < 0.6:
            row.update(_samples(rng, row["output_len"], config["max_num_seqs"]))
        if prefixes and rng.random() < 0.6:
            row["prefix_pos"] = rng.randint(1, len(row["prompt_token_ids"]))
        rows.append(row)
    return config, rows


def _samples(rng: Random, output_len: int, max_num_seqs: int) -> Row:
    """Several samples, mostly of different lengths; now and then more than can ever run."""
    n = min(rng.randint(2, 4), max_num_seqs + (rng.random() < 0.05))
    if rng.random() < 0.3:
        return {"n": n}
    return {"n": n, "output_lens": [rng.randint(1, output_len) for _ in range(n)]}


def _config(rng: Random) -> Row:
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    number = rng.choice([3, 5, 8, 13, 21, 40, 60])
    max_model_len = rng.choice([20, 40, 64])
    max_num_seqs = rng.choice([1, 4, 8, 30, 30])
    windows = [block_size, 2 * block_size, 20 * block_size]
    return {
        "block_size": block_size,
        "num_gpu_blocks": number,
        "num_cpu_blocks": rng.choice([2, number, 4 * number, 4 * number]),
        "watermark": rng.choice([0.01, 0.01, 0.01, 0.05, 0.2]),
        "sliding_window": rng.choice(windows) if rng.random() < 0.3 else None,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(max_model_len + rng.choice([0, 23, 50, 200]), max_num_seqs),
        "max_paddings": rng.choice([0, 10, 256]),
        "preemption_mode": rng.choice([None, None, None, None, "swap", "recompute"]),
        "max_steps": 250,
    }
