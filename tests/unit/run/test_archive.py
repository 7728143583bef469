"""Columns of requests are what the trace says of them and what they came to, in trace order."""

import random

from kvsim.core.request import Request
from kvsim.core.schema import REQUEST_COLUMNS
from kvsim.run.serving import Archive
from kvsim.workload import Row


def rows_of(number: int) -> list[Row]:
    return [
        Row(i, f"r{i}", i + 1, None, 10 + i, 20 + i, session="s" if i % 2 else None, priority=-i)
        for i in range(number)
    ]


def test_columns_are_the_facts_of_rows_and_the_attributes_of_requests() -> None:
    rows = rows_of(23)
    archive = Archive(rows)
    requests = [Request(i, f"r{i}", 10 + i) for i in range(23)]
    for i, request in enumerate(requests):
        request.finish_ns = 2**61 + i
        request.cached_tokens = 3 * i
        request.reason = "too-long" if i == 5 else ""
    for request in random.Random(0).sample(requests, len(requests)):
        archive.figures.add(request)
    columns = archive.columns()
    for name in ("id", "index", "input_length", "output_length", "priority"):
        assert list(columns[name]) == [getattr(row, name) for row in rows], name
    for name in ("finish_ns", "arrival_ns", "n"):
        assert list(columns[name]) == [getattr(request, name) for request in requests], name
    assert columns["num_cached_tokens"].tolist() == [3 * i for i in range(23)]
    assert columns["session"][:2] == ["", "s"]
    assert columns["status"].count("rejected") == 1 and columns["reason"][5] == "too-long"
    assert all(len(column) == 23 for column in columns.values())


def test_each_column_has_the_attribute_of_its_name() -> None:
    request = Request(0, "r0", 7)
    attributes = {name: name for name in REQUEST_COLUMNS} | {"num_cached_tokens": "cached_tokens"}
    for number, attribute in enumerate(attributes.values()):
        if attribute not in ("index", "output_tokens"):  # The first is its row, the second counted.
            setattr(request, attribute, 100 + number)
    request.n, request.length = 1, 7 + 5
    archive = Archive(rows_of(1))
    archive.figures.add(request)
    columns = archive.columns()
    assert {name: columns[name].tolist() for name in attributes} == {
        name: [getattr(request, attribute)] for name, attribute in attributes.items()
    }
    assert columns["output_tokens"] == [5]


def test_no_requests_have_empty_columns() -> None:
    assert {len(column) for column in Archive([]).columns().values()} == {0}


def test_an_archive_knows_who_is_missing() -> None:
    archive = Archive(rows_of(6))
    assert archive.missing() == [0, 1, 2, 3, 4, 5]
    for index in (4, 1):
        archive.figures.add(Request(index, f"r{index}", 1))
    assert archive.missing() == [0, 2, 3, 5]
    assert archive.columns()["id"] == ["r1", "r4"]
