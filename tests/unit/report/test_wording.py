import re

import pytest
from runs import real_run
from tiny import no_run, tiny_run
from worlds import config, trace

import kvsim
from kvsim.core.schema import BLOCKED
from kvsim.fleet import simulate_fleet, summarise_fleet
from kvsim.report import wording
from kvsim.report.pages.run import labels
from kvsim.report.wording import fleet_verdict
from kvsim.results.numerals import SPACE
from kvsim.results.summary import summarise


def sentences_of(summary):
    return [text.replace(SPACE, " ") for text, _ in wording.verdict(summary)]


def sentences(run):
    return sentences_of(summarise(*run))


def test_the_verdict_of_the_tiny_run():
    assert sentences(tiny_run()) == [
        "Rejecting: 1 of 4 requests rejected; offered 15.4 req/s (481 tok/s), served 12.0"
        " req/s (100 tok/s).",
        "4 requests in 250 ms: 3 completed, 1 rejected (too long).",
        "1 preemption, in 25.0 % of the requests: 1 by recompute, 1 token computed again.",
        "For 10.0 ms only the watermark held the head of the queue back (1 step).",
    ]


def test_a_run_without_trouble_says_so():
    run = real_run(4, rate=0.1)
    assert sentences(run)[0].startswith("Steady: offered ")
    assert sentences(run)[1].endswith("none rejected.")
    assert sentences(run)[2:] == ["No preemptions."]


def test_a_steady_run_that_preempts_many_says_so_and_what_would_help():
    summary = summarise(*real_run(4, rate=0.1))
    summary["preempted_requests"] = summary["num_requests"] // 2
    first = wording.verdict(summary)[0]
    assert first.text.startswith("Steady: offered ") and first.tone == "warning"
    pressed = f"50.0{SPACE}% of the requests were preempted; more blocks would help."
    assert first.text.endswith(pressed)


@pytest.mark.parametrize(
    ("settings", "name", "words"),
    [
        ({"num_gpu_blocks_override": 16}, "memory-bound", "lacked blocks 80.0 % of the time"),
        ({"max_num_seqs": 1}, "bound by max_num_seqs", "lacked a slot 64.0 % of the time"),
    ],
)
def test_a_run_is_called_by_what_its_queue_lacked_most_of_the_time(
    settings: dict[str, int], name: str, words: str
) -> None:
    """Five requests, one at a time, take 50 ms for the prompt and 20 steps of 10 ms. During the
    last none waits: 4 of 5 parts are 80 %. A prompt uses up the tokens of its step, so the slot is
    what lacks in 4 times 200 of 1,250 ms. The page and a fleet agree."""
    sent = [(0, 40, 21)] * 5
    run = kvsim.simulate(trace(*sent), config(**settings)).summary
    fleet = summarise_fleet(simulate_fleet(trace(*sent * 2), [config(**settings)] * 2))
    for summary, told in ((run, wording.verdict(run)), (fleet, fleet_verdict(fleet))):
        text = told[0].text.replace(SPACE, " ")
        assert text.lower().startswith(f"{name}: the head")
        assert words in text and told[0].tone == "warning"
        assert re.search(r"on average, (1.00 of 3|2.00 of 6).00 requests ran", text)
        assert f'<span class="tag warning">{name[0].upper()}{name[1:]}<' in labels(summary)


def test_a_run_whose_queue_waits_for_little_has_just_finished() -> None:
    run = kvsim.simulate(trace(*[(0, 40, 21)] * 5), config()).summary
    assert 0 < run["head_blocked_s"]["tokens"] < run["duration"] / 2
    assert '<span class="tag good">Finished<' in labels(run)
    assert wording.verdict(run)[0].text.startswith("Finished: served ")


def test_every_reason_of_a_refusal_has_a_name():
    causes = [cause for each in wording.BOUNDS.values() for cause in each.causes]
    assert sorted(causes) == sorted(BLOCKED[1:])


def test_several_reasons_are_counted():
    steps, requests, gaps, meta = tiny_run()
    requests["status"] = ["completed", "rejected", "unfinished", "rejected"]
    requests["reason"] = ["", "cannot fit", "", "too long"]
    expected = "1 completed, 2 rejected (1 cannot fit, 1 too long), 1 unfinished."
    assert sentences((steps, requests, gaps, meta))[1].endswith(expected)


def test_swapping_says_what_was_moved():
    steps, requests, gaps, meta = real_run(rate=8, swap=True)
    moved = int(steps["swap_out_blocks"].sum())
    [said] = [text for text in sentences((steps, requests, gaps, meta)) if "preempt" in text]
    assert f"by swap, {moved} blocks out, {moved} back in" in said


def test_an_engine_that_stops_is_explained_with_its_remedy():
    steps, requests, gaps, meta = tiny_run()
    meta["outcome"] = {
        "kind": "swap-space-exhausted",
        "request": "C",
        "explanation": "no CPU block is left to swap out to",
        "remedy": "raise --swap-space",
        "rule": "RuntimeError @ core/scheduler.py:1536",
        "step": 6,
        "time_s": 0.25,
    }
    summary = summarise(steps, requests, gaps, meta)
    assert wording.outcome_title(summary) == "Engine stopped: swap space exhausted"
    assert [(t.replace(SPACE, " "), tone) for t, tone in wording.verdict(summary)[1:4]] == [
        (
            "Engine stopped: swap space exhausted after 250 ms at step 6 on request C."
            " No CPU block is left to swap out to.",
            "bad",
        ),
        ("Remedy: raise --swap-space.", "bad"),
        ("Rule of the engine: RuntimeError @ core/scheduler.py:1536.", "bad"),
    ]


def test_times_are_estimated_unless_measured_or_scaled():
    assert wording.time_source({"cost": {"kind": "measured", "source": "H200"}}) == (
        "MEASURED step times (H200)"
    )
    assert wording.time_source({"cost": {"kind": "scaled"}}) == "SCALED step times"
    for kind in ("roofline", "estimated", "constant", None):
        assert wording.time_source({"cost": {"kind": kind}}) == "ESTIMATED step times"
    assert wording.time_source({}) == "ESTIMATED step times"


def test_steps_priced_outside_the_profile_are_told():
    steps, requests, gaps, meta = tiny_run()
    meta["cost"] = {"kind": "measured", "priced_ns": 200, "extrapolated_ns": 50}
    assert "25.0 % of the step time is extrapolated beyond measured kernel times." in sentences(
        (steps, requests, gaps, meta)
    )


def test_no_requests_are_told():
    assert sentences(no_run())[0] == "No requests."


def test_a_remedy_names_what_was_set_and_not_what_followed_from_it() -> None:
    """Nobody gave max_model_len: it is what fits into the blocks, which somebody did give."""
    few = {"engine": "vllm-v1", "num_gpu_blocks_override": 5}
    run = kvsim.simulate(trace((0, 200, 5)), few).summary
    [first, *_] = sentences_of(run)
    assert first.startswith("Rejecting: 1 of 1 request rejected; nothing was completed; give")
    assert "more than 4 blocks: max_model_len 80 is the most that fits" in first
