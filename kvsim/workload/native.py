"""The native format, `kvsim_trace` version 1: JSON Lines, a header and one request per line.

```jsonl
{"kvsim_trace":1,"block_size":64,"hash_kind":"prefix","hash_scope":"session","partial_hash":false}
{"id":"a/0","session":"a","arrival_s":6.6,"input_length":640,"output_length":70,"hash_runs":[[1,10]]}
{"id":"a/1","session":"a","arrival_s":9,"after":"a/0","delay_s":2,"input_length":99,"output_length":5}
```

Names are Mooncake's where the meaning is the same; every time carries its unit. The page
docs/reference/trace-format.md describes every key, and docs/reference/trace-format.schema.json the
form of a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from kvsim.errors import TraceError, nearest
from kvsim.workload.chain import Chains
from kvsim.workload.gather import (
    RowRules,
    check_total,
    identifier,
    integer,
    integers,
    mapping,
    nanoseconds,
    string,
)
from kvsim.workload.source import MAX_TOKENS, NS_PER_S, Source, parse, shown
from kvsim.workload.trace import (
    MAX_ID,
    MAX_TOKEN_ID,
    Content,
    HashContent,
    ParentContent,
    Row,
    Runs,
    SegmentContent,
    TokenContent,
    Trace,
    collapse,
    merge,
    total,
)
from kvsim.writing import write_lines

_FORMS = ("hash_ids", "hash_runs", "tokens", "prefix", "parent")
_ADDITIONS = {
    "output_hash_ids": ("hash_ids", "hash_runs"),
    "output_hash_runs": ("hash_ids", "hash_runs"),
    "output_tokens": ("tokens",),
    "keep": ("parent",),
}
"""Key → the forms of content that it belongs to."""
CONTENT_KEYS = frozenset(_FORMS) | _ADDITIONS.keys()


def content_table(row: Row, trace: Trace) -> dict[str, Any]:
    """The keys of a row that say what its tokens are."""
    match row.content:
        case HashContent(prompt, output):
            table: dict[str, Any] = {"hash_runs": prompt}
            return table | {"output_hash_runs": output} if output else table
        case TokenContent(tokens, output_tokens):
            table = {"tokens": tokens}
            return table if output_tokens is None else table | {"output_tokens": output_tokens}
        case SegmentContent(segments):
            return {"prefix": segments}
        case ParentContent(index, keep):
            parent = trace.rows[index]
            table = {"parent": written_id(parent)}
            whole = keep == parent.input_length + parent.output_length
            return table if whole else table | {"keep": keep}
    return {}


def written_id(row: Row) -> str | int:
    """A row's id as a file writes it: as a number if possible."""
    name = row.id
    is_number = name.isascii() and name.isdecimal() and (name[0] != "0" or name == "0")
    # 18 digits fit into 63 bits, whatever reads the file.
    return int(name) if is_number and len(name) < 19 else name


def earlier_row(
    source: Source, index_of: Mapping[str, int], table: dict[str, Any], key: str
) -> int:
    """Index of the earlier row that `table[key]` names."""
    name = identifier(source, table, key)
    if name not in index_of:
        raise source.error(f"no earlier row has id {shown(name)}; name one above this line", key)
    return index_of[name]


def _is_run(run: object) -> bool:
    return (
        isinstance(run, list)
        and [type(value) for value in run] == [int, int]
        and run[0] >= 0
        and run[1] >= 1
        and run[0] + run[1] - 1 <= MAX_ID
    )


def _is_segment(segment: object) -> bool:
    return (
        isinstance(segment, list)
        and [type(value) for value in segment] == [str, int]
        and 1 <= segment[1] <= MAX_TOKENS
    )


VERSION = 1
OWN = "x_"
"""What keys of the user's own begin with."""
_HASH_KEYS = ("block_size", "hash_kind", "partial_hash")
_HEADER_KEYS = frozenset({"kvsim_trace", *_HASH_KEYS, "hash_scope", "model", "origin", "source"})


def read(source: Source) -> Trace:
    """A trace in the native format. Raises `TraceError` at the first line that breaks a rule."""
    lines = source.lines()
    trace, reader = _begin(source, next(lines))
    for line in lines:
        reader.add(parse(source, line))
    _check_whole(source, trace)
    trace.sha256 = source.sha256
    return trace


def stream(source: Source) -> tuple[Trace, Iterator[Row]]:
    """The header, as a trace without rows, and the rows: what their prompts say, and no more.

    Nothing of a row is remembered when the next one is read. So whether ids are unique and chained
    is not checked, and a row that continues another one (`parent`) is refused.
    """
    lines = source.lines()
    trace, reader = _begin(source, next(lines))

    def rows() -> Iterator[Row]:
        for index, line in enumerate(lines):
            table = parse(source, line)
            if "parent" in table:
                raise source.error("earlier rows are not remembered here; give ids", "parent")
            yield reader.prompt(table, index)

    return trace, rows()


def faults(source: Source, most: int) -> list[TraceError]:
    """The faults of a file, row by row, up to `most`; a row that is faulty is passed over."""
    found: list[TraceError] = []
    try:
        lines = source.lines()
        trace, reader = _begin(source, next(lines))
        for line in lines:
            try:
                reader.add(parse(source, line))
            except TraceError as error:
                found.append(error)
                if len(found) == most:
                    return found
        if not found:
            _check_whole(source, trace)
    except TraceError as error:
        found.append(error)
    return found


def write(trace: Trace, path: str) -> None:
    """Write a trace in the native format, whole or not at all; gzipped if `path` ends in `.gz`."""
    write_lines(path, lines(trace))


def lines(trace: Trace) -> Iterator[str]:
    """The lines of the native file of a trace; `read` turns them into the same rows."""
    yield _text(_header_table(trace))
    numbered = all(row.id == str(row.index) for row in trace.rows)
    shared = _shared_model(trace)
    for row in trace.rows:
        table = {} if numbered else {"id": written_id(row)}
        yield _text(table | _row_table(row, trace, shared))


def _begin(source: Source, line: str) -> tuple[Trace, _RowReader]:
    """The trace without rows that a header line begins, and the reader of its rows."""
    header = parse(source, line)
    trace = _header(source, header)
    model = None if header.get("model") is None else string(source, header, "model")
    return trace, _RowReader(source, trace, model)


def _check_whole(source: Source, trace: Trace) -> None:
    """Refuse what only shows when all rows are read."""
    if not trace.rows:
        raise source.error("no requests after the header; add one request per line")
    conflict = Chains(trace).first_conflict(trace) if trace.hash_kind == "prefix" else None
    if conflict is not None:
        row, what = conflict
        what = f'{what}; fix the ids or declare hash_kind "content"'
        raise source.error(what, "hash_ids", row.line)


def _check_version(source: Source, table: dict[str, Any]) -> None:
    if "kvsim_trace" not in table:
        found = ", ".join(map(shown, table)) or "none"
        raise source.error(
            f"first line is not a kvsim_trace header; add one above the rows (keys found: {found})"
        )
    if shown(table["kvsim_trace"]) != str(VERSION):
        what = f"version {shown(table['kvsim_trace'])}; give one of those understood: {VERSION}"
        raise source.error(what, "kvsim_trace")


def _header(source: Source, table: dict[str, Any]) -> Trace:
    _check_version(source, table)
    _own(source, table, _HEADER_KEYS)
    given = [key for key in _HASH_KEYS if key in table]
    missing = [key for key in _HASH_KEYS if key not in table]
    if given and missing:
        raise source.error(f"missing in the header, which has {given[0]}; add it", missing[0])
    return Trace(
        path=source.path,
        format="native",
        sha256="",
        rows=[],
        block_size=integer(source, table, "block_size", 1) if given else None,
        hash_kind=_choice(source, table, "hash_kind", ("prefix", "content")),
        partial_hash=_choice(source, table, "partial_hash", (True, False)),
        hash_scope=_choice(source, table, "hash_scope", ("global", "session")) or "global",
        origin=string(source, table, "origin"),
        source=mapping(source, table, "source") or {},
    )


def _choice(source: Source, table: dict[str, Any], key: str, choices: tuple[Any, ...]) -> Any:
    value = table.get(key)
    # The type counts, too, as `1 == True`.
    if key in table and not any(
        type(value) is type(choice) and value == choice for choice in choices
    ):
        known = " or ".join(map(shown, choices))
        raise source.error(f"{shown(value)} is not {known}; give one of them", key)
    return value


def _own(source: Source, table: dict[str, Any], known: frozenset[str]) -> dict[str, Any] | None:
    """What the user's own keys (`x_NAME`) say, by NAME; any other unknown key is an error."""
    if known.issuperset(table):
        return None
    own = {}
    for key in table:
        if key.startswith(OWN):
            own[key.removeprefix(OWN)] = table[key]
        elif key not in known:
            what = f"unknown key;{nearest(key, sorted(known))} keys of your own begin with {OWN}"
            raise source.error(what, shown(key)[1:-1])
    return own


class _RowReader:
    """Appends checked rows to a trace; remembers what later rows may refer to."""

    def __init__(self, source: Source, trace: Trace, model: str | None) -> None:
        self._source = source
        self._trace = trace
        self._model = model
        self._rules = RowRules(source)
        trace.rows = self._rules.rows

    def add(self, table: dict[str, Any]) -> None:
        """Check the row `table` of the line last read, and append it."""
        source = self._source
        row = self.prompt(table, len(self._trace.rows))
        if "after" in table:
            row.after = earlier_row(source, self._rules.index_of, table, "after")
            row.delay_ns = _time(source, table, "delay_s") if "delay_s" in table else 0
        elif "delay_s" in table:
            raise source.error("without after; add after or drop it", "delay_s")
        row.id = self._rules.id(table, "id")
        row.arrival_ns = self._rules.arrival(table, "arrival_s", NS_PER_S, ordered=True)
        row.model = string(source, table, "model") if "model" in table else self._model
        for key, (attribute, read, _) in _KEYS.items():
            if key in table:
                setattr(row, attribute, read(source, table, key))
        _announce(source, row)
        self._rules.append(row)

    def prompt(self, table: dict[str, Any], index: int) -> Row:
        """The row `table` of the line last read, with its lengths and what its tokens are."""
        source = self._source
        extra = _own(source, table, _ROW_KEYS)
        input_length = integer(source, table, "input_length", 1)
        output_length = integer(source, table, "output_length", 1)
        check_total(source, input_length, output_length, "input_length")
        content = self._content(table, input_length, output_length)
        scope, salt = self._scope(table, content), string(source, table, "salt")
        return Row(
            *(index, str(index), source.line, None, input_length, output_length, content),
            scope=scope,
            salt=salt,
            extra=extra,
        )

    def _scope(self, table: dict[str, Any], content: Content | None) -> str | None:
        by_session = self._trace.hash_scope == "session" and isinstance(content, HashContent)
        if not by_session or "scope" in table:
            return string(self._source, table, "scope")
        if "session" in table:
            return string(self._source, table, "session")
        what = 'missing; with hash_scope "session" a row with hash ids needs a scope or a session'
        raise self._source.error(what, "scope")

    def _content(
        self, table: dict[str, Any], input_length: int, output_length: int
    ) -> Content | None:
        """The content of the row `table`; None if its tokens are unique. Raises `TraceError`."""
        if CONTENT_KEYS.isdisjoint(table):
            return None
        found = [key for key in _FORMS if key in table]
        if len(found) > 1:
            raise self._source.error(f"there is also {found[1]}; keep one of them", found[0])
        for key, forms in _ADDITIONS.items():
            if key in table and not any(form in found for form in forms):
                raise self._source.error(f"without {' or '.join(forms)}; add it or drop this", key)
        match found[0]:
            case "tokens":
                return self._tokens(table, input_length, output_length)
            case "prefix":
                return self._segments(table, input_length)
            case "parent":
                return self._parent(table, input_length)
        return self._hashes(table, found[0], input_length, output_length)

    def _hashes(
        self, table: dict[str, Any], key: str, input_length: int, output_length: int
    ) -> HashContent:
        size = self._trace.block_size
        if size is None:
            what = "the header has no block_size; add block_size, hash_kind and partial_hash to it"
            raise self._source.error(what, key)
        prompt = self._ids(table, "hash_ids", "hash_runs")
        full, tail = divmod(input_length, size)
        partial = bool(self._trace.partial_hash and tail)
        if total(prompt) != full + partial:
            rule = "ceil" if self._trace.partial_hash else "floor"
            expected = f"{full + partial} = {rule}({input_length}/{size})"
            what = f"{total(prompt)} ids, expected {expected}; fix the ids"
            raise self._source.error(what, key)
        output = self._ids(table, "output_hash_ids", "output_hash_runs")
        key = "output_hash_ids" if "output_hash_ids" in table else "output_hash_runs"
        if output and partial:
            what = "the block they begin with is partial and has an id already; drop them"
            raise self._source.error(what, key)
        most = (input_length + output_length) // size - full
        if total(output) > most:
            what = f"{total(output)} ids, but the output completes {most} blocks; drop the rest"
            raise self._source.error(what, key)
        return HashContent(prompt, output)

    def _ids(self, table: dict[str, Any], ids_key: str, runs_key: str) -> Runs:
        if ids_key in table and runs_key in table:
            raise self._source.error(f"there is also {runs_key}; keep one of them", ids_key)
        if ids_key in table:
            return collapse(integers(self._source, table, ids_key, MAX_ID))
        runs = table.get(runs_key, [])
        if not isinstance(runs, list):
            raise self._source.error(
                f"{shown(runs)} is not a list of [start, count]; give one", runs_key
            )
        for run in runs:
            if not _is_run(run):
                what = f"{shown(run)} is not [start, count] with count >= 1 and ids 0 .. 2**64 - 1"
                raise self._source.error(f"{what}; fix it", runs_key)
        return merge(runs)

    def _tokens(self, table: dict[str, Any], input_length: int, output_length: int) -> TokenContent:
        def tokens(key: str, length_key: str, length: int) -> tuple[int, ...]:
            values = integers(self._source, table, key, MAX_TOKEN_ID)
            if len(values) != length:
                what = f"{len(values)} tokens, but {length_key} is {length}; fix one of them"
                raise self._source.error(what, key)
            return tuple(values)

        prompt = tokens("tokens", "input_length", input_length)
        if "output_tokens" not in table:
            return TokenContent(prompt)
        return TokenContent(prompt, tokens("output_tokens", "output_length", output_length))

    def _segments(self, table: dict[str, Any], input_length: int) -> SegmentContent:
        segments = table["prefix"]
        if not isinstance(segments, list):
            raise self._source.error(
                f"{shown(segments)} is not a list of [name, length]; give one", "prefix"
            )
        for segment in segments:
            if not _is_segment(segment):
                what = f"{shown(segment)} is not [name, length] with length >= 1; fix it"
                raise self._source.error(what, "prefix")
            # Refuses half a surrogate pair.
            string(self._source, {"prefix": segment[0]}, "prefix")
        length = sum(length for _, length in segments)
        if length > input_length:
            what = f"{length} tokens, but input_length is {input_length}; shorten the segments"
            raise self._source.error(what, "prefix")
        return SegmentContent(tuple((name, length) for name, length in segments))

    def _parent(self, table: dict[str, Any], input_length: int) -> ParentContent:
        index = earlier_row(self._source, self._rules.index_of, table, "parent")
        parent = self._rules.rows[index]
        length = parent.input_length + parent.output_length
        if "keep" not in table:
            if length > input_length:
                what = f"its stream has {length} tokens, but input_length is {input_length}"
                raise self._source.error(f"{what}; give keep", "parent")
            return ParentContent(index, length)
        keep = integer(self._source, table, "keep", 0)
        if keep > min(length, input_length):
            what = (
                f"{keep} is above the parent's stream ({length}) or input_length ({input_length})"
            )
            raise self._source.error(f"{what}; give less", "keep")
        return ParentContent(index, keep)


def _announce(source: Source, row: Row) -> None:
    """An output that goes on to `max_new_tokens` has its length; no other one exceeds it."""
    if row.max_new_tokens is None:
        row.max_new_tokens = row.output_length if row.ignore_eos else None
        return
    most, length = row.max_new_tokens, row.output_length
    if most < length or (row.ignore_eos and most != length):
        what = f"{most}, but output_length is {length}; fix one of them"
        raise source.error(what, "max_new_tokens")


def _time(source: Source, table: dict[str, Any], key: str) -> int:
    return nanoseconds(source, table, key, NS_PER_S)


def _seconds(time_ns: int | None) -> float | None:
    """Seconds as the shortest number that `read` turns into the same nanoseconds."""
    return None if time_ns is None else time_ns / NS_PER_S


def _priority(source: Source, table: dict[str, Any], key: str) -> int:
    value = table[key]
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise source.error(f"{shown(value)} is not an integer of 32 bits; give one", key)
    return value


def _accepted(source: Source, table: dict[str, Any], key: str) -> tuple[int, ...]:
    found = tuple(integers(source, table, key, MAX_TOKENS))
    if not found:
        raise source.error("is empty; give one number a step, or leave it out", key)
    return found


class _Key(NamedTuple):
    """A key of a row that says one attribute of it, whatever the other keys are."""

    attribute: str
    read: Callable[[Source, dict[str, Any], str], Any]
    """The attribute that a table with this key says."""
    write: Callable[[Any], Any] = lambda value: value
    """What a file says of the attribute; None: nothing."""


_KEYS = {
    "session": _Key("session", string),
    "turn": _Key("turn", partial(integer, low=0)),
    "priority": _Key("priority", _priority, lambda value: value or None),
    "deadline_s": _Key("deadline_ns", _time, _seconds),
    "max_new_tokens": _Key("max_new_tokens", partial(integer, low=1)),
    "ignore_eos": _Key(
        "ignore_eos", partial(_choice, choices=(True, False)), lambda value: value or None
    ),
    "lora": _Key("lora", lambda *key: string(*key) or None),
    "abort_after_s": _Key("abort_after_ns", _time, _seconds),
    "accepted_drafts": _Key("accepted_drafts", _accepted, lambda value: list(value) or None),
    "tags": _Key("tags", mapping),
    "observed": _Key("observed", mapping),
}
_ROW_KEYS = frozenset(
    {"id", "arrival_s", "after", "delay_s", "input_length", "output_length"}
    | {"scope", "salt", "model"}
    | CONTENT_KEYS
    | _KEYS.keys()
)


def _header_table(trace: Trace) -> dict[str, Any]:
    table: dict[str, Any] = {"kvsim_trace": VERSION}
    if trace.block_size is not None:
        table |= {"block_size": trace.block_size, "hash_kind": trace.hash_kind}
        table |= {"hash_scope": trace.hash_scope, "partial_hash": trace.partial_hash}
    optional = {
        "model": _shared_model(trace),
        "origin": trace.origin,
        "source": trace.source or None,
    }
    return table | {key: value for key, value in optional.items() if value is not None}


def _row_table(row: Row, trace: Trace, shared_model: str | None) -> dict[str, Any]:
    by_session = trace.hash_scope == "session" and isinstance(row.content, HashContent)
    said = {key: write(getattr(row, name)) for key, (name, _, write) in _KEYS.items()}
    optional = {
        "session": said.pop("session"),
        "turn": said.pop("turn"),
        "arrival_s": _seconds(row.arrival_ns),
        "after": written_id(trace.rows[row.after]) if row.after >= 0 else None,
        "delay_s": _seconds(row.delay_ns or None),
        "input_length": row.input_length,
        "output_length": row.output_length,
        "scope": None if by_session and row.scope == row.session else row.scope,
        "salt": row.salt,
        **content_table(row, trace),
        "model": None if row.model == shared_model else row.model,
        **said,
        **{OWN + name: value for name, value in (row.extra or {}).items()},
    }
    return {key: value for key, value in optional.items() if value is not None}


def _shared_model(trace: Trace) -> str | None:
    models = {row.model for row in trace.rows}
    return models.pop() if len(models) == 1 else None


_text = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
