"""Small random cases for nano-vllm: tiny pools, few token values, many ties.

`make_case(seed)` returns a config and a trace of the step-log format, the same for the same seed.
"""

from random import Random

from exact.conformance.generate_prompts import Row, make_arrivals, make_prompt


def make_case(seed: int) -> tuple[Row, list[Row]]:
    """A configuration and the requests to run under it."""
    rng = Random(seed)
    block_size = rng.choice([2, 2, 2, 3, 4, 7, 16])
    number = rng.choice([3, 4, 5, 6, 8, 13, 21, 40])
    config = {
        "block_size": block_size,
        "num_gpu_blocks": number,
        "max_num_seqs": rng.choice([1, 2, 3, 5, 8, 30]),
        "max_num_batched_tokens": rng.choice([5, 17, 40, 64, 200, 200]),
        "max_steps": 250,
    }
    values = rng.choice([1, 2, 2, 3, 5, 40])
    longest = max(1, min(block_size * number * rng.randint(1, 4) // 4, 60))
    words = rng.random() < 0.5
    rows: list[Row] = []
    for index, arrival in enumerate(make_arrivals(rng, rng.randint(1, 22))):
        prompt = make_prompt(rng, rows, values, longest)
        if words:
            prompt = _words(rng, block_size, longest) + prompt[: rng.randint(0, block_size)] or [0]
        rows.append(
            {
                "id": f"r{index}",
                "arrival": arrival,
                "prompt_token_ids": prompt,
                "output_len": rng.choice([1, 1, 2, rng.randint(1, 12), rng.randint(1, longest)]),
            }
        )
    return config, rows


def _words(rng: Random, block_size: int, longest: int) -> list[int]:
    """Whole blocks, each of one repeated token: the same blocks behind different beginnings."""
    number = rng.randint(1, max(1, longest // block_size))
    tokens = [rng.choice([1, 2]), *rng.choices([1, 5], k=number - 1)]
    return [token for token in tokens for _ in range(block_size)]
