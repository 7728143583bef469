"""Runs as tracks: read back as a viewer reads them."""

import gzip
import json
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
from small_engines import ENGINES, engine, make_trace

import kvsim
from kvsim.errors import OutputError
from kvsim.report.tracks import (
    COUNTERS,
    ENGINE,
    INSIDE,
    LINK,
    OUTSIDE,
    STEP_TRACK,
    Window,
    encode,
    events,
    request_events,
    run_window,
    stays_of,
    write_tracks,
)
from kvsim.results.ledger import standings
from kvsim.results.timeline import run_end_ns

CROWD = [(7 * (i % 3), 1 + 5 * i % 40, 1 + 3 * i % 19, i % 4) for i in range(25)]
RUNS = {}


def run(name):
    if name not in RUNS:
        RUNS[name] = kvsim.simulate(make_trace(CROWD), engine(name))
    return RUNS[name]


def ns(us):
    """Nanoseconds, exactly."""
    exact = Fraction(us) * 1000
    assert exact.denominator == 1
    return int(exact)


def exported(result, begin_s=None, end_s=None, chosen=None):
    """Events, with times in integer nanoseconds."""
    window = run_window(result.steps, result.requests, begin_s, end_s)
    listed = [
        json.loads(encode(event), parse_float=str)
        for event in events(
            result.summary, result.requests, result.steps, result.transitions, window, chosen
        )
    ]
    for event in listed:
        for key in ("ts", "dur"):
            if key in event:
                event[key] = ns(event[key])
    return listed


def slices(listed):
    """Track → (begin, end, name, args) in the order of the file."""
    tracks = defaultdict(list)
    for event in listed:
        if event["ph"] == "X":
            begin = event["ts"]
            told = (begin, begin + event["dur"], event["name"], event.get("args", {}))
            tracks[event["pid"], event["tid"]].append(told)
    return tracks


@pytest.mark.parametrize("name", ENGINES)
def test_slices_of_a_track_nest_and_never_overlap(name):
    for track in slices(exported(run(name))).values():
        around = []
        before = 0
        for begin, end, *_ in track:
            assert begin >= before
            before = begin
            while around and around[-1] <= begin:
                around.pop()
            assert end <= around[-1] if around else True
            around.append(end)


@pytest.mark.parametrize("name", ENGINES)
def test_steps_and_copies_take_as_long_as_in_the_run(name):
    result = run(name)
    tracks = slices(exported(result))
    steps = tracks[STEP_TRACK]
    assert [begin for begin, *_ in steps] == result.steps["start_ns"].tolist()
    assert [end for _, end, *_ in steps] == result.steps["end_ns"].tolist()
    copies = sum(end - begin for begin, end, *_ in tracks[LINK])
    assert copies == (result.steps["transfer_ns"] + result.steps["link_wait_ns"]).sum()
    moved = defaultdict(int)
    for *_, what, args in tracks[LINK]:
        moved[what] += args["blocks"]
    assert moved["swap out"] == result.steps["swap_out_blocks"].sum()
    assert moved["swap in"] == result.steps["swap_in_blocks"].sum()
    tokens = sum(args.get("prefill_tokens", 0) for *_, args in steps)
    assert tokens == result.steps["prefill_tokens"].sum()


def test_there_are_swaps_and_preemptions_to_be_shown():
    """So that the tests above and below compare something."""
    assert len(slices(exported(run("0.6.3 swap")))[LINK]) > 5
    names = {name for track in slices(exported(run("v1"))).values() for *_, name, _ in track}
    assert {"waiting", "prefill", "decode", "preempted", "recompute"} <= names


@pytest.mark.parametrize("name", ENGINES)
def test_the_spells_of_a_request_cover_its_life(name):
    result = run(name)
    spells = defaultdict(list)
    for (pid, _), track in slices(exported(result)).items():
        if pid not in (INSIDE, OUTSIDE):
            continue
        owner = None
        for begin, end, what, args in track:
            if what.startswith("request "):
                owner = what.removeprefix("request ")
                assert args["input_length"] > 0
            else:
                outside = what in ("waiting", "preempted", "swapped out")
                assert (pid == OUTSIDE) == outside
                spells[owner].append((begin, end, what))
    ends = standings.ends_ns(result.requests, run_end_ns(result.steps, result.requests))
    for i, id in enumerate(result.requests["id"]):
        arrival = result.requests["arrival_ns"][i]
        own = sorted(spells[id])
        assert sum(end - begin for begin, end, _ in own) == max(ends[i] - arrival, 0)
        assert all(one[1] == other[0] for one, other in pairwise(own))
        assert {what for *_, what in own} <= set(standings.NAMES)


@pytest.mark.parametrize("name", ENGINES)
def test_arrows_join_slices_and_tell_of_every_preemption(name):
    result = run(name)
    listed = exported(result)
    tracks = slices(listed)
    starts = {event["id"]: event for event in listed if event["ph"] == "s"}
    finishes = {event["id"]: event for event in listed if event["ph"] == "f"}
    assert starts.keys() == finishes.keys()

    def owner(event):
        inside = [
            what
            for begin, end, what, _ in tracks[event["pid"], event["tid"]]
            if begin <= event["ts"] < end and what.startswith("request ")
        ]
        assert len(inside) == 1
        return inside[0]

    for id, event in starts.items():
        assert event["ts"] <= finishes[id]["ts"]
        assert owner(event) == owner(finishes[id])
    lost = sum(event["name"] in ("preempted", "swapped out") for event in starts.values())
    spells = sum(
        what in ("preempted", "swapped out") for track in tracks.values() for *_, what, _ in track
    )
    assert lost == spells


@pytest.mark.parametrize("name", ["0.6.3 swap", "0.6.3 prefixes", "v1 async"])
def test_counters_hold_what_the_steps_say(name):
    result = run(name)
    columns = {
        (counter, series): column
        for counter, named in COUNTERS.items()
        for series, column in named.items()
    }
    changes = defaultdict(list)
    for event in exported(result):
        if event["ph"] == "C":
            assert event["pid"] == ENGINE
            for series, value in event["args"].items():
                changes[event["name"], series].append((event["ts"], value))
    starts = result.steps["start_ns"]
    lasting = np.flatnonzero(np.append(np.diff(starts) > 0, True))
    for key, steps in changes.items():
        times = [time_ns for time_ns, _ in steps]
        assert times == sorted(set(times))
        held = np.searchsorted(times, starts[lasting], side="right") - 1
        values = np.array([value for _, value in steps])[held]
        assert (values == result.steps[columns[key]][lasting]).all()
    assert ("GPU blocks", "used") in changes


def test_every_standing_has_slices_and_arrows_to_every_other():
    kinds = range(len(standings.NAMES))
    pairs = [pair for pair in product(kinds, kinds) if pair[0] != pair[1]]
    instants = np.arange(3 * len(pairs)).reshape(-1, 3)
    spells = standings.Spells(
        np.repeat(np.arange(len(pairs)), 2),
        np.array(pairs).ravel(),
        instants[:, :2].ravel(),
        instants[:, 1:].ravel(),
    )
    requests = defaultdict(lambda: [0] * len(pairs), id=[str(pair) for pair in pairs])
    stays = stays_of(spells, Window(0, instants.size))
    inside = {kind for stay in stays if stay.pid == INSIDE for kind, *_ in stay.spells}
    assert inside == {standings.PREFILL, standings.DECODE, standings.RECOMPUTE, standings.LATE}
    listed = [json.loads(encode(event)) for event in request_events(stays, requests)]
    shown = [event["name"] for event in listed if event["ph"] == "X"]
    names = [name for name in shown if not name.startswith("request ")]
    assert sorted(names) == sorted(standings.NAMES[kind] for pair in pairs for kind in pair)
    assert sum(event["ph"] == "s" for event in listed) == len(stays) - len(pairs)


def test_a_window_shows_its_part_and_no_more():
    result = run("v1")
    whole = run_end_ns(result.steps, result.requests)
    begin, end = whole // 3, whole // 2
    listed = exported(result, begin / 1e9, end / 1e9)
    times = [event for event in listed if "ts" in event]
    assert min(event["ts"] for event in times) == begin
    assert max(event["ts"] + event.get("dur", 0) for event in times) == end
    full, part = slices(exported(result)), slices(listed)
    clipped = [
        (max(b, begin), min(e, end), what)
        for b, e, what, _ in full[STEP_TRACK]
        if max(b, begin) < min(e, end)
    ]
    assert [told[:3] for told in part[STEP_TRACK]] == clipped
    counters = [event for event in listed if event["ph"] == "C" and event["name"] == "requests"]
    assert counters[0]["ts"] == begin


def test_only_chosen_requests_have_slices():
    result = run("v1")
    names = {
        what
        for (pid, _), track in slices(exported(result, chosen={3, 7})).items()
        if pid != ENGINE
        for *_, what, _ in track
    }
    assert {name for name in names if name.startswith("request ")} == {"request r3", "request r7"}


@pytest.mark.parametrize(("begin", "end"), [(5, 5), (-1, 2), (9, 3), (1e6, None)])
def test_an_empty_window_is_refused_in_one_line(begin, end):
    result = run("v1")
    with pytest.raises(OutputError, match="the run goes from 0 s to"):
        run_window(result.steps, result.requests, begin, end)


def test_the_file_is_valid_repeatable_and_the_same_packed(tmp_path):
    result = run("0.6.3 swap")
    files = [tmp_path / name for name in ("a.json", "b.json", "a.json.gz", "b.json.gz")]
    for path in files:
        window = run_window(result.steps, result.requests, None, None)
        listed = events(result.summary, result.requests, result.steps, result.transitions, window)
        write_tracks(path, result.meta, listed)
    plain, again, packed, packed_again = (path.read_bytes() for path in files)
    assert plain == again == gzip.decompress(packed)
    assert packed == packed_again
    document = json.loads(plain)
    assert len(document["traceEvents"]) == len(exported(result))
    assert document["otherData"]["engine"] == "vllm-0.6.3"


def test_a_run_without_requests_has_an_empty_trace(tmp_path):
    none = {name: column[:0] for name, column in run("v1").requests.items()}
    steps = {name: column[:0] for name, column in run("v1").steps.items()}
    log = {name: column[:0] for name, column in run("v1").transitions.items()}
    window = run_window(steps, none, None, None)
    listed = list(events({"meta": run("v1").meta}, none, steps, log, window))
    assert {event.ph for event in listed} <= {"M", "C"}


def test_no_track_is_taken_for_a_main_thread():
    """Perfetto shows the track whose number is that of its group first."""
    listed = exported(run("v1"))
    groups = {event["pid"] for event in listed}
    tracks = {event["tid"] for event in listed if event["ph"] == "X"}
    assert len(tracks) > len(groups)
    assert not groups & tracks
