"""Sentences on sessions: numbers of the summaries, the oracle last, and how sure they are."""

from typing import Any

import pytest

from kvsim.explain.certainty import Comparison
from kvsim.report.compare import session_words
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload.synthetic import synthesise

KEYS = ("mean_s", "slowest_tenth_served_s", "lost_in_pauses_tokens", "computed_tokens")
NAMES = ("lru", "clairvoyant", "fifo", "other")


@pytest.fixture(scope="module")
def runs() -> list[tuple[str, Any]]:
    given: dict[str, Any] = {"model": "llama-3.1-8b", "hardware": "h100", "block_size": 64}
    given |= {"num_gpu_blocks_override": 500, "max_model_len": 24_000}
    trace = synthesise("agents", 3, requests=60)
    found = []
    for name, eviction in zip(NAMES, ("lru", "belady", "fifo", "lru"), strict=True):
        config = make_config({**given, "block_manager_args": {"eviction": eviction}}, "test")
        found.append((name, simulate(trace, config).summary))
    # Clients think for so long that no eviction makes much of a difference here.
    for (_, summary), factor in zip(found, (1, 0.877, 1.05, 1.001), strict=True):
        summary["sessions"]["mean_s"] = 200.0 * factor
    return found


def compared(means: list[tuple[float, ...]]) -> Comparison:
    """A comparison of runs with these mean sessions on each seed, and other figures alike."""
    seeds = tuple(range(len(means[0])))
    values = {f"sessions.{key}": tuple((8e6,) * len(seeds) for _ in means) for key in KEYS[1:]}
    values["sessions.mean_s"] = tuple(means)
    names = NAMES[: len(means)]
    return Comparison(names, "seeds", ("requests",), seeds, len(seeds), 0.05, 0.01, values, {})


def test_one_run_each(runs: list[tuple[str, Any]]) -> None:
    first, *others = session_words(runs)
    assert f"{runs[0][1]['sessions']['num']}\u00a0sessions" in first
    lost = [summary["sessions"]["lost_in_pauses_tokens"] / 1e6 for _, summary in runs]
    assert lost[1] < lost[0] and f"{lost[0]:.3f}"[:5] in first
    assert others[-1] == "No difference of more than 1.0\u00a0% to lru: other."
    said = {sentence.partition(" ")[0].rstrip(","): sentence for sentence in others}
    assert "sees the future, ends the mean session 12.3\u00a0% sooner, the" in said["clairvoyant"]
    assert "ends the mean session 5.0\u00a0% later, the" in said["fifo"]
    assert list(said).index("clairvoyant") == len(said) - 2


def test_seeds_give_intervals(runs: list[tuple[str, Any]]) -> None:
    """−10 % on each of four seeds is sure, −10 % in the mean of ±40 % is not, 0.1 % is none."""
    sure, unsure = (90.0, 89.0, 91.0, 90.0), (60.0, 140.0, 50.0, 110.0)
    means = [(100.0,) * 4, sure, unsure, (100.1, 100.1, 100.0, 100.1)]
    text = [sentence.replace("\u00a0", " ") for sentence in session_words(runs, compared(means))]
    assert "4 seeds" in text[0] and "takes 100 s" in text[0]
    assert "fifo ends the mean session 10.0 % sooner (not significant: −" in text[1]
    assert "clairvoyant, which sees the future, ends the mean session 10.0 % sooner (−1" in text[2]
    assert text[3] == "No difference of more than 1.0 % to lru: other."


def test_without_sessions_nothing_is_said(runs: list[tuple[str, Any]]) -> None:
    bare = [(name, {**summary, "sessions": {}}) for name, summary in runs]
    assert list(session_words(bare)) == []


def test_whatever_was_lost_is_said_to_be_lost(runs: list[tuple[str, Any]]) -> None:
    lost = {"lost_in_pauses_tokens": 0, "lost_between_sessions_tokens": 2_000_000}
    given = [(name, {**run, "sessions": {**run["sessions"], **lost}}) for name, run in runs]
    words = next(session_words(given)).replace("\u00a0", " ")
    assert "; it lost hits on 2.00 M tokens between sessions and computed" in words
    lost["lost_in_pauses_tokens"] = 1_000_000
    given = [(name, {**run, "sessions": {**run["sessions"], **lost}}) for name, run in runs]
    words = next(session_words(given)).replace("\u00a0", " ")
    assert "on 1.00 M tokens in pauses, on 2.00 M tokens between sessions and computed" in words
