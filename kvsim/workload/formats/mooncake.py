"""Mooncake traces: JSON Lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

Ids are 512-token blocks chained from the start of the prompt, the partial last block included
(kvcache-ai/Mooncake, FAST25-release/traces). Files of other tools use the same keys with other
block sizes and optional keys; the number of ids per row tells which sizes are possible.

Rows that are written have exactly these four keys, without a header: what vLLM, SGLang, AIPerf,
GuideLLM and Dynamo all read. Where ids stand for another number of tokens than 512, rows have a
`block_size`, too: without it, the size is unknown, and kvsim would not read the file back.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import add, attrgetter
from typing import Any

from kvsim.errors import ConfigError
from kvsim.workload.chain import settle_blocks
from kvsim.workload.gather import (
    RowRules,
    check_total,
    foreign_trace,
    identifier,
    integer,
    integers,
    is_date,
    nanoseconds,
    next_turn,
    sort_rows,
)
from kvsim.workload.keys import streams
from kvsim.workload.source import MAX_NS, MAX_TOKENS, Source, parse, shown
from kvsim.workload.streams import SpannedStream
from kvsim.workload.trace import MAX_ID, HashContent, Row, Rows, Trace, collapse, column
from kvsim.writing import write_lines

DEFAULT_BLOCK_SIZE = 512
_NS_PER_MS = 1_000_000
_ALIASES = {
    "created_time": "timestamp",
    "input_tokens": "input_length",
    "output_tokens": "output_length",
    "delay_ms": "delay",
}
"""Names that some tools write → Mooncake's."""
_USUAL = "timestamp", "input_length", "output_length", "hash_ids"
"""What a row has as a rule, and nothing else."""
_USUAL_PRESENT = {"request_id": False, "timestamp": True}
"""`RowRules.present` of such rows."""
_KEYS = frozenset({*_USUAL, "session_id", "delay", "block_size", "request_id", "priority"})


def read(source: Source) -> Trace:
    """A Mooncake trace. Raises `TraceError` at the first line that is wrong.

    Rows without `hash_ids` have unique content. Rows that share a `session_id` are turns: each
    follows the one before, `delay` ms after its completion. A `block_size` on the rows replaces
    512; either must agree with the number of ids on every row.
    """
    reader = _RowReader(source)
    for block in source.blocks():
        reader.add_all(block)
    if reader.maybe_times and reader.rows[0].arrival_ns is None:
        found = ", ".join(sorted(reader.maybe_times))
        what = f"no timestamp; when requests came may be in {found}: name it timestamp, in ms, or"
        raise source.error(f"{what} leave it out", line=0)
    rows, sorting = sort_rows(reader.rows)
    trace = foreign_trace(source, "mooncake", rows, reader.notes(sorting))
    remedy = "put the right block_size on every row and make sure that timestamp is in ms"
    settle_blocks(source, trace, reader.block_size or DEFAULT_BLOCK_SIZE, remedy)
    return trace


@cache
def _decoder() -> Any:
    """What reads lines of the `_USUAL` keys; None where msgspec is absent, as
    `kvsim.against.validate` may measure there."""
    try:
        from msgspec import defstruct, json
    except ModuleNotFoundError:
        return None
    kinds = zip(_USUAL, (int | float, int, int, list[int]), strict=True)
    # Rows of numbers make no circles that a collector would have to find.
    return json.Decoder(defstruct("Usual", kinds, forbid_unknown_fields=True, gc=False))


def _one_a_line(text: bytes, objects: int) -> bool:
    """Whether each line of a text is one of so many objects of the `_USUAL` keys, and none of them
    has a key twice."""
    import numpy as np

    letters = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    quotes = np.count_nonzero(letters == ord('"'))
    return (
        text.endswith((b"}", b"}\n"))
        and not text.startswith(b"\n")
        and bool((letters[ends - 1] == ord("}")).all())
        and objects == len(ends) + text.endswith(b"}")
        and quotes == 2 * len(_USUAL) * objects
    )


class _RowReader:
    """Rows of a Mooncake file; remembers the last turn of each session."""

    def __init__(self, source: Source) -> None:
        self.rules = RowRules(source)
        self.rows: Rows | list[Row] = Rows()
        """All rows so far; those of `rules` as soon as some are read one by one."""
        self.block_size: int | None = None
        self._source = source
        self._last_turn: dict[str, Row] = {}
        self._counts: Counter[str] = Counter()
        self._unknown: set[str] = set()
        self.maybe_times: set[str] = set()
        """Unknown keys whose values are numbers or dates."""

    def add_all(self, block: bytes) -> None:
        """Check the rows of a block of lines in their order, and keep them."""
        usual = self._usual(block)
        if usual is not None:
            self.rows.extend(usual)
            return
        if isinstance(self.rows, Rows):
            self.rows = self.rules.rows = list(self.rows)
        for text in self._source.lines_of(block):
            self._add(parse(self._source, text))

    def _usual(self, block: bytes) -> Rows | None:
        """The rows of a block whose lines have the `_USUAL` keys and no others, checked as columns;
        None if some line is not like that, or wrong."""
        decoder, present, first = _decoder(), self.rules.present, len(self.rows)
        # Rows before may have had other keys: then these have to be compared one by one.
        if decoder is None or not present.items() <= _USUAL_PRESENT.items():
            return None
        text = block.replace(b"\r\n", b"\n") if b"\r" in block else block
        rows, read = Rows(first), self._source.lines_read
        try:
            tables = decoder.decode_lines(text)
            columns = zip(*map(attrgetter(*_USUAL), tables), strict=True)
            times, inputs, outputs, hash_ids = columns
            lines = range(read + 1, read + 1 + len(tables))
            times_ns = [round(time * _NS_PER_MS) for time in times]
            rows.add((lines, times_ns, inputs, [output or 1 for output in outputs]), hash_ids)
        except (ValueError, OverflowError):
            return None
        # `takes` comes last, as it counts the block; else every line of it is read again, one by
        # one.
        if not (
            _one_a_line(text, len(tables))
            and self._allowed(times, inputs, outputs)
            and self._source.takes(block, len(tables))
        ):
            return None
        present |= _USUAL_PRESENT
        self._counts["outputs"] += outputs.count(0)
        return rows

    def _allowed(
        self, times: Sequence[float], inputs: Sequence[int], outputs: Sequence[int]
    ) -> bool:
        """Whether there are rows, and none breaks a rule on times or lengths."""
        return bool(
            times
            and min(times) >= 0
            and max(times) * _NS_PER_MS < MAX_NS
            and min(inputs) >= 1
            and min(outputs) >= 0
            and max(outputs) <= self._source.most_output_tokens
            and max(map(add, inputs, outputs)) <= MAX_TOKENS
        )

    def _add(self, table: dict[str, Any]) -> None:
        """Check the row of the line last read, and keep it."""
        source, table = self._source, self._plain(table)
        input_length = self._whole(table, "input_length", 1)
        output_length = self._whole(table, "output_length", 0)
        check_total(source, input_length, output_length, "input_length")
        session = identifier(source, table, "session_id") if "session_id" in table else None
        before = self._last_turn.get(session) if session is not None else None
        row = Row(
            index=len(self.rules.rows),
            id=self.rules.id(table, "request_id"),
            line=source.line,
            arrival_ns=self.rules.arrival(table, "timestamp", _NS_PER_MS),
            input_length=input_length,
            output_length=max(1, output_length),
            content=self._content(table),
            after=-1 if before is None else before.index,
            delay_ns=self._delay(table, before),
            session=session,
            turn=None if session is None else next_turn(before),
            priority=self._whole(table, "priority", -MAX_TOKENS) if "priority" in table else 0,
        )
        self._note_block_size(table)
        self._counts["outputs"] += output_length == 0
        self.rules.append(row)
        if session is not None:
            self._last_turn[session] = row

    def notes(self, sorting: dict[str, int]) -> list[str]:
        """What was changed or left out, for the user; `sorting` is that of `sort_rows`."""
        texts = {
            "outputs": "output_length 0 read as 1",
            "unique": "no hash_ids, so nothing is shared",
            "turns": "wait for the row before them in their session_id, each with its whole"
            " prompt, the session's history included",
            "delays": "follow the row before them without delay, as none is given",
        }
        rows = f"{len(self.rows):,} rows"
        notes = [
            f"{text} ({self._counts[key]:,} of {rows})"
            for key, text in texts.items()
            if self._counts[key]
        ]
        notes += [f"{text} ({number:,} of {rows})" for text, number in sorting.items()]
        if any(column(self.rows, "priority")):
            notes.append("priority: lower is served first, as in vLLM (Dynamo: higher first)")
        if self._unknown:
            notes.append(f"keys ignored: {', '.join(sorted(self._unknown))}")
        return notes

    def _plain(self, table: dict[str, Any]) -> dict[str, Any]:
        """The row under Mooncake's own names, without keys that are null."""
        if table.keys() <= _KEYS and None not in table.values():
            return table
        plain: dict[str, Any] = {}
        for key, value in table.items():
            name = _ALIASES.get(key, key)
            if name in plain:
                raise self._source.error(f"this and {name} are the same; keep one", key)
            if name not in _KEYS:
                self._unknown.add(shown(key)[1:-1])
                if type(value) in (int, float) or (type(value) is str and is_date(value)):
                    self.maybe_times.add(shown(key))
            elif value is not None:
                plain[name] = value
        return plain

    def _whole(self, table: dict[str, Any], key: str, low: int) -> int:
        """An integer, also if an exporter wrote `512.0`."""
        value = table.get(key)
        if type(value) is float and value.is_integer():
            table = {key: int(value)}
        return integer(self._source, table, key, low)

    def _content(self, table: dict[str, Any]) -> HashContent | None:
        if "hash_ids" in table:
            return HashContent(collapse(integers(self._source, table, "hash_ids", MAX_ID)))
        self._counts["unique"] += 1
        return None

    def _note_block_size(self, table: dict[str, Any]) -> None:
        if "block_size" not in table:
            return
        size = self._whole(table, "block_size", 1)
        self.block_size = self.block_size or size
        if size != self.block_size:
            what = f"{size}, but {self.block_size} on earlier rows; split the file by block size"
            raise self._source.error(what, "block_size")

    def _delay(self, table: dict[str, Any], before: Row | None) -> int:
        if "delay" in table and "session_id" not in table:
            raise self._source.error("without session_id; add that or drop this", "delay")
        delay_ns = nanoseconds(self._source, table, "delay", _NS_PER_MS) if "delay" in table else 0
        if before is None:
            return 0
        self._counts["turns"] += 1
        self._counts["delays"] += "delay" not in table
        return delay_ns


_MOST_IDS = (1 << 31) - 1
"""GuideLLM stores ids as 32-bit integers."""
_FINE_BLOCK = 16


def write(trace: Trace, path: str, block_size: int | None = None) -> list[str]:
    """Write `trace` as Mooncake rows of `block_size`-token ids, whole or not at all.

    The block size defaults to that of the trace's hash ids, or to 512 if no row says anything about
    its tokens. Ids are numbered from 0 in order of first use; unique blocks and partial ends have
    ids of their own. Returns notes, one line each: what the format cannot hold, and how to replay
    the file. Raises `ConfigError` if the trace has no times or the block size must be chosen.
    """
    size = _block_size(trace, block_size)
    if any(row.arrival_ns is None for row in trace.rows):
        raise ConfigError(
            f"{path}: the trace has no arrival times, which Mooncake rows need; write native"
        )
    if path.endswith(".gz"):
        raise ConfigError(f"{path}: Mooncake files are plain text; leave out .gz")
    identities = streams(trace)
    write_lines(path, _lines(trace, identities, size))
    notes = _losses(trace, identities, size)
    if size != DEFAULT_BLOCK_SIZE:
        notes.append(
            f"tell every reader that ids stand for {size} tokens: most assume 512, and do not look"
            " at the key block_size of the rows"
        )
    command = bench_command(path, size, len(trace.rows))
    return [*notes, f"to replay it (vLLM assumes 16-token ids, seconds, 1,000 rows): {command}"]


def bench_command(path: str, block_size: int, num_prompts: int) -> str:
    """The `vllm bench serve` command that replays a file of `write`.

    By default it would read 16-token ids, times in seconds, and 1,000 rows.
    """
    return (
        "vllm bench serve --backend openai --dataset-name timed_trace"
        f" --dataset-path {shlex.quote(path)} --timed-trace-chunk-hash-size {block_size}"
        f" --timed-trace-sec-multiplier 0.001 --num-prompts {num_prompts}"
    )


def _block_size(trace: Trace, wanted: int | None) -> int:
    if wanted is not None:
        if wanted < 1:
            raise ConfigError(f"block_size: {wanted} is not above 0")
        return wanted
    if trace.block_size is not None:
        return trace.block_size
    if any(row.content for row in trace.rows):
        raise ConfigError(
            f"{trace.path}: its content has no block size of its own; give --block-size"
        )
    return DEFAULT_BLOCK_SIZE


def _lines(trace: Trace, identities: Sequence[SpannedStream], size: int) -> Iterator[str]:
    numbers: dict[int, int] = {}
    for row, stream in zip(trace.rows, identities, strict=True):
        assert row.arrival_ns is not None
        full, tail = divmod(row.input_length, size)
        keys = list(stream.keys(0, full, size))
        if tail:
            # The whole prompt as one block: its key identifies the partial last block.
            keys += stream.keys(0, 1, row.input_length)
        ids = [numbers.setdefault(key, len(numbers)) for key in keys]
        if len(numbers) > _MOST_IDS:
            raise ConfigError(
                f"more than {_MOST_IDS:,} different blocks; give a larger --block-size"
            )
        table = {
            "timestamp": round(row.arrival_ns / _NS_PER_MS),
            "input_length": row.input_length,
            "output_length": row.output_length,
            "hash_ids": ids,
        }
        if size != DEFAULT_BLOCK_SIZE:
            table["block_size"] = size
        yield json.dumps(table)


_LOST: dict[str, Callable[[Row], object]] = {
    "known content of outputs": lambda row: type(row.content) is HashContent and row.content.output,
    "after and delay_s: every row is sent at its recorded time": lambda row: row.after >= 0,
    "priority": lambda row: row.priority,
    "max_new_tokens": lambda row: row.max_new_tokens is not None,
    "lora": lambda row: row.lora is not None,
    "abort_after_s": lambda row: row.abort_after_ns is not None,
    "accepted_drafts": lambda row: row.accepted_drafts,
    "deadline_s": lambda row: row.deadline_ns is not None,
    "model": lambda row: row.model is not None,
    "observed": lambda row: row.observed is not None,
    "tags": lambda row: row.tags is not None,
    "fractions of a millisecond": lambda row: (row.arrival_ns or 0) % _NS_PER_MS,
}
"""What Mooncake rows cannot hold → whether a row has it."""


def _losses(trace: Trace, identities: Sequence[SpannedStream], size: int) -> list[str]:
    """What Mooncake rows cannot hold, as notes."""
    rows = trace.rows
    counts = {what: sum(map(bool, map(has, rows))) for what, has in _LOST.items()}
    notes = [
        f"lost: {what} ({count:,} of {len(rows):,} rows)" for what, count in counts.items() if count
    ]
    if any(row.content for row in rows):
        # Here, as nothing else of a run counts reuse.
        from kvsim.workload.reuse import ceiling_tokens

        fine, coarse = (ceiling_tokens(rows, identities, b) for b in (_FINE_BLOCK, size))
        if coarse < fine:
            total = sum(row.input_length for row in rows)
            notes.append(
                f"sharing below {size} tokens: at most {100 * coarse / total:.2f} % of the input"
                f" tokens can hit, {100 * fine / total:.2f} % at block {_FINE_BLOCK}"
            )
    return notes
