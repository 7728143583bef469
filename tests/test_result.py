"""Columns of requests are their attributes, in trace order."""

import random

from kvsim import result
from kvsim.engine.request import Request


def test_request_columns_are_the_attributes_of_the_requests() -> None:
    requests = [
        Request(i, f"r{i}", 10 + i, 20 + i, session="s" if i % 2 else None) for i in range(23)
    ]
    for i, request in enumerate(requests):
        request.finish_ns = 2**61 + i
        request.cached_tokens = 3 * i
        request.reason = "too-long" if i == 5 else ""
    shuffled = random.Random(0).sample(requests, len(requests))
    columns = result.request_columns(shuffled)
    for name in ("id", "index", "input_length", "output_length", "finish_ns", "arrival_ns"):
        assert list(columns[name]) == [getattr(request, name) for request in requests]
    assert columns["num_cached_tokens"].tolist() == [3 * i for i in range(23)]
    assert columns["session"][:2] == ["", "s"]
    assert columns["status"].count("rejected") == 1 and columns["reason"][5] == "too-long"
    assert all(len(column) == 23 for column in columns.values())


def test_no_requests_have_empty_columns() -> None:
    assert {len(column) for column in result.request_columns([]).values()} == {0}


def test_an_archive_knows_who_is_missing() -> None:
    archive = result.Archive()
    assert archive.missing(3) == [0, 1, 2]
    for index in (4, 1):
        archive.add(Request(index, f"r{index}", 1, 1))
    assert archive.missing(6) == [0, 2, 3, 5]
    assert archive.columns()["id"] == ["r1", "r4"]
