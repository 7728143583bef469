"""SGLang obeys policies of one's own, has columns of its own, and its surprises are told."""

from __future__ import annotations

from collections import deque
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.equal import columns_differ
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.records import PREEMPTED
from kvsim.core.request import Request
from kvsim.core.vectors import numbers
from kvsim.engines.sglang.scheduler import Sglang, SglangOverlap
from kvsim.engines.sglang.server import MIB, max_running_requests, mem_fraction_static
from kvsim.engines.sglang.tree import Node, Text
from kvsim.machine import load_model
from kvsim.report import read_results, write_results
from kvsim.report.pages.over_time import time_figures
from kvsim.report.pages.view import look_at
from kvsim.report.tracks import counter_events, encode, run_window
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload import Row, Trace

CHAT: dict[str, Any] = {
    "engine": "sglang",
    "num_prompts": 80,
    "num_gpu_blocks_override": 24_000,
    "cost": {"model": "constant"},
}


def requests(*lengths: tuple[int, int], **about: Any) -> Trace:
    """Requests that come at once, given as prompt and output tokens."""
    rows = [Row(i, f"r{i}", i + 2, 0, *each, None) for i, each in enumerate(lengths)]
    for row in rows:
        for key, value in about.items():
            setattr(row, key, value)
    return Trace("made", "native", "", rows)


def notes(trace: Trace, pool_tokens: int, **settings: Any) -> str:
    """What a run says, in a pool of so many tokens."""
    size = settings.get("block_size", 1)
    table = {
        "model": "tiny",
        "engine": "sglang",
        "max_model_len": 400,
        "num_gpu_blocks_override": pool_tokens // size,
        "cost": {"model": "constant"},
        **settings,
    }
    return "\n".join(simulate(trace, table).meta["notes"])


# -- policies of one's own ---------------------------------------------------------------------


class Mine(SglangOverlap):
    """A scheduler of one's own that decides nothing else."""

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        return super().compose(batch, now_ns)

    def worth(self, request: Request) -> tuple[int, ...]:
        return super().worth(request)

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        super().settle(batch, plan, now_ns)


class NewestFirst(Sglang):
    """Another order of the waiting queue."""

    def before_admissions(self, batch: Batch, now_ns: int) -> None:
        batch.waiting = deque(sorted(batch.waiting, key=lambda each: -each.index))


class ShortestFirst(Sglang):
    """Retracts who has fewest tokens."""

    def worth(self, request: Request) -> tuple[int, ...]:
        return (request.length,)


def by_hits(node: Node) -> Any:
    return node.hits, node.time


TIGHT = CHAT | {"num_gpu_blocks_override": 6_000}
EAGER = {"schedule_conservativeness": 0.01}


def test_a_scheduler_that_decides_nothing_else_changes_nothing() -> None:
    crowd = requests(*[(10, 40)] * 12, max_new_tokens=40)
    settings = {"model": "tiny", "max_model_len": 400, "num_gpu_blocks_override": 120}
    settings |= {"scheduler_args": EAGER}
    usual = simulate(crowd, settings | {"engine": "sglang"})
    own = simulate(crowd, settings | {"engine": f"{__name__}:Mine"})
    assert usual.requests["num_preemptions"].sum() > 0
    assert columns_differ(own.steps, usual.steps) == ""
    assert columns_differ(own.requests, usual.requests) == ""


def test_an_own_eviction_order_is_asked_for_every_leaf() -> None:
    """`lfu` written by a user: of equal counts, the one used longest ago."""

    def evicted_by(policy: str) -> Any:
        args = {"radix_eviction_policy": policy}
        return simulate("agents", TIGHT | {"block_manager_args": args}).steps

    own = evicted_by(f"{__name__}:by_hits")
    assert columns_differ(own, evicted_by("lfu")) == ""
    assert columns_differ(own, evicted_by("lru")) != ""


def test_an_own_order_of_the_queue_is_obeyed() -> None:
    crowd = requests(*[(20, 4)] * 6, max_new_tokens=4)
    settings = {"model": "tiny", "max_model_len": 400, "max_num_seqs": 1}
    settings |= {"num_gpu_blocks_override": 400, "engine": f"{__name__}:NewestFirst"}
    first = simulate(crowd, settings).requests["first_scheduled_ns"]
    assert list(first) == sorted(first, reverse=True)


@pytest.mark.parametrize(("engine", "first"), [("ShortestFirst", 0), ("Sglang", 1)])
def test_an_own_choice_of_whom_to_retract_is_obeyed(engine: str, first: int) -> None:
    crowd = requests((10, 40), (30, 40), (20, 40), max_new_tokens=40)
    settings = {"model": "tiny", "max_model_len": 400, "num_gpu_blocks_override": 110}
    settings |= {"scheduler_args": EAGER, "engine": f"{__name__}:{engine}"}
    log = simulate(crowd, settings).transitions
    preempted = log["request"][log["kind"] == PREEMPTED]
    assert preempted[0] == first


# -- texts -------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Pages of a request as (base, end); neighbours have other bases."""
    cuts = sorted(draw(st.sets(st.integers(1, 30), max_size=12)))
    bases = draw(st.lists(st.integers(0, 3), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    return list(zip((1000 * each for each in bases), [*cuts, 1 << 40], strict=True))


def written_out(runs: list[tuple[int, int]], pages: int) -> list[int]:
    return [next(base for base, end in runs if page < end) + page for page in range(pages)]


@given(runs(), runs(), st.integers(1, 40), st.integers(0, 39))
def test_texts_in_runs_are_those_written_out(
    one: list[tuple[int, int]], other: list[tuple[int, int]], pages: int, start: int
) -> None:
    start = min(start, pages - 1)
    mine, theirs = (Text(1, numbers([*chain.from_iterable(each)])) for each in (one, other))
    plain, compared = written_out(one, pages), written_out(other, pages)
    assert [mine.number(page) for page in range(pages)] == plain
    differs = (at for at in range(start, pages) if plain[at] != compared[at])
    assert mine.agrees(theirs, start, pages) == next(differs, pages) - start


# -- columns of its own ------------------------------------------------------------------------


def test_steps_have_the_ratio_and_the_protected_pages() -> None:
    """Worked out by hand. Two prompts of 4 and 6 tokens are computed in one step. Each decode step
    lowers the ratio from 0.7 by 0.7 x (1 - 0.14) / 600; what a prompt computed is protected."""
    settings = {"model": "tiny", "engine": "sglang", "max_model_len": 400}
    settings |= {"num_gpu_blocks_override": 200, "async_scheduling": False}
    steps = simulate(requests((4, 4), (6, 2), max_new_tokens=4), settings).steps
    assert steps["prefill_seqs"].tolist() == [2, 0, 0, 0]
    ppm = [round(1e6 * (0.7 - 0.7 * 0.86 / 600 * decodes)) for decodes in range(4)]
    assert steps["new_token_ratio_ppm"].tolist() == ppm
    assert steps["protected_blocks"].tolist() == [0, 10, 4, 4]
    assert steps["used_blocks"].tolist() == [10, 12, 6, 7]
    assert steps["cached_blocks"].tolist() == [0, 0, 7, 7]


def test_other_engines_have_no_such_columns() -> None:
    steps = simulate(requests((4, 4)), {"model": "tiny", "engine": "vllm-v1"}).steps
    assert not {"new_token_ratio_ppm", "protected_blocks"} & set(steps)


def test_what_sglang_alone_has_is_kept_drawn_and_shown(tmp_path: Path) -> None:
    result = simulate("chat", CHAT | {"num_prompts": 20})
    kept = result.summary, result.requests, result.steps
    figures = {figure.id: figure for figure in time_figures(look_at(*kept))}
    [ratio] = figures["new-token-ratio"].data
    assert 0 < min(ratio["y"]) < max(ratio["y"]) <= 0.7
    kinds = [entry.label.split()[0] for entry in figures["gpu-blocks"].legend]
    assert kinds[:4] == ["Protected:", "Private", "Evictable:", "Free"]
    write_results(tmp_path / "out", *kept)
    _, _, steps = read_results(tmp_path / "out")
    assert steps["protected_blocks"].tolist() == result.steps["protected_blocks"].tolist()
    window = run_window(result.steps, result.requests, None, None)
    counted = encode([*counter_events(result.steps, result.meta, window)]).decode()
    assert '"protected"' in counted and "new-token ratio" in counted


# -- surprises ---------------------------------------------------------------------------------


def test_retractions_are_told_with_the_ratio() -> None:
    crowd = requests(*[(10, 40)] * 6, max_new_tokens=40)
    said = notes(crowd, 120, scheduler_args=EAGER)
    assert "retractions; the new-token ratio was between 0.00" in said
    assert "retractions" not in notes(crowd, 1_000, scheduler_args=EAGER)


def test_memory_that_is_free_but_reserved_is_told() -> None:
    told = "the head of the queue was refused though memory was free"
    assert told in notes(requests(*[(50, 20)] * 4), 250)
    assert told not in notes(requests(*[(50, 20)] * 4, max_new_tokens=20), 350)


def test_retracted_requests_that_find_the_queue_full_are_told() -> None:
    crowd = requests(*[(10, 40)] * 12, max_new_tokens=40)
    for row in crowd.rows:
        row.arrival_ns = row.index * 30_000_000
    said = notes(crowd, 120, scheduler_args=EAGER | {"max_queued_requests": 1})
    assert "retracted requests were aborted, because max_queued_requests" in said


def test_a_load_without_ends_of_sequence_is_told() -> None:
    told = "the new-token ratio has no effect"
    assert told in notes(requests((10, 4), ignore_eos=True, max_new_tokens=4), 200)
    assert told not in notes(requests((10, 4), max_new_tokens=4), 200)


def test_prompts_of_nearly_the_pool_are_told() -> None:
    trace = requests((150, 4))
    assert "they block the queue for ever" in notes(trace, 160, block_size=16)
    outcome = simulate(
        trace,
        {
            "model": "tiny",
            "engine": "sglang",
            "block_size": 16,
            "max_model_len": 400,
            "num_gpu_blocks_override": 10,
        },
    ).meta["outcome"]
    assert outcome["kind"] == "deadlock"
    assert "they block the queue" not in notes(requests((140, 4)), 160, block_size=16)


def test_forgotten_prompts_are_told() -> None:
    """A prompt is cut at a page, so that a part of the chunk is left, and without a radix cache
    one that ignores the end of sequence is cut anywhere."""
    settings = {"block_size": 16, "max_num_batched_tokens": 40, "enable_prefix_caching": False}
    trace = requests((100, 4), (100, 4), max_new_tokens=4)
    assert "a prompt was cut" not in notes(trace, 640, **settings)
    trace.rows[1].ignore_eos = True
    assert "1 times, a prompt was cut while another was unfinished" in notes(trace, 640, **settings)


def test_a_chunk_without_memory_ends_the_run_and_says_so() -> None:
    trace = requests((20, 75), (70, 5))
    trace.rows[0].max_new_tokens, trace.rows[1].max_new_tokens = 75, 5
    trace.rows[1].arrival_ns = 20_000_000
    settings = {
        "model": "tiny",
        "engine": "sglang",
        "max_model_len": 400,
        "async_scheduling": False,
        "max_num_batched_tokens": 20,
        "cost": {"model": "constant"},
        "scheduler_args": EAGER
        | {"prefill_decode_interval": 5, "environment": {"clip_max_new_tokens": 2}},
    }
    outcome = simulate(trace, settings | {"num_gpu_blocks_override": 100}).meta["outcome"]
    assert (outcome["kind"], outcome["request"]) == ("engine-error", "r1")
    assert "the next chunk of a prompt is taken on without a look" in outcome["explanation"]
    more = simulate(trace, settings | {"num_gpu_blocks_override": 200}).meta["outcome"]
    assert more["kind"] == "finished"


def test_the_head_of_the_queue_waits_for_a_reason() -> None:
    trace = requests(*[(50, 20)] * 4)
    settings = {"model": "tiny", "engine": "sglang", "max_model_len": 400}
    short = simulate(trace, settings | {"num_gpu_blocks_override": 150})
    few = simulate(trace, settings | {"num_gpu_blocks_override": 4_000, "max_num_seqs": 2})
    assert short.summary["head_blocked_s"]["blocks"] > 0
    assert few.summary["head_blocked_s"]["slots"] > 0
    assert few.summary["head_blocked_s"]["blocks"] == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_prompts_wait_no_longer_than_there_is_something_to_decode(overlap: bool) -> None:
    """The second prompt waits for decode steps that never come. The engine counts them at once."""
    settings = {"model": "tiny", "engine": "sglang", "max_model_len": 400, "max_num_seqs": 1}
    interval = {"scheduler_args": {"prefill_decode_interval": 1000}, "async_scheduling": overlap}
    result = simulate(requests((50, 9), (50, 9)), settings | interval)
    assert result.meta["outcome"]["kind"] == "finished"
    assert set(result.requests["status"]) == {"completed"}


@pytest.mark.parametrize("apart", [10, 11])
def test_a_priority_preempts_if_it_is_higher_by_more_than_the_threshold(apart: int) -> None:
    """`priority_scheduling_preemption_threshold`, 10 by default; a higher number goes first."""
    crowd = requests((20, 60), (20, 4), max_new_tokens=60)
    crowd.rows[1].priority, crowd.rows[1].arrival_ns = apart, 10**8
    settings = {"model": "tiny", "engine": "sglang", "max_model_len": 400, "max_num_seqs": 1}
    settings |= {"num_gpu_blocks_override": 400, "cost": {"model": "constant"}}
    args = {"enable_priority_scheduling": True}
    result = simulate(crowd, settings | {"scheduler_args": args})
    assert list(result.requests["num_preemptions"]) == [int(apart > 10), 0]


@pytest.mark.parametrize(("pool", "kept"), [(118, 60), (117, 50)])
def test_a_preemption_makes_room_for_twenty_tokens_of_each_who_stays(pool: int, kept: int) -> None:
    """Six prompts of 10 tokens are cached, and one of two running requests has to go, whose prompt
    is idle, too, then. Its other pages make 20 free ones, or 19, so that a prompt is evicted."""
    crowd = requests(*[(10, 1)] * 6, (10, 60), (10, 60), (5, 4))
    for number, row in enumerate(crowd.rows):
        row.arrival_ns, row.max_new_tokens = min(number, 6) * 10**8, row.output_length
    crowd.rows[-1].arrival_ns, crowd.rows[-1].priority = 6 * 10**8 + 120_000_000, 20
    settings = {"model": "tiny", "engine": "sglang", "max_model_len": 400, "max_num_seqs": 2}
    settings |= {"num_gpu_blocks_override": pool, "cost": {"model": "constant"}}
    args = {"enable_priority_scheduling": True, **EAGER}
    settings |= {"async_scheduling": False, "scheduler_args": args}
    steps = simulate(crowd, settings).steps
    step = np.flatnonzero(steps["preempted_recompute"])[0]
    assert list(steps["cached_blocks"][step - 1 : step + 1]) == [60, 10 + kept]


def test_the_head_of_the_queue_counts_how_often_it_was_refused() -> None:
    """Not every step: a full batch is not asked again before a request of it is over."""
    settings = {"model": "tiny", "engine": "sglang", "max_model_len": 400, "max_num_seqs": 1}
    settings |= {"num_gpu_blocks_override": 400, "cost": {"model": "constant"}}
    result = simulate(requests((20, 9), (20, 9), (20, 9), max_new_tokens=9), settings)
    assert list(result.requests["blocked_steps"]) == [0, 1, 1]


# -- memory ------------------------------------------------------------------------------------


H100 = 81_559 * MIB
L40S = 46_068 * MIB


def share(memory_bytes: int, model: str = "llama-3-8b", **settings: Any) -> float:
    return mem_fraction_static(make_config(settings), memory_bytes, load_model(model))


def test_the_share_of_memory_is_that_of_a_log() -> None:
    """An L40S (46,068 MiB) had 0.851: github.com/sgl-project/sglang/pull/13023, of November 2025.

    0.5.23 also leaves 8 MiB for each size of prefill that it captures.
    """
    captured = sum(len(range(*each)) for each in ((4, 33, 4), (48, 257, 16), (288, 513, 32)))
    captured += len(range(576, 1025, 64)) + len(range(1280, 4097, 256))
    assert share(L40S) + 8 * captured / 46_068 == pytest.approx(0.851, abs=0.001)


@pytest.mark.parametrize(
    ("settings", "more_mib"),
    [
        ({"cuda_graph_max_bs": 8}, 2 * (32 - 8)),
        ({"cuda_graph_max_bs": 512}, 2 * (32 - 512)),
        ({"max_num_seqs": 8}, 2 * (32 - 8)),
        ({"max_num_seqs": 64}, 0),
        ({"max_num_seqs": 8, "cuda_graph_max_bs": 16}, 2 * (32 - 16)),
        ({"tensor_parallel_size": 4}, 2 * (32 - 160) - 3 * 128),
        ({"max_num_batched_tokens": 2048}, 1.5 * 2048 + 8 * 8),
        ({"enforce_eager": True}, 2 * 32 + 8 * 50),
        ({"enable_chunked_prefill": False}, -1.5 * (16384 - 4096) + 8 * 50),
    ],
)
def test_the_share_of_memory_follows_what_is_captured(
    settings: dict[str, Any], more_mib: float
) -> None:
    """On an L40S, by the formula of 0.5.23: 2 MiB for each sequence of the largest decode step (32
    by default, at most `max_running_requests`), 8 MiB for each size of prefill (50 up to 4,096
    tokens), 1.5 MiB for each token of a chunk, 128 MiB for each GPU."""
    more = share(L40S, **settings) - share(L40S)
    assert more == pytest.approx(more_mib / 46_068, abs=0.0011)


def test_large_gpus_leave_ten_gibibytes_and_latent_attention_has_other_graphs() -> None:
    """`nvidia-smi` shows 81,559 MiB of an H100; the terms are those of `server.py`."""
    assert share(H100, max_num_batched_tokens=2048) == round(1 - 10_240 / 81_559, 3)
    usual = 512 + 1.5 * 8192 + 128 + 2 * 256
    sizes = 50 + len(range(4608, 8193, 512))
    assert share(H100) == round(1 - (usual + 8 * sizes) / 81_559, 3)
    assert share(H100, "deepseek-v3") == round(1 - (usual + 1536) / 81_559, 3)


def test_so_many_requests_run_at_most() -> None:
    """`model_executor/model_runner.py` of SGLang 0.5.23: 512 for each context that fits, within
    2,048 and 4,096, and at most one for two tokens."""
    found = [max_running_requests(tokens, 8192) for tokens in (20_000, 50_000, 100_000)]
    assert found == [2048, 3125, 4096]
    assert [max_running_requests(tokens, 8192) for tokens in (1000, 1)] == [500, 1]
