"""Every kind of bad file is refused in one line that says where, what and how to fix it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from made import HASHED, jsonl

from kvsim.errors import ConfigError, TraceError
from kvsim.workload import open_trace

PLAIN = {"kvsim_trace": 1}
ROW = {"input_length": 8, "output_length": 4}
IDS = {"input_length": 10, "output_length": 8, "hash_ids": [0, 1, 2]}
MOON = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
TIME = "2023-11-16 18:17:03.9799600"
FLOOR = HASHED | {"partial_hash": False}
SESSION = HASHED | {"hash_scope": "session"}


def but(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`row` with other values; None drops a key."""
    changed = {**row, **changes}
    return {key: value for key, value in changed.items() if value is not None}


NATIVE_ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any] | str], int, str]] = {
    # case: (header, rows, line of the message, what the message says)
    "not JSON": (PLAIN, ["{"], 2, "not JSON"),
    "text after the object": (PLAIN, ["{} {}"], 2, "not JSON: Extra data"),
    "not an object": (PLAIN, ["[1]"], 2, "a JSON list, not an object"),
    "a repeated key": (PLAIN, ['{"input_length":1,"input_length":2}'], 2, "is given twice"),
    "a repeated key inside": (PLAIN, ['{"tags":{"a":1,"a":2}}'], 2, "is given twice"),
    "nested too deeply": (PLAIN, ['{"tags":' + "[" * 100_000], 2, "nested too deeply"),
    "NaN": (PLAIN, ['{"arrival_s":NaN}'], 2, "NaN is not a number of JSON"),
    "Infinity": (PLAIN, ['{"arrival_s":Infinity}'], 2, "Infinity is not a number of JSON"),
    "a number beyond floats": (PLAIN, ['{"arrival_s":1e999}'], 2, "1e999 is too large"),
    "thousands of digits": (PLAIN, ['{"input_length":' + "9" * 5000 + "}"], 2, "too many digits"),
    "an unknown key": (PLAIN, [but(ROW, arival_s=1)], 2, "arival_s: unknown key; did you mean"),
    "input missing": (PLAIN, [but(ROW, input_length=None)], 2, "input_length: missing"),
    "input zero": (PLAIN, [ROW, but(ROW, input_length=0)], 3, "input_length: 0 is not"),
    "input negative": (PLAIN, [but(ROW, input_length=-3)], 2, "input_length: -3 is not"),
    "input true": (PLAIN, [but(ROW, input_length=True)], 2, "input_length: true is not"),
    "input a float": (PLAIN, [but(ROW, input_length=8.0)], 2, "input_length: 8.0 is not"),
    "input text": (PLAIN, [but(ROW, input_length="8")], 2, 'input_length: "8" is not'),
    "output zero": (PLAIN, [but(ROW, output_length=0)], 2, "output_length: 0 is not"),
    "input huge": (PLAIN, [but(ROW, input_length=2**24)], 2, "input_length: 16777216 is above"),
    "total huge": (
        PLAIN,
        [{"input_length": 2**24 - 2, "output_length": 2}],
        2,
        "input_length: with the output it makes 16777216 tokens",
    ),
    "time negative": (PLAIN, [but(ROW, arrival_s=-0.5)], 2, "arrival_s: -0.5 is negative"),
    "time true": (PLAIN, [but(ROW, arrival_s=True)], 2, "arrival_s: true is not a number"),
    "time too large": (PLAIN, [but(ROW, arrival_s=1e300)], 2, "arrival_s: 1e+300 is too large"),
    "time unsorted": (
        PLAIN,
        [but(ROW, arrival_s=4), but(ROW, arrival_s=3.2)],
        3,
        "arrival_s: 3.2 is before the previous row's time; sort the file",
    ),
    "time on some rows": (PLAIN, [but(ROW, arrival_s=4), ROW], 3, "arrival_s: missing, but"),
    "time on later rows": (PLAIN, [ROW, but(ROW, arrival_s=4)], 3, "arrival_s: earlier rows lack"),
    "id twice": (PLAIN, [but(ROW, id="1"), but(ROW, id=1)], 3, 'id: "1" is also on line 2'),
    "id on some rows": (PLAIN, [but(ROW, id=1), ROW], 3, "id: missing, but earlier rows have it"),
    "id a float": (PLAIN, [but(ROW, id=1.5)], 2, "id: 1.5 is not a string or an integer"),
    "id half a character": (
        PLAIN,
        ['{"id":"\\ud800","input_length":1,"output_length":1}'],
        2,
        "id:",
    ),
    "after unknown": (PLAIN, [but(ROW, after="x")], 2, 'after: no earlier row has id "x"'),
    "after itself": (PLAIN, [but(ROW, id="a", after="a")], 2, 'after: no earlier row has id "a"'),
    "after a later row": (PLAIN, [but(ROW, after=1), ROW], 2, "after: no earlier row"),
    "delay without after": (PLAIN, [but(ROW, delay_s=1)], 2, "delay_s: without after"),
    "delay negative": (PLAIN, [ROW, but(ROW, after=0, delay_s=-1)], 3, "delay_s: -1 is negative"),
    "session a number": (PLAIN, [but(ROW, session=3)], 2, "session: 3 is not a string"),
    "turn negative": (PLAIN, [but(ROW, turn=-1)], 2, "turn: -1 is not"),
    "priority a float": (PLAIN, [but(ROW, priority=1.0)], 2, "priority: 1.0 is not"),
    "deadline text": (PLAIN, [but(ROW, deadline_s="soon")], 2, 'deadline_s: "soon" is not'),
    "tags a list": (PLAIN, [but(ROW, tags=[])], 2, "tags: [] is not an object"),
    "ids without block_size": (PLAIN, [IDS], 2, "hash_ids: the header has no block_size"),
    "too few ids": (
        HASHED,
        [IDS, but(IDS, hash_ids=[0, 1])],
        3,
        "hash_ids: 2 ids, expected 3 = ceil",
    ),
    "too many ids": (FLOOR, [IDS], 2, "hash_ids: 3 ids, expected 2 = floor(10/4)"),
    "ids not a list": (HASHED, [but(IDS, hash_ids=7)], 2, "hash_ids: 7 is not a list"),
    "an id negative": (HASHED, [but(IDS, hash_ids=[0, -1, 2])], 2, "hash_ids: -1 is not"),
    "an id true": (HASHED, [but(IDS, hash_ids=[0, True, 2])], 2, "hash_ids: true is not"),
    "an id of 65 bits": (HASHED, [but(IDS, hash_ids=[0, 2**64, 2])], 2, "hash_ids: 184467440737"),
    "runs too long": (
        HASHED,
        [but(IDS, hash_ids=None, hash_runs=[[0, 10**12]])],
        2,
        "hash_runs: 1000000000000 ids, expected 3",
    ),
    "a run of none": (
        HASHED,
        [but(IDS, hash_ids=None, hash_runs=[[0, 3], [9, 0]])],
        2,
        "hash_runs: [9, 0] is not [start, count]",
    ),
    "a run of three": (HASHED, [but(IDS, hash_ids=None, hash_runs=[[0, 3, 1]])], 2, "hash_runs:"),
    "ids and runs": (
        HASHED,
        [but(IDS, hash_runs=[[0, 3]])],
        2,
        "hash_ids: there is also hash_runs",
    ),
    "two predecessors": (
        HASHED,
        [IDS, but(IDS, hash_ids=[5, 1, 6])],
        3,
        "hash_ids: id 1 follows 5 and elsewhere 0",
    ),
    "a run into the middle": (
        HASHED,
        [but(IDS, input_length=12, hash_ids=[7, 5, 8]), but(IDS, hash_ids=[4, 5, 6])],
        3,
        "hash_ids: id 5 follows 4 and elsewhere 7",
    ),
    "two tails": (HASHED, [IDS, but(IDS, input_length=11)], 3, "partial block of 3 and 2 tokens"),
    "full and partial": (HASHED, [IDS, but(IDS, input_length=12)], 3, "and elsewhere a full one"),
    "no scope": (SESSION, [IDS], 2, "scope: missing; with hash_scope"),
    "output ids alone": (
        HASHED,
        [but(ROW, output_hash_ids=[1])],
        2,
        "output_hash_ids: without hash",
    ),
    "output ids, partial": (
        HASHED,
        [but(IDS, output_hash_ids=[3])],
        2,
        "output_hash_ids: the block they begin with is partial",
    ),
    "output ids, too many": (
        FLOOR,
        [but(IDS, hash_ids=[0, 1], output_hash_runs=[[2, 3]])],
        2,
        "output_hash_runs: 3 ids, but the output completes 2 blocks",
    ),
    "two contents": (HASHED, [but(IDS, parent=0)], 2, "hash_ids: there is also parent"),
    "tokens too few": (PLAIN, [but(ROW, tokens=[1])], 2, "tokens: 1 tokens, but input_length is 8"),
    "output tokens too few": (
        PLAIN,
        [but(ROW, tokens=[1] * 8, output_tokens=[])],
        2,
        "output_tokens: 0 tokens, but output_length is 4",
    ),
    "output tokens alone": (
        PLAIN,
        [but(ROW, output_tokens=[1])],
        2,
        "output_tokens: without tokens",
    ),
    "a token negative": (PLAIN, [but(ROW, tokens=[-1] * 8)], 2, "tokens: -1 is not"),
    "prefix too long": (PLAIN, [but(ROW, prefix=[["a", 9]])], 2, "prefix: 9 tokens, but"),
    "prefix of nothing": (PLAIN, [but(ROW, prefix=[["a", 0]])], 2, 'prefix: ["a", 0] is not'),
    "prefix not a list": (PLAIN, [but(ROW, prefix="a")], 2, 'prefix: "a" is not a list'),
    "parent unknown": (PLAIN, [but(ROW, parent=5)], 2, 'parent: no earlier row has id "5"'),
    "parent too long": (PLAIN, [ROW, but(ROW, parent=0)], 3, "parent: its stream has 12 tokens"),
    "keep too long": (PLAIN, [ROW, but(ROW, parent=0, keep=9)], 3, "keep: 9 is above"),
    "keep alone": (PLAIN, [but(ROW, keep=1)], 2, "keep: without parent"),
}


@pytest.mark.parametrize("case", NATIVE_ROWS)
def test_a_bad_native_row_is_refused(case: str, tmp_path: Path) -> None:
    header, rows, line, says = NATIVE_ROWS[case]
    refused(jsonl(tmp_path, header, *rows), line, says)


HEADERS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "another version": (
        {"kvsim_trace": 2},
        "kvsim_trace: version 2; give one of those understood: 1",
    ),
    "version true": ({"kvsim_trace": True}, "kvsim_trace: version true"),
    "damaged": ('{"kvsim_trace":1,', "not JSON"),
    "block_size 0": (HASHED | {"block_size": 0}, "block_size: 0 is not"),
    "kind misspelt": (HASHED | {"hash_kind": "prefx"}, 'hash_kind: "prefx" is not "prefix" or'),
    "kind missing": (
        {"kvsim_trace": 1, "block_size": 4, "partial_hash": True},
        "hash_kind: missing",
    ),
    "partial missing": (
        {"kvsim_trace": 1, "block_size": 4, "hash_kind": "prefix"},
        "partial_hash: missing",
    ),
    "partial a number": (HASHED | {"partial_hash": 1}, "partial_hash: 1 is not true or false"),
    "scope misspelt": (HASHED | {"hash_scope": "sess"}, 'hash_scope: "sess" is not'),
    "an unknown key": (PLAIN | {"blok_size": 4}, "blok_size: unknown key; did you mean"),
    "source text": (PLAIN | {"source": "me"}, 'source: "me" is not an object'),
    "no rows": (PLAIN, "no requests after the header"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_bad_native_header_is_refused(case: str, tmp_path: Path) -> None:
    header, says = HEADERS[case]
    rows = [] if case == "no rows" else [ROW]
    refused(jsonl(tmp_path, header, *rows), 1, says)


MOONCAKE_ROWS: dict[str, tuple[list[dict[str, Any] | str], int, str]] = {
    "time missing": ([MOON, but(MOON, timestamp=None)], 2, "timestamp: missing, but"),
    "time negative": ([but(MOON, timestamp=-1)], 1, "timestamp: -1 is negative"),
    "two names for one": ([but(MOON, input_tokens=600)], 1, "input_tokens: this and input_length"),
    "input fractional": ([but(MOON, input_length=600.5)], 1, "input_length: 600.5 is not"),
    "output negative": ([but(MOON, output_length=-1)], 1, "output_length: -1 is not"),
    "total huge": ([but(MOON, output_length=2**24 - 1)], 1, "input_length: with the output"),
    "one count wrong": (
        [MOON, but(MOON, input_length=513 * 512), but(MOON, input_length=1024)],
        2,
        "hash_ids: 2 ids, expected 513 = ceil(262656/512)",
    ),
    "an id negative": ([but(MOON, hash_ids=[0, -1])], 1, "hash_ids: -1 is not"),
    "delay alone": ([but(MOON, delay=5)], 1, "delay: without session_id"),
    "two block sizes": (
        [but(MOON, block_size=512), but(MOON, block_size=16)],
        2,
        "block_size: 16, but 512 on earlier rows",
    ),
    "id twice": (
        [but(MOON, request_id="a"), but(MOON, request_id="a")],
        2,
        'request_id: "a" is also on line 1',
    ),
    "not an object": ([MOON, "7"], 2, "a JSON number, not an object"),
}


@pytest.mark.parametrize("case", MOONCAKE_ROWS)
def test_a_bad_mooncake_row_is_refused(case: str, tmp_path: Path) -> None:
    rows, line, says = MOONCAKE_ROWS[case]
    refused(jsonl(tmp_path, *rows), line, says)


def test_a_wrong_block_size_is_refused_with_the_sizes_that_fit(tmp_path: Path) -> None:
    rows = [{**MOON, "input_length": n, "hash_ids": list(range(-(-n // 16)))} for n in (160, 161)]
    refused(jsonl(tmp_path, *rows), None, "block size 512 does not fit: the id counts admit [16,")
    rows = [{**MOON, "input_length": n, "hash_ids": list(range(n // 64))} for n in (127, 6400)]
    refused(jsonl(tmp_path, *rows), None, "block size 512 does not fit: the id counts admit (63.5,")


AZURE_LINES: dict[str, tuple[list[str], int, str]] = {
    "a column missing": (
        ["TIMESTAMP,ContextTokens", f"{TIME},3"],
        1,
        "GeneratedTokens: no such column; columns found: TIMESTAMP,ContextTokens",
    ),
    "a column twice": ([f"{AZURE},GeneratedTokens", f"{TIME},3,3,3"], 1, "twice in the header"),
    "a ragged row": ([AZURE, f"{TIME},3,3", f"{TIME},3"], 3, "2 cells, expected 3"),
    "an empty cell": ([AZURE, f"{TIME},,3"], 2, 'ContextTokens: "" is not an integer >= 0'),
    "a negative length": ([AZURE, f"{TIME},3,-3"], 2, 'GeneratedTokens: "-3" is not an integer'),
    "a huge length": ([AZURE, f"{TIME},16777216,1"], 2, 'ContextTokens: "16777216" is above'),
    "a huge total": ([AZURE, f"{TIME},16777215,1"], 2, "with the output it makes"),
    "not a time": ([AZURE, "yesterday,3,3"], 2, 'TIMESTAMP: "yesterday" is not a time'),
    "not a date": ([AZURE, "2023-13-16 18:17:03,3,3"], 2, "is not a date"),
    "a quoted line end": ([AZURE, f'{TIME},"3', '4",3'], 2, "a quote does not close on its line"),
}


@pytest.mark.parametrize("case", AZURE_LINES)
def test_a_bad_azure_file_is_refused(case: str, tmp_path: Path) -> None:
    lines, line, says = AZURE_LINES[case]
    refused(jsonl(tmp_path, *lines, name="x.csv"), line, says)


GZIPPED = gzip.compress(b'{"kvsim_trace":1}\n' + b'{"input_length":1,"output_length":1}\n' * 9999)
FILES: dict[str, tuple[bytes, int | None, str]] = {
    "empty": (b"", None, "empty"),
    "blank": (b"\n  \n", None, "empty"),
    "not UTF-8": (b'{"kvsim_trace":1}\n{"id":"\xff"}\n', 2, "not UTF-8 at byte 8"),
    "gzip cut short": (GZIPPED[:-30], None, "the gzip file ends too early"),
    "gzip without a tail": (GZIPPED[:-5], None, "the gzip file ends too early"),
    "gzip damaged": (GZIPPED[:10] + b"\xff" * 20, 1, "the gzip file is damaged"),
    "gzip of a wrong sum": (GZIPPED[:-8] + b"\0" * 8, None, "the gzip file is damaged"),
    "gzip in name only": (b"\x1f\x8b nothing", 1, "the gzip file"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_file_is_refused(case: str, tmp_path: Path) -> None:
    content, line, says = FILES[case]
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError) as refusal:
        open_trace(str(path))
    message = str(refusal.value)
    assert says in message and "\n" not in message
    assert message.startswith(f"{path}:" if line is None else f"{path}:{line}: ")


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    refused(str(tmp_path / "none.jsonl"), None, "no such file")
    refused(str(tmp_path), None, "a folder without WEKA session files; give one trace file")


def test_a_failed_request_in_a_table_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n1,,\n")
    refused(str(path), 3, "leave failed requests out")
    refused("a\0b", None, "cannot be read")


def test_a_line_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsim.settings.limits.LINE_BYTES", 100)
    says = "a line of bytes above the limit of 100; give less, or kvsim --limits 10"
    refused(jsonl(tmp_path, PLAIN, ROW, ROW | {"x_": "y" * 100}), 3, says)


FOREIGN: dict[str, tuple[str, str]] = {
    "Dynamo": ('{"schema":"dynamo.agentic_mooncake","version":2}', "a Dynamo agentic_mooncake"),
    "texts": ('{"text_input":"hello","output_length":1}', "a Mooncake file of texts"),
    "unknown keys": ('{"question":"hello"}', 'unknown format; keys found: "question"; formats'),
    "unknown lines": ("when\n1\n", 'unknown format; columns found: "when"; formats known'),
    "unknown columns": ("when,what\n1,2\n", 'a table with columns "when", "what"; say which'),
    "a JSON list": ("[1, 2]", "unknown format; keys found: none"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_format_without_a_reader_is_refused_by_name(case: str, tmp_path: Path) -> None:
    content, says = FOREIGN[case]
    refused(jsonl(tmp_path, content), None, says)


def test_an_unknown_format_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown 'mooncak'; did you mean 'mooncake'\?"):
        open_trace(jsonl(tmp_path, MOON), "mooncak")


def test_a_forced_format_must_fit(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"x.jsonl:1: first line is not a kvsim_trace header; add"):
        open_trace(jsonl(tmp_path, MOON), "native")
    with pytest.raises(TraceError, match=r"x.jsonl:1: TIMESTAMP: no such column"):
        open_trace(jsonl(tmp_path, MOON), "azure")


def refused(path: str, line: int | None, says: str) -> None:
    """The file is refused in one line that names it, the line if there is one, and a remedy."""
    with pytest.raises(TraceError) as refusal:
        open_trace(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}: " if line is None else f"{path}:{line}: ")
    assert says in message
    assert "; " in message
    assert "\n" not in message
    assert len(message) < len(path) + 400


def test_every_case_differs_from_a_file_that_is_read(tmp_path: Path) -> None:
    """The rows that the cases spoil are themselves fine."""
    for rows in (
        [PLAIN, ROW],
        [HASHED, IDS],
        [FLOOR, but(IDS, hash_ids=[0, 1], output_hash_runs=[[2, 2]])],
        [SESSION, but(IDS, session="s")],
        [MOON],
    ):
        assert len(open_trace(jsonl(tmp_path, *rows)).rows) == 1
    assert len(open_trace(jsonl(tmp_path, AZURE, f"{TIME},3,3", name="x.csv")).rows) == 1
    assert json.loads(Path(jsonl(tmp_path, ROW)).read_text()) == ROW
