"""An engine whose requests come while it runs decides what `kvsim run` decides."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pandas as pd
import pytest

from kvsim.against.serve.session import Session
from kvsim.against.serve.watch import Entry, Step, filler, tokens_of, tokens_of_chat
from kvsim.core.host import NEVER_NS
from kvsim.errors import ConfigError
from kvsim.run.simulation import read_config, simulate
from kvsim.workload import Row, TokenContent, Trace
from tests.support.serving import SMALL


def made_trace(requests: int, seed: int) -> Trace:
    """Requests with common beginnings, some of which go on from the answer to an earlier one."""
    random, rows, now_ns = Random(seed), list[Row](), 0
    heads = [[random.randrange(9999) for _ in range(300)] for _ in range(4)]
    for index in range(requests):
        now_ns += random.randrange(40_000_000)
        prompt = heads[random.randrange(4)][: random.randrange(20, 300)]
        prompt += [random.randrange(9999) for _ in range(random.randrange(1, 200))]
        if index > 5 and random.random() < 0.3:
            before = rows[random.randrange(len(rows))].content
            assert isinstance(before, TokenContent) and before.output
            prompt = [*before.prompt, *before.output, *prompt[:30]][:700]
        length = random.randrange(1, 120)
        content = TokenContent(tuple(prompt), tuple(filler(index, length)[1]))
        rows.append(
            Row(
                *(index, f"r{index}", index + 1, now_ns, len(prompt), length, content),
                max_new_tokens=length,
                ignore_eos=True,
            )
        )
    return Trace("made", "native", "0", rows)


def prompt_of(row: Row) -> tuple[int, ...]:
    assert isinstance(row.content, TokenContent)
    return row.content.prompt


def row_of(
    id: str, prompt: Iterable[int], length: int, most: int | None = None, at_ns: int = 0
) -> Row:
    tokens = tuple(prompt)
    content = TokenContent(tokens)
    return Row(0, id, 0, at_ns, len(tokens), length, content, max_new_tokens=most)


def finished(session: Session) -> Session:
    while session.next_ns < NEVER_NS:
        session.step()
    return session


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"async_scheduling": False, "vllm_version": "0.9.2"},
        {"pipeline_parallel_size": 2},
        {"kv_offloading_size": 0.1},
        {"enable_prefix_caching": False},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "acceptance_rate": 0.6,
            }
        },
        {"engine": "sglang"},
    ],
    ids=lambda further: "-".join(further) or "default",
)
def test_decides_as_kvsim_run(further: dict[str, Any]) -> None:
    trace, config = made_trace(120, 7), read_config(SMALL | further)
    expected = simulate(trace, config)
    session = Session(config, records=True)
    for row in trace.rows:
        assert row.arrival_ns is not None
        session.send(row)
    result = finished(session).result()
    if not further:
        assert expected.summary["num_preemptions"] > 10
    pd.testing.assert_frame_equal(result.steps_frame(), expected.steps_frame())
    pd.testing.assert_frame_equal(result.requests_frame(), expected.requests_frame())


def test_clients_see_every_token_at_the_end_of_its_step() -> None:
    session, seen = Session(read_config(SMALL)), list[tuple[int, str]]()
    session.steps.listeners.append(
        lambda _, step: seen.extend((step.now_ns, each.request.id) for each, _ in step.tokens)
    )
    entry = session.send(row_of("a", range(40), 5, 5, 1_000))
    other = session.send(row_of("b", range(20), 3, 9, 5_000_000))
    finished(session)
    assert [each for _, each in seen].count("a") == entry.tokens == 5
    assert [each for _, each in seen].count("b") == other.tokens == 3
    assert (entry.reason, other.reason) == ("length", "stop")
    assert entry.request.finish_ns == max(now_ns for now_ns, each in seen if each == "a")


def run_until(session: Session, entry: Entry, tokens: int) -> None:
    while entry.tokens < tokens:
        session.step()


def test_given_up_streams_free_their_blocks_in_that_step() -> None:
    session = Session(read_config(SMALL))
    pool, steps = session.parts.blocks.gpu, list[Step]()
    session.steps.listeners.append(lambda _, step: steps.append(step))
    stays = session.send(row_of("stays", range(1000, 1100), 60))
    gone = session.send(row_of("gone", range(600), 400))
    run_until(session, gone, 3)
    held = pool.used
    session.cancel(gone, session.now_ns)
    before = len(steps)
    while not gone.reason:
        session.step()
    assert gone.reason == "abort" and len(steps) - before <= 2
    assert pool.used <= held - 600 // 16
    finished(session)
    assert stays.tokens == 60 and pool.used == 0


def test_who_is_given_up_while_waiting_never_runs() -> None:
    session = Session(read_config(SMALL | {"max_num_seqs": 1}), records=True)
    runs = session.send(row_of("runs", range(100), 50))
    waits = session.send(row_of("waits", range(100), 50))
    run_until(session, runs, 10)
    session.cancel(waits, session.now_ns)
    finished(session)
    result = session.result()
    assert (waits.reason, waits.tokens, runs.tokens) == ("abort", 0, 50)
    assert result.requests_frame()["status"].tolist() == ["completed", "aborted"]


def test_who_is_given_up_before_he_arrives_never_runs() -> None:
    session = Session(read_config(SMALL))
    runs = session.send(row_of("runs", range(100), 50))
    comes = session.send(row_of("comes", range(100), 50, 50, 5_000_000_000))
    run_until(session, runs, 10)
    session.cancel(comes, session.now_ns)
    finished(session)
    assert (comes.reason, comes.tokens, runs.tokens) == ("abort", 0, 50)
    assert session.parts.blocks.gpu.used == 0


def test_closing_ends_everything() -> None:
    session = Session(read_config(SMALL), records=True)
    entries = [session.send(row_of(str(k), range(k, k + 200), 300)) for k in range(40)]
    run_until(session, entries[0], 5)
    session.close()
    assert {entry.reason for entry in entries} == {"abort"}
    assert session.parts.blocks.gpu.used == 0
    assert session.result().summary["aborted"] == 40


def test_too_long_a_prompt_is_an_error() -> None:
    session = Session(read_config(SMALL))
    entry = session.send(row_of("long", range(2000), 5))
    finished(session)
    assert (entry.reason, entry.error) == ("error", "too-long")


@pytest.mark.parametrize(
    "further", [{"request_rate": 2.0}, {"data_parallel_size": 2}, {"n": 2}, {"num_prompts": 5}]
)
def test_what_clients_decide_is_refused(further: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave"):
        Session(read_config(SMALL | further))


def test_words_come_back_as_the_tokens_that_were_generated() -> None:
    text, ids = filler(3, 200)
    answer = text.decode()
    assert tokens_of(answer) == list(ids)
    first = tokens_of_chat([("user", "What is 12345? Ünïcode, too.")])
    second = tokens_of_chat(
        [("user", "What is 12345? Ünïcode, too."), ("assistant", answer), ("user", "Go on")]
    )
    assert second[: len(first) + 200] == first + list(ids)
    assert filler(4, 8)[1] != filler(3, 8)[1]
