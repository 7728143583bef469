"""Small random cases for SGLang: tiny pools, few token values, odd pages, every policy.

`make_case(seed)` returns a config and a trace of the step-log format, the same for the same seed.
"""

from random import Random
from typing import Any

from exact.conformance.generate_prompts import Row, make_arrivals, make_prompt

AWARE = ["lpm", "dfs-weight", "hrrn", "shortest-prefill-first"]


def make_case(seed: int) -> tuple[Row, list[Row]]:
    """A configuration and the requests to run under it."""
    rng = Random(seed)
    size = rng.choice([1, 1, 1, 2, 3, 4, 7, 16])
    pool = rng.choice([60, 80, 120, 200, 400, 900])
    config: Row = {
        "max_total_num_tokens": pool + rng.randrange(size + 3),
        "page_size": size,
        "context_len": rng.choice([40, 100, 200, 8000]),
        "max_running_requests": rng.choice([1, 2, 3, 5, 9, 64]),
        "chunked_prefill_size": rng.choice([None, 3, 8, 17, 32, 64, 131, 512]),
        "max_prefill_tokens": rng.choice([5, 16, 40, 100, 16384, 16384]),
        "overlap": rng.random() < 0.5,
        "enable_mixed_chunk": rng.random() < 0.3,
        "disable_radix_cache": rng.random() < 0.2,
        "ignore_eos": rng.random() < 0.2,
        "schedule_conservativeness": rng.choice([0.01, 0.1, 0.3, 0.5, 1.0, 2.0]),
        "radix_eviction_policy": rng.choice(["lru", "lru", "lfu", "slru", "priority", "tlru"]),
        "max_steps": 200,
    }
    _choose_policy(rng, config)
    if config["radix_eviction_policy"] == "tlru":
        config["radix_eviction_policy_config"] = {
            "threshold": rng.choice([0, 10, 40]),
            "next_prompt_estimate": rng.choice([0, 5, 30]),
        }
    rare: dict[str, list[Any]] = {
        "prefill_max_requests": [1, 2, 4],
        "max_queued_requests": [1, 2, 5],
        "min_free_slots_delay": [2, 3],
        "prefill_decode_interval": [1, 3, 8],
        "prefill_decode_interval_min_bs": [1, 3],
        "new_token_ratio_decay_steps": [1, 10, 40],
        "retract_decode_steps": [1, 5, 60],
        "clip_max_new_tokens": [1, 3, 20],
        "init_new_token_ratio": [0.1, 1.0],
        "in_batch_check_threshold": [0, 4],
        "in_batch_deprioritize_threshold": [2, 4, 100],
    }
    for key, values in rare.items():
        if rng.random() < 0.2:
            config[key] = rng.choice(values)
    return config, _make_trace(rng, config)


def _choose_policy(rng: Random, config: Row) -> None:
    config["enable_priority_scheduling"] = rng.random() < 0.25
    if config["enable_priority_scheduling"]:
        config["schedule_policy"] = rng.choice(["fcfs", "fcfs", "lof"])
        config["disable_priority_preemption"] = rng.random() < 0.3
        config["schedule_low_priority_values_first"] = rng.random() < 0.5
        config["priority_scheduling_preemption_threshold"] = rng.choice([0, 1, 10])
        config["retraction_policy"] = rng.choice(["length", "priority"])
        return
    aware = [] if config["disable_radix_cache"] else AWARE
    config["schedule_policy"] = rng.choice(["fcfs", "fcfs", "lof", "routing-key", *aware])


def _make_trace(rng: Random, config: Row) -> list[Row]:
    values = rng.choice([1, 2, 2, 3, 5, 40])
    longest = max(1, min(config["max_total_num_tokens"], rng.choice([10, 30, 60, 150])))
    rows: list[Row] = []
    for index, arrival in enumerate(make_arrivals(rng, rng.randint(1, 22))):
        output = rng.choice([0, 1, 2, rng.randint(1, 12), rng.randint(1, longest)])
        row = {
            "id": f"r{index}",
            "arrival": arrival,
            "prompt_token_ids": make_prompt(rng, rows, values, longest),
            "output_len": output,
        }
        if rng.random() < 0.4:
            row["max_new_tokens"] = rng.choice([0, 1, output, output + 5, 3 * output])
        if rng.random() < 0.2:
            row["ignore_eos"] = rng.random() < 0.5
        if rng.random() < 0.5:
            row["priority"] = rng.choice([-5, 0, 1, 2, 20])
        if rng.random() < 0.5:
            row["routing_key"] = rng.choice(["a", "b", "c"])
        rows.append(row)
    return rows
