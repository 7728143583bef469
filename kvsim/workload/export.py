"""Writes a trace as Mooncake rows, which the usual load generators replay against a real engine.

Every row has exactly `timestamp` (integer ms), `input_length`, `output_length` and `hash_ids`
(one per block, the partial last block included), without a header: what vLLM, SGLang, AIPerf,
GuideLLM and Dynamo all read. Where ids stand for another number of tokens than 512, rows have a
`block_size`, too: without it, the size is unknown, and kvsim would not read the file back.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvsim.errors import ConfigError, check_choice
from kvsim.workload import native
from kvsim.workload.arrivals import arrival_notes
from kvsim.workload.formats import mooncake
from kvsim.workload.keys import streams
from kvsim.workload.reuse import ceiling_tokens
from kvsim.workload.streams import SpannedStream
from kvsim.workload.trace import HashContent, Trace
from kvsim.writing import write_lines

MAX_ID = (1 << 31) - 1
"""GuideLLM stores ids as 32-bit integers."""
_NS_PER_MS = 1_000_000
_FINE_BLOCK = 16


def write_mooncake(trace: Trace, path: str, block_size: int | None = None) -> list[str]:
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
    if size != mooncake.DEFAULT_BLOCK_SIZE:
        notes.append(
            f"tell every reader that ids stand for {size} tokens: most assume 512, and do not look"
            " at the key block_size of the rows"
        )
    command = bench_command(path, size, len(trace.rows))
    return [*notes, f"to replay it (vLLM assumes 16-token ids, seconds, 1,000 rows): {command}"]


def bench_command(path: str, block_size: int, num_prompts: int) -> str:
    """The `vllm bench serve` command that replays a file of `write_mooncake`.

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
    return mooncake.DEFAULT_BLOCK_SIZE


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
        if len(numbers) > MAX_ID:
            raise ConfigError(f"more than {MAX_ID:,} different blocks; give a larger --block-size")
        table = {
            "timestamp": round(row.arrival_ns / _NS_PER_MS),
            "input_length": row.input_length,
            "output_length": row.output_length,
            "hash_ids": ids,
        }
        if size != mooncake.DEFAULT_BLOCK_SIZE:
            table["block_size"] = size
        yield json.dumps(table)


def _losses(trace: Trace, identities: Sequence[SpannedStream], size: int) -> list[str]:
    """What Mooncake rows cannot hold, as notes."""
    rows = trace.rows
    lost = {
        "known content of outputs": sum(
            type(row.content) is HashContent and bool(row.content.output) for row in rows
        ),
        "after and delay_s: every row is sent at its recorded time": sum(
            row.after >= 0 for row in rows
        ),
        "priority": sum(row.priority != 0 for row in rows),
        "max_new_tokens": sum(row.max_new_tokens is not None for row in rows),
        "lora": sum(row.lora is not None for row in rows),
        "abort_after_s": sum(row.abort_after_ns is not None for row in rows),
        "accepted_drafts": sum(bool(row.accepted_drafts) for row in rows),
        "deadline_s": sum(row.deadline_ns is not None for row in rows),
        "model": sum(row.model is not None for row in rows),
        "observed": sum(row.observed is not None for row in rows),
        "tags": sum(row.tags is not None for row in rows),
        "fractions of a millisecond": sum((row.arrival_ns or 0) % _NS_PER_MS != 0 for row in rows),
    }
    notes = [
        f"lost: {what} ({count:,} of {len(rows):,} rows)" for what, count in lost.items() if count
    ]
    if any(row.content for row in rows):
        fine, coarse = (ceiling_tokens(rows, identities, b) for b in (_FINE_BLOCK, size))
        if coarse < fine:
            total = sum(row.input_length for row in rows)
            notes.append(
                f"sharing below {size} tokens: at most {100 * coarse / total:.2f} % of the input"
                f" tokens can hit, {100 * fine / total:.2f} % at block {_FINE_BLOCK}"
            )
    return notes


FORMATS = ("native", "mooncake")


def convert(trace: Trace, out_path: str, to: str, block_size: int | None = None) -> list[str]:
    """Write `trace` to `out_path` as `native` or `mooncake`; returns notes for the user.

    `block_size` (tokens per id) is for `mooncake` alone. What the reader dropped or changed goes
    into the native header's `source.note`. Raises `ConfigError` or `OutputError`; a failed
    conversion leaves no file.
    """
    if to == "mooncake":
        return write_mooncake(trace, out_path, block_size)
    check_choice("trace format", to, FORMATS)
    if block_size is not None:
        raise ConfigError("block_size: a native file keeps the trace's own; leave it out")
    native.write(_with_notes(trace), out_path)
    return []


def _with_notes(trace: Trace) -> Trace:
    """The trace with its reader's changes in `source.note`, for readers of the new file."""
    known = [str(trace.source["note"])] if "note" in trace.source else []
    about_times = arrival_notes(trace.rows)
    changes = [note for note in trace.notes if note not in [*about_times, *known]]
    if not changes:
        return trace
    return replace(trace, source={**trace.source, "note": "; ".join([*known, *changes])})
