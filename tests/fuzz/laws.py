"""Wider worlds, and laws that hold in all of them: what a later request, the other end of a disk,
or one replica alone must not change."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
from fuzz.draw import TICK_NS, draw_features, draw_heirs, draw_settings, draw_trace
from fuzz.equal import LIMIT_S, columns_differ, imbalance, limited, quick_livelocks

from kvsim.engines import ENGINES
from kvsim.errors import ConfigError
from kvsim.report import read_results, write_results
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.settings.versions import release
from kvsim.workload import Row, Trace

RELEASES = ("0.8.5", "0.9.2", "0.10.2", "0.11.2", "0.19", "0.24", "0.28", "0.33")


def draw_world(rng: random.Random) -> tuple[Trace, dict[str, Any]]:
    """A load and an engine: everything of `fuzz.draw`, and what few of its cases have."""
    trace = draw_trace(rng) if rng.random() < 0.7 else draw_heirs(rng)
    engine = rng.choice((*ENGINES, "vllm-v1", "vllm-v1", "vllm-v1"))
    settings = draw_v1(rng) if engine == "vllm-v1" else draw_settings(rng, engine)
    plain = "model" in settings and settings["model"] == "tiny"
    if plain and rng.random() < 0.3:
        longest = settings["max_model_len"]
        settings["block_size"] = size = rng.choice((2, 5, 48, 128, 256))
        settings["num_gpu_blocks_override"] = -(-longest // size) + rng.choice((1, 3, 40))
    if "watermark" in settings and rng.random() < 0.5:
        settings["watermark"] = rng.choice((0.5, 0.9))
    if rng.random() < 0.3:
        settings |= {"request_rate": rng.choice((0.5, 5.0)), "burstiness": rng.choice((0.1, 3.0))}
    if rng.random() < 0.4:
        _draw_sessions(rng, trace, settings)
    if rng.random() < 0.4:
        for row in trace.rows:
            if rng.random() < 0.4:
                row.abort_after_ns = rng.choice((1, TICK_NS, rng.randrange(80 * TICK_NS)))
    return trace, settings


def draw_v1(rng: random.Random) -> dict[str, Any]:
    """vLLM V1 of a release, with stages, adapters and groups of layers together."""
    settings = draw_features(rng) if rng.random() < 0.5 else draw_settings(rng, "vllm-v1")
    if rng.random() < 0.3 and "kv_offloading_size" not in settings:
        settings["pipeline_parallel_size"] = 2
    if rng.random() < 0.5:
        settings["vllm_version"] = rng.choice(RELEASES)
    elif rng.random() < 0.3:
        settings |= {"prefill_schedule_interval": 2, "max_num_active_seqs": 1}
    return settings


def _draw_sessions(rng: random.Random, trace: Trace, settings: dict[str, Any]) -> None:
    """Clients that think between their requests."""
    for row in trace.rows[1:]:
        if row.after < 0 and rng.random() < 0.5:
            row.after = rng.randrange(row.index)
            row.delay_ns = rng.randrange(5 * TICK_NS)
    if any(row.after >= 0 for row in trace.rows):
        settings["sessions"] = rng.choice(("closed", "recorded"))
    settings["think_time_scale"] = rng.choice((0.0, 0.5, 3.0))
    if rng.random() < 0.5:
        settings["max_think_time_s"] = rng.choice((0.0, 0.01))


def played(trace: Trace, settings: dict[str, Any]) -> Result | str:
    """A run with its books, or why it is refused."""
    try:
        with quick_livelocks():
            result = simulate(trace, settings)
        assert not imbalance(result), imbalance(result)
    except ConfigError as error:
        return str(error)
    return result


def check_world(seed: int, limit_s: float = LIMIT_S) -> str:
    """One world, under all the laws; returns how its run ends."""
    rng = random.Random(f"worlds {seed}")
    trace, settings = draw_world(rng)
    with limited(limit_s):
        try:
            result = played(trace, settings)
            if isinstance(result, str):
                return "refused"
            assert_tokens_are_conserved(result)
            assert_read_as_written(result)
            if not _sends_otherwise(settings):
                assert_later_changes_nothing_before(rng, trace, settings, result)
        except Exception as error:
            error.add_note(f"worlds {seed}: {settings}")
            raise
    return str(result.meta["outcome"]["kind"])


def _sends_otherwise(settings: dict[str, Any]) -> bool:
    """Whether when a request is sent is not what its row says."""
    return bool({"request_rate", "max_concurrency", "time_scale"} & settings.keys())


def assert_tokens_are_conserved(result: Result) -> None:
    """Steps and requests count the same tokens: those that a cache saved, and, where nobody was
    turned away or cut short, those that were computed: of prompts but for what was saved, of
    outputs but for the last one, and what preemptions threw away. Who comes back may also find
    what only others have computed. vLLM before 0.11.1 and SGLang also compute tokens of requests
    that are over, before they know it."""
    requests, steps = result.requests, result.steps
    found_again = requests["recached_tokens"].sum()
    assert steps["cached_tokens"].sum() == requests["num_cached_tokens"].sum() + found_again
    if set(requests["status"]) == {"completed"} and max(requests["n"]) == 1:
        computed = (steps["prefill_tokens"] + steps["decode_seqs"]).sum()
        needed = requests["input_length"] - requests["num_cached_tokens"]
        needed = (needed + requests["output_tokens"] - 1 + requests["recomputed_tokens"]).sum()
        engine, version = result.config.engine, release(result.config.vllm_version)
        late = engine in ("vllm-0.6.3", "sglang") or (0, 8) <= version < (0, 11, 1)
        assert computed >= needed - found_again
        assert late or computed <= needed


def assert_read_as_written(result: Result) -> None:
    """Files hold what memory holds, to the last digit."""
    with tempfile.TemporaryDirectory() as folder:
        summary, requests, steps = result.summary, result.requests, result.steps
        write_results(folder, summary, requests, steps, transitions=result.transitions)
        again = read_results(folder)
    assert not columns_differ(requests, {name: again.requests[name] for name in requests})
    assert not columns_differ(steps, {name: again.steps[name] for name in steps})


def assert_later_changes_nothing_before(
    rng: random.Random, trace: Trace, settings: dict[str, Any], result: Result
) -> None:
    """A request more, sent while the last ones are at work: what was over before is the same."""
    ends = result.steps["end_ns"]
    last_ns = max(row.arrival_ns for row in trace.rows)
    if not len(ends) or ends[-1] <= last_ns:
        return
    now_ns = rng.randrange(last_ns, int(ends[-1])) + 1
    late = Row(len(trace.rows), "late", 0, now_ns, 5, 5)
    more = played(replace(trace, rows=[*trace.rows, late]), settings)
    assert isinstance(more, Result), more
    over = result.steps["end_ns"] < now_ns
    number = int(over.sum())
    for name, column in result.steps.items():
        assert list(column[:number]) == list(more.steps[name][:number]), name
    for place in np.flatnonzero(
        (result.requests["finish_ns"] >= 0) & (result.requests["finish_ns"] < now_ns)
    ):
        for name, column in result.requests.items():
            assert column[place] == more.requests[name][place], (name, place)
