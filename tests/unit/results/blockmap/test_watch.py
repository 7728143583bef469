"""Samples of who holds which block, against a twin that asks for every block of every step."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import examples
from small_engines import ENGINES, engine, make_trace, rows

import kvsim
from kvsim.results.blockmap import (
    CPU,
    FIRST_CELL_NS,
    GPU,
    KEPT,
    OWNED,
    SHARED,
    STATES,
    BlockMapWatcher,
    make_groups,
)
from kvsim.run.watchers import Watchers

CROWD = [(7 * (i % 3), 1 + 5 * i % 40, 1 + 3 * i % 19, i % 4) for i in range(25)]
CONFIGS = {
    **{name: engine(name) for name in ENGINES},
    "0.6.3 sync swap": engine("0.6.3 swap", disable_async_output_proc=True),
    "0.6.3 sync prefixes": engine("0.6.3 prefixes", disable_async_output_proc=True),
    "contiguous": engine("0.6.3", block_manager="contiguous", max_model_len=40),
    "reserved samples": engine("0.6.3", block_manager="contiguous", max_model_len=40, n=2),
}
SYNCHRONOUS = [name for name in CONFIGS if CONFIGS[name].get("disable_async_output_proc")]
SYNCHRONOUS += ["0.3.3", "0.3.3 swap", "0.6.3 samples", "nano", "nano 2025", "v1"]
"""Where no request ends between composing a step and noting its row."""


class Twin:
    """Asks every block of every step for its holders, in the plainest way."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.seen = {}
        self.census = {}
        self.idle = {}

    def composed(self, batch, plan, now_ns, arrived):
        if not plan.empty and now_ns not in self.seen:
            self.seen[now_ns] = look(batch)
            self.census[now_ns] = census(batch.blocks)

    def settled(self, batch, ended):
        if ended and not len(batch):
            self.idle[batch.now_ns] = look(batch)


def census(blocks):
    """Blocks in use, idle with content, and blank; of the GPU, then in use in the CPU pool."""
    gpu = blocks.gpu
    return gpu.used, gpu.cached, gpu.free - gpu.cached, blocks.cpu.used


def look(batch):
    """Device → for each block: its state, and its owner."""
    everybody = (batch.running, batch.waiting, batch.swapped, batch.aside, batch.lost)
    holders = {}
    for request in (request for queue in everybody for request in queue):
        for sequence in request.sequences:
            for block in sequence.table:
                holders.setdefault(block, set()).add(request.index)
    devices = []
    for pool in (batch.blocks.gpu, batch.blocks.cpu):
        cached = set(pool.cached_blocks())
        blocks = []
        for block in range(pool.first, pool.first + pool.size):
            who = holders.get(block)
            if who:
                blocks.append(("owned", *who) if len(who) == 1 else ("shared", -1))
            elif block in pool.references:
                blocks.append(("kept", -1))
            else:
                blocks.append(("cached" if block in cached else "free", -1))
        devices.append(blocks)
    return devices


def counted(devices, groups):
    """What a sample of these blocks must be."""
    for device, first, blocks in zip(*(column.tolist() for column in groups), strict=True):
        some = devices[device][first : first + blocks]
        states = Counter(state for state, _ in some)
        owners = Counter(owner for state, owner in some if state == "owned")
        owner = min(owners, key=lambda each: (-owners[each], each), default=-1)
        yield [states[name] for name in STATES], owner, owners[owner]


def watched(name, drawn, **limits):
    watcher, twin = BlockMapWatcher(**limits), Twin()
    result = kvsim.simulate(make_trace(drawn), CONFIGS[name], watcher=Watchers([watcher, twin]))
    return watcher.block_map(), twin, result


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=examples(4))
@example(drawn=CROWD, each=1)
@example(drawn=CROWD, each=6)
@given(drawn=rows, each=st.integers(1, 9))
def test_a_sample_is_what_the_blocks_are(name, drawn, each):
    """With room for all samples, each step has one, and each idle time that lasts."""
    block_map, twin, result = watched(name, drawn, gpu_rows=-(-20 // each), cpu_rows=7)
    groups = block_map.groups
    assert set(block_map.time_ns.tolist()) <= twin.seen.keys() | twin.idle.keys()
    # Of steps within the same first cell of time, only the first has a sample.
    cells = {time_ns // FIRST_CELL_NS for time_ns in block_map.time_ns.tolist()}
    assert {time_ns // FIRST_CELL_NS for time_ns in twin.seen} <= cells
    for i, time_ns in enumerate(block_map.time_ns.tolist()):
        sample = list(
            zip(
                block_map.counts[i].tolist(),
                block_map.owner[i].tolist(),
                block_map.owner_blocks[i].tolist(),
                strict=True,
            )
        )
        seen = [each[time_ns] for each in (twin.seen, twin.idle) if time_ns in each]
        assert sample in [list(counted(devices, groups)) for devices in seen]
    assert (block_map.counts.sum(axis=2) == groups.blocks).all()
    assert (np.diff(block_map.time_ns) > 0).all()
    # vLLM 0.x leaks swapped blocks of requests that lose samples.
    if result.meta["outcome"]["kind"] == "finished" and name != "0.6.3 samples":
        assert not block_map.counts[-1, :, [OWNED, SHARED]].any()


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_totals_are_those_of_the_steps(name):
    block_map, twin, result = watched(name, CROWD)
    starts = result.steps["start_ns"].tolist()
    rows_of = {time_ns: row for row, time_ns in enumerate(starts) if starts.count(time_ns) == 1}
    checked = 0
    for i, time_ns in enumerate(block_map.time_ns.tolist()):
        if time_ns not in twin.census or time_ns in twin.idle:
            continue
        free, cached, *held = block_map.totals(GPU)[i].tolist()
        used, idle, blank, cpu_used = twin.census[time_ns]
        assert (sum(held), cached, free) == (used, idle, blank)
        assert block_map.totals(CPU)[i, OWNED:].sum() == cpu_used
        if time_ns in rows_of:
            row = {key: column[rows_of[time_ns]] for key, column in result.steps.items()}
            assert (row["used_blocks"], row["cached_blocks"]) == (used, idle)
            assert (row["free_blocks"], row["cpu_used_blocks"]) == (blank, cpu_used)
            checked += 1
    assert checked > len(starts) / 2


def test_all_states_occur_somewhere():
    """So that the comparisons above compare something."""
    found = np.zeros(len(STATES), dtype=bool)
    for name in ("0.6.3 swap", "0.6.3 prefixes", "v1", "0.3.3", "nano", "reserved samples"):
        found |= watched(name, CROWD)[0].counts.any(axis=(0, 1))
    assert found[: KEPT + 1].all()
    assert watched("0.6.3 swap", CROWD)[0].totals(CPU)[:, OWNED].any()


@pytest.mark.parametrize("samples", [4, 9, 30])
def test_a_long_run_is_sampled_evenly(samples):
    whole, _, _ = watched("0.6.3 prefixes", CROWD)
    few, _, _ = watched("0.6.3 prefixes", CROWD, samples=samples)
    assert samples / 4 <= len(few.time_ns) <= samples + 1
    places = np.searchsorted(whole.time_ns, few.time_ns)
    assert (whole.time_ns[places] == few.time_ns).all()
    assert (whole.counts[places] == few.counts).all()
    assert (whole.owner[places] == few.owner).all()
    gaps = np.diff(few.time_ns)
    assert gaps.max() <= 2 * whole.time_ns[-1] / (samples / 4)


def test_an_idle_time_shows_that_nobody_holds_anything():
    """However coarse the samples are by the time it begins."""
    drawn = [*CROWD, (90_000, 5, 5, 0), (90_000, 5, 5, 0)]
    few, twin, result = watched("0.6.3", drawn, samples=10)
    asked = result.requests["arrival_ns"][-1] - 20_000_000_000
    row = np.searchsorted(few.time_ns, asked, side="right") - 1
    assert not few.counts[row, :, OWNED:].any()
    assert few.time_ns[row] in twin.idle


def test_an_attempt_that_was_given_up_leaves_nothing():
    settings = engine("0.6.3", num_gpu_blocks_override=16, max_model_len=64)
    settings |= {"preemption_mode": "swap", "num_cpu_blocks_override": 2}
    watcher = BlockMapWatcher()
    stopped = kvsim.simulate(make_trace(CROWD), settings)
    assert stopped.meta["outcome"]["kind"] != "finished"
    settings["on_engine_error"] = "reject"
    result = kvsim.simulate(make_trace(CROWD), settings, watcher=watcher)
    assert result.meta["engine_errors"]
    block_map = watcher.block_map()
    assert (np.diff(block_map.time_ns) > 0).all()
    refused = [i for i, status in enumerate(result.requests["status"]) if status == "rejected"]
    assert not np.isin(block_map.owner, refused).any()


@given(
    sizes=st.tuples(st.integers(0, 500), st.integers(0, 500)),
    limits=st.tuples(st.integers(1, 60), st.integers(1, 60)),
)
def test_groups_are_few_and_cover_every_block_once(sizes, limits):
    groups = make_groups(*sizes, *limits)
    for device, size, most in zip((GPU, CPU), sizes, limits, strict=True):
        here = groups.device == device
        covered = [
            block
            for first, blocks in zip(groups.first[here], groups.blocks[here], strict=True)
            for block in range(first, first + blocks)
        ]
        assert covered == list(range(size))
        assert here.sum() <= most
        assert len(set(groups.blocks[here][:-1].tolist())) <= 1
