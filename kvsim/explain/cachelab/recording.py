"""The LRU curve of a recording too long for memory: a row is read, counted and forgotten.

What stays is an entry for each request whose blocks nobody has used again since, as a curve needs
that is exact at every capacity. The optimum would need all requests to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvsim.errors import ConfigError
from kvsim.explain.cachelab.curve import Curve
from kvsim.explain.cachelab.study import PLAIN, Asked, Point, Study, refuse_empty, sizes_of
from kvsim.workload import native
from kvsim.workload.reuse import Chain, Counting, Walk
from kvsim.workload.source import Source, look
from kvsim.workload.streams import Span
from kvsim.workload.trace import HashContent, Row, Trace

_REGION = 1 << 65
"""Distance of the keys of two namespaces, above all ids."""


def open_recording(source: Source) -> tuple[Trace, Iterator[Row]]:
    """The header and the rows of a native trace of chained hash ids, or without content. Raises
    `TraceError` for another file."""
    if native.recognises(look(source)):
        trace, rows = native.stream(source)
        if trace.hash_kind == "prefix":
            return trace, (_known(source, row) for row in rows)
    what = "no native trace of chained hash ids; use kvsim cache curve, or kvsim trace convert"
    raise source.error(what, line=0)


def study_recording(trace: Trace, rows: Iterable[Row], asked: Asked = PLAIN) -> Study:
    """Study what `open_recording` returns under LRU alone, in blocks of the ids. Raises
    `ConfigError` where nothing is left to measure."""
    size = trace.block_size or 1
    walk, curve = Walk(1), Curve(size)
    number = requests = blocks = tokens = 0
    for number, (row, chain) in enumerate(_chains(rows, size), 1):
        found = walk.step(chain)
        if number > asked.warm_up:
            requests += 1
            tokens += row.input_length
            blocks += chain.blocks
            curve.add(found)
    if not number:
        raise ConfigError(f"{trace.path}: no requests after the header; add one per line")
    refuse_empty(asked.warm_up, number)
    sizes = sizes_of(walk.distinct, asked)
    columns = (curve.tokens(sizes), curve.blocks(sizes), curve.requests(sizes))
    [ceiling] = curve.tokens([walk.distinct])
    return Study(
        *(trace.path, Counting(size), requests, tokens, blocks, walk.distinct, ceiling),
        [Point(at, lru, None, *found) for at, lru, *found in zip(sizes, *columns, strict=True)],
        asked,
    )


def _known(source: Source, row: Row) -> Row:
    if row.content is None or isinstance(row.content, HashContent):
        return row
    raise source.error("only hash ids are counted row by row; use kvsim cache curve")


def _chains(rows: Iterable[Row], size: int) -> Iterator[tuple[Row, Chain]]:
    """Rows with their chains. The key of a block is its id, in the region of its namespace; a row
    without ids has a region of its own."""
    regions: dict[tuple[str | None, str | None], int] = {}
    for row in rows:
        spans: list[Span] = []
        if isinstance(row.content, HashContent):
            first = regions.setdefault((row.scope, row.salt), len(regions)) * _REGION
            place = 0
            for start, count in row.content.prompt:
                spans.append((place, place + count, first + start - place))
                place += count
        else:
            spans.append((0, row.input_length, -(row.index + 1) * _REGION))
        most = (row.input_length - 1) // size * size
        yield row, Chain(spans, row.input_length // size, most)
