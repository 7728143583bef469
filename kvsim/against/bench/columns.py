"""Says what the tables of a measurement show: their columns, and how each is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvsim.against.bench.repeat import Bench, Row, least, middle, over_base

Column = tuple[str, Callable[[Row], str]]


def columns_of(bench: Bench) -> Iterator[tuple[list[Row], list[Column]]]:
    """Each table: its rows, where there is something to show, and its columns."""

    def cpu_s(row: Row) -> float:
        return least(row.runs, lambda m: m.cpu_s)

    def whole_s(row: Row) -> float:
        return least(row.whole, lambda w: w.cpu_s)

    def peer_s(row: Row) -> float:
        return least(row.peer, lambda p: p.core_s)

    def peer_whole_s(row: Row) -> float:
        return least(row.peer, lambda p: p.whole.cpu_s)

    over = over_base(bench)
    yield (
        bench.rows,
        [
            ("CPU s", lambda row: f"{cpu_s(row):.3f}"),
            ("median", lambda row: f"{middle(row.runs, lambda m: m.cpu_s):.3f}"),
            ("us/req", lambda row: f"{cpu_s(row) * 1e6 / row.runs[0].requests:,.1f}"),
            ("us/step", lambda row: f"{cpu_s(row) * 1e6 / row.runs[0].steps:,.2f}"),
            ("ns/seq", lambda row: f"{cpu_s(row) * 1e9 / max(row.runs[0].seq_steps, 1):,.0f}"),
            ("over base", lambda row: f"{over[row.case]:.2f}" if row.case in over else "-"),
            ("requests", lambda row: f"{row.runs[0].requests:,}"),
            ("steps", lambda row: f"{row.runs[0].steps:,}"),
            ("preemptions", lambda row: f"{row.runs[0].preemptions:,}"),
            ("MB", lambda row: f"{least(row.runs, lambda m: m.rss_mb):,.0f}"),
        ],
    )
    yield (
        [row for row in bench.rows if row.peer],
        [
            ("CPU s", lambda row: f"{cpu_s(row):.3f}"),
            (bench.peer or "", lambda row: f"{peer_s(row):.3f}"),
            ("ratio", lambda row: f"{cpu_s(row) / peer_s(row):.2f}"),
            ("whole CPU s", lambda row: f"{whole_s(row):.3f}"),
            (bench.peer or "", lambda row: f"{peer_whole_s(row):.3f}"),
            ("ratio", lambda row: f"{whole_s(row) / peer_whole_s(row):.2f}"),
        ],
    )
    yield (
        [row for row in bench.rows if row.whole],
        [
            ("kvsim run --out: CPU s", lambda row: f"{whole_s(row):.3f}"),
            ("median", lambda row: f"{middle(row.whole, lambda w: w.cpu_s):.3f}"),
            ("MB", lambda row: f"{least(row.whole, lambda w: w.rss_mb):,.0f}"),
        ],
    )
