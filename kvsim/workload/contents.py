"""The content of a native row: hash ids, tokens, named segments or a parent, or none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.workload.runs import collapse, merge, total
from kvsim.workload.source import MAX_TOKENS, Source, identifier, integer, integers, shown, string
from kvsim.workload.trace import (
    Content,
    HashContent,
    ParentContent,
    Row,
    Runs,
    SegmentContent,
    TokenContent,
    Trace,
)

MAX_ID = (1 << 64) - 1
_MAX_TOKEN_ID = (1 << 63) - 1
_FORMS = ("hash_ids", "hash_runs", "tokens", "prefix", "parent")
_ADDITIONS = {
    "output_hash_ids": ("hash_ids", "hash_runs"),
    "output_hash_runs": ("hash_ids", "hash_runs"),
    "output_tokens": ("tokens",),
    "keep": ("parent",),
}
"""Key → the forms of content that it belongs to."""
CONTENT_KEYS = frozenset(_FORMS) | _ADDITIONS.keys()


class ContentReader:
    """Reads and checks what the rows of a native file say about their tokens.

    `index_of` gives the index of each earlier row's id; it grows with the trace.
    """

    def __init__(self, source: Source, trace: Trace, index_of: Mapping[str, int]) -> None:
        self._source = source
        self._trace = trace
        self._index_of = index_of

    def read(self, table: dict[str, Any], input_length: int, output_length: int) -> Content | None:
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
            values = integers(self._source, table, key, _MAX_TOKEN_ID)
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
            string(self._source, {"prefix": segment[0]}, "prefix")
        length = sum(length for _, length in segments)
        if length > input_length:
            what = f"{length} tokens, but input_length is {input_length}; shorten the segments"
            raise self._source.error(what, "prefix")
        return SegmentContent(tuple((name, length) for name, length in segments))

    def _parent(self, table: dict[str, Any], input_length: int) -> ParentContent:
        index = earlier_row(self._source, self._index_of, table, "parent")
        parent = self._trace.rows[index]
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


def content_table(row: Row, trace: Trace) -> dict[str, Any]:
    """The keys of a row that `ContentReader` reads."""
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
