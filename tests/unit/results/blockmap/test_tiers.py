"""The block map of a tier in CPU memory, against the transfers that steps decided."""

import pytest
from marks import mostly_long
from tiered import AGAIN, SMALL, cost, random_run

import kvsim
from kvsim.engines.vllm_v1.connector import Connector
from kvsim.engines.vllm_v1.offloading import Offloading
from kvsim.engines.vllm_v1.simple import SimpleOffload
from kvsim.results.blockmap import CACHED, CPU, LOADING, OWNED, STORING, BlockMapWatcher
from kvsim.run.watchers import Watchers


class Transfers:
    """Follows the transfers of each step: place of the tier -> what goes on there."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.doing = {}
        """Number and direction of a transfer that is not over -> its places."""
        self.written = set()
        self.seen = {}
        """Instant -> what was under way after each step that was composed then."""

    def composed(self, batch, plan, now_ns, arrived):
        for job in (*plan.transfers.stores, *plan.transfers.loads):
            storing = job in plan.transfers.stores
            places = [place for each in job.other for place in each]
            self.doing[storing, job.number] = places
            self.written.update(places if storing else ())
        self.seen.setdefault(now_ns, []).append(self.counts())

    def settled(self, batch, ended):
        pass

    def over(self, done):
        for storing, jobs in ((True, done.stores), (False, done.loads)):
            for job in jobs:
                del self.doing[storing, job.number]

    def counts(self):
        busy = [
            {p for (s, _), places in self.doing.items() if s is way for p in places}
            for way in (True, False)
        ]
        storing, loading = busy
        return len(storing), len(loading - storing), len(self.written - storing - loading)


def watched(monkeypatch, trace, settings, kind=Offloading, **limits):
    twin, watcher = Transfers(), BlockMapWatcher(**limits)
    hear = kind.update_connector_output

    def heard(self, done):
        twin.over(done)
        return hear(self, done)

    monkeypatch.setattr(kind, "update_connector_output", heard)
    result = kvsim.simulate(trace, settings, watcher=Watchers([watcher, twin]))
    return watcher.block_map(), twin, result


def settings_of(gib=1.0, block_us=200, **settings):
    return {**SMALL, "cost": cost(block_us), "kv_offloading_size": gib, **settings}


def below(block_map):
    """Places of the tier by state, sample by sample."""
    return block_map.totals(CPU)


def test_stores_and_loads_show_while_they_last(monkeypatch):
    """Copies of 3 s a block. Two blocks are stored from 1 ms on. The second prompt comes at 1 s,
    reuses them, and waits until 6 s; ten blocks are stored, and two loaded, from then on."""
    block_map, _, result = watched(monkeypatch, AGAIN, settings_of(block_us=3_000_000))
    totals = below(block_map)
    shown = [tuple(row[[STORING, LOADING, CACHED]].tolist()) for row in totals]
    assert [each for i, each in enumerate(shown) if i == 0 or shown[i - 1] != each] == [
        (2, 0, 0),
        (12, 0, 0),
        (10, 2, 0),
        (0, 0, 12),
    ]
    assert result.meta["kv_offload"]["stored_blocks"] == 12
    assert not totals[:, OWNED].any()


@pytest.mark.parametrize("connector", ["OffloadingConnector", "SimpleCPUOffloadConnector"])
@pytest.mark.parametrize("seed", mostly_long(60, quick=3))
def test_a_sample_is_what_the_transfers_left(monkeypatch, seed, connector):
    trace, drawn = random_run(seed)
    kind: type[Connector] = Offloading
    if connector != "OffloadingConnector":
        kind = SimpleOffload
        drawn["kv_connector_extra_config"] = {"lazy_offload": seed % 2 == 0}
        drawn["enable_prefix_caching"] = True
        drawn["gib"] = max(drawn["gib"], 0.02)
        drawn["kv_transfer_config"] = {"kv_connector": connector, "kv_role": "kv_both"}
    block_map, twin, _ = watched(monkeypatch, trace, settings_of(**drawn), kind)
    compared = 0
    for time_ns, row in zip(block_map.time_ns.tolist(), below(block_map), strict=True):
        if time_ns in twin.seen and row.sum():
            # Several steps can be composed at one instant; the map has the state of one of them.
            kept = 3 if kind is Offloading else 2
            shown = tuple(row[[STORING, LOADING, CACHED][:kept]].tolist())
            assert shown in [each[:kept] for each in twin.seen[time_ns]]
            compared += 1
    assert compared or not twin.seen
    assert (block_map.counts.sum(axis=2) == block_map.groups.blocks).all()
