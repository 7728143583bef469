"""The first decision in which two runs part."""

import copy

from tiny import tiny_run

from kvsim.core.schema import BLOCKED
from kvsim.explain.differences import divergence_words, first_divergence
from kvsim.results.numerals import SPACE

NAMES, POOLS = ("one", "two"), (10, 20)


def steps():
    return copy.deepcopy(tiny_run()[0])


def words(first, other):
    found = first_divergence(first, other)
    return " ".join(divergence_words(found, NAMES, POOLS)).replace(SPACE, " ")


def test_equal_runs_do_not_part():
    assert first_divergence(steps(), steps()) is None
    assert words(steps(), steps()).startswith("Both runs made the same decisions")


def test_another_reason_to_refuse_is_another_decision():
    other = steps()
    other["blocked"][1] = BLOCKED.index("blocks")
    found = first_divergence(steps(), other)
    assert (found.step, found.columns, found.slower_from) == (1, ("blocked",), None)
    text = words(steps(), other)
    assert "one refused the head of the queue (held by the watermark)" in text
    assert "two refused the head of the queue (too few free blocks)" in text


def test_more_free_blocks_alone_are_no_decision_but_are_said():
    other = steps()
    other["free_blocks"] += 10
    assert first_divergence(steps(), other) is None
    other["preempted_recompute"][5] = 0
    text = words(steps(), other)
    assert "one preempted 1 request by recompute" in text
    assert "two preempted none" in text
    assert "one then had 6 of 10 blocks free" in text
    assert "two then had 16 of 20 blocks free" in text


def test_other_times_are_no_other_decision():
    other = steps()
    for name in ("start_ns", "end_ns"):
        other[name][2:] += 1_000
    assert first_divergence(steps(), other) is None
    other["prefill_tokens"][3] += 8
    found = first_divergence(steps(), other)
    assert (found.step, found.slower_from) == (3, 2)
    assert "Times differ from step 2 on, before any decision did." in words(steps(), other)


def test_a_run_that_goes_on_alone():
    shorter = {name: column[:4] for name, column in steps().items()}
    found = first_divergence(shorter, steps())
    assert (found.step, found.columns, found.rows[0]) == (4, (), {})
    assert words(shorter, steps()) == "All 4 steps were the same; then two went on alone."


def test_every_kind_of_decision_has_words():
    base = steps()
    for name in base:
        other = copy.deepcopy(base)
        other[name][3] += 1
        found = first_divergence(base, other)
        if found is not None:
            assert found.columns == (name,)
            assert len(words(base, other)) > 80
