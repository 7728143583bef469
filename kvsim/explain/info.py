"""The figures of a trace to look at before choosing memory and limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvsim.explain.cache_curve import lru_tokens, optimum_tokens
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, ceiling_tokens, find_reuse
from kvsim.workload.streams import Stream
from kvsim.workload.trace import HashContent, Row, Trace, total

_NS_PER_S = 1_000_000_000
_ENGINE_BLOCK = 16
"""Default tokens per block in vLLM."""
_LIMITS = (8192, 32768, 131072)
"""Model lengths for which the share of requests that are too long is given."""
_WINDOWS_S = (1, 10, 60)
_ALONE = "(hits in a cache alone: no time, nothing pinned, no outputs; MIN is the best possible)"
_CURVE_POINTS = 5
_CURVE_TOKENS = tuple(8192 * 4**k for k in range(7))
"""Cache sizes of the hit curves: 8 Ki tokens to 32 Mi."""


def trace_info(trace: Trace, block_size: int | None = None) -> dict[str, Any]:
    """Figures of a trace as plain values; shares are of 1, times in seconds.

    Blocks and hit curves have `block_size` tokens per block; the default is that of the trace's
    hash ids, else 16. Figures that the trace does not have are None.
    """
    rows = trace.rows
    return {
        "path": trace.path,
        "format": trace.format,
        "sha256": trace.sha256,
        "hash_block_size": trace.block_size,
        "hash_kind": trace.hash_kind,
        "partial_hash": trace.partial_hash,
        "origin": trace.origin,
        "requests": len(rows),
        "arrivals": _arrivals(rows),
        "input_tokens": _lengths([row.input_length for row in rows]),
        "output_tokens": _lengths([row.output_length for row in rows]),
        "too_long": {
            limit: sum(row.input_length + row.output_length > limit for row in rows) / len(rows)
            for limit in _LIMITS
        },
        "prefix": _prefix(trace, block_size or trace.block_size or _ENGINE_BLOCK),
        "sessions": _sessions(rows),
        "salts": len({row.salt for row in rows} - {None}),
        "models": sorted({row.model for row in rows if row.model is not None}),
        "notes": list(trace.notes),
    }


def render(info: dict[str, Any]) -> str:
    """The figures as text, one line per subject."""
    return "\n".join(f"{label:<10} {text}".rstrip() for label, text in _lines(info))


def _arrivals(rows: Sequence[Row]) -> dict[str, Any] | None:
    if rows[0].arrival_ns is None:
        return None
    times = np.array([row.arrival_ns for row in rows], dtype=np.int64)
    gaps = np.diff(times)
    span_ns = int(times[-1] - times[0])
    moved, windows = gaps[gaps > 0], (times - times[0]) // (10 * _NS_PER_S)
    return {
        "span_s": span_ns / _NS_PER_S,
        "rate": len(rows) * _NS_PER_S / span_ns if span_ns else None,
        "peak_rate": {
            window: int(np.unique(times // (window * _NS_PER_S), return_counts=True)[1].max())
            / window
            for window in _WINDOWS_S
        },
        "gap_cv": float(gaps.std() / gaps.mean()) if span_ns else None,
        "distinct_times": len(moved) + 1,
        "zero_gap_share": float((gaps == 0).mean()) if len(gaps) else 0.0,
        "median_step_s": float(np.median(moved)) / _NS_PER_S if len(moved) else None,
        "empty_10s_share": 1 - len(np.unique(windows)) / (int(windows[-1]) + 1),
    }


def _lengths(lengths: Sequence[int]) -> dict[str, float]:
    values = np.array(lengths, dtype=np.int64)
    quantiles = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
    return {
        "mean": float(values.mean()),
        **quantiles,
        "max": int(values.max()),
        "total": int(values.sum()),
    }


def _prefix(trace: Trace, block_size: int) -> dict[str, Any] | None:
    """What can be shared; None if the trace says nothing about content."""
    rows = trace.rows
    if not any(row.content for row in rows):
        return None
    identities = streams(trace)
    reuse = find_reuse(rows, identities, Counting(block_size))
    tokens = sum(row.input_length for row in rows)
    # Up to the first one that holds everything.
    smaller = sum(capacity < reuse.distinct * block_size for capacity in _CURVE_TOKENS)
    capacities = list(_CURVE_TOKENS[: smaller + 1][-_CURVE_POINTS:])
    blocks = [capacity // block_size for capacity in capacities]

    def share(hit_tokens: int) -> float:
        return hit_tokens / tokens

    ceiling = {block_size: share(reuse.ceiling_tokens)}
    if block_size != _ENGINE_BLOCK:
        ceiling[_ENGINE_BLOCK] = share(ceiling_tokens(rows, identities, _ENGINE_BLOCK))
    with_outputs = ceiling_tokens(rows, identities, block_size, outputs=True)
    return {
        "block_size": block_size,
        "ids": _ids(trace, identities),
        "blocks": reuse.blocks,
        "distinct_blocks": reuse.distinct,
        "ceiling": ceiling,
        "ceiling_with_outputs": share(with_outputs),
        "capacity_tokens": capacities,
        "lru": [share(hits) for hits in lru_tokens(reuse, blocks)],
        "min": [share(hits) for hits in optimum_tokens(reuse, blocks)],
    }


def _ids(trace: Trace, identities: Sequence[Stream]) -> dict[str, Any] | None:
    """Counts of the prompts' hash ids."""
    size = trace.block_size
    if size is None:
        return None
    users: Counter[int] = Counter()
    holders = 0
    for row, stream in zip(trace.rows, identities, strict=True):
        if not isinstance(row.content, HashContent):
            continue
        full = row.input_length // size
        users.update(stream.keys(0, full, size))
        if total(row.content.prompt) > full:
            users.update(stream.keys(0, 1, row.input_length))
        holders += 1
    return {
        "total": users.total(),
        "distinct": len(users),
        "used_once": sum(count == 1 for count in users.values()) / max(1, len(users)),
        "in_every_request": sum(count == holders for count in users.values()) if holders > 1 else 0,
    }


def _sessions(rows: Sequence[Row]) -> dict[str, Any] | None:
    turns = Counter(row.session for row in rows if row.session is not None)
    delays = [row.delay_ns / _NS_PER_S for row in rows if row.after >= 0]
    if not turns and not delays:
        return None
    return {
        "sessions": len(turns),
        "turns": _lengths(list(turns.values())) if turns else None,
        "think_s": {f"p{q}": float(np.percentile(delays, q)) for q in (50, 90, 99)}
        if delays
        else None,
        "without_predecessor": sum(row.after < 0 for row in rows),
    }


def _lines(info: dict[str, Any]) -> Iterator[tuple[str, str]]:
    name = info["path"].rsplit("/", 1)[-1]
    yield "trace", f"{name}: {_format(info)}, sha256 {info['sha256'][:16]}"
    yield from _load_lines(info)
    for label in ("input", "output"):
        figures = info[f"{label}_tokens"]
        cells = "  ".join(f"{key} {round(value):,}" for key, value in figures.items())
        yield label, f"{cells} tokens"
    shares = [f"{_percent(share)} need more than {n:,}" for n, share in info["too_long"].items()]
    yield "too long", ", ".join(shares) + " tokens"
    yield from _prefix_lines(info["prefix"])
    yield from _session_lines(info["sessions"])
    if info["salts"]:
        yield "salts", f"{info['salts']:,}: nothing is shared across them"
    if info["models"]:
        yield "models", ", ".join(info["models"])
    for note in info["notes"]:
        yield "note", note


def _format(info: dict[str, Any]) -> str:
    if info["hash_block_size"] is None:
        return str(info["format"])
    rounding = "partial last block included" if info["partial_hash"] else "full blocks only"
    kind = f"{info['hash_block_size']}-token {info['hash_kind']} ids"
    return f"{info['format']}, {kind} ({rounding})"


def _load_lines(info: dict[str, Any]) -> Iterator[tuple[str, str]]:
    arrivals = info["arrivals"]
    if arrivals is None:
        text = f"{info['requests']:,}, no arrival times: sent at once, or at --request-rate"
        yield "requests", text
        return
    peaks = " / ".join(f"{rate:.3g}" for rate in arrivals["peak_rate"].values())
    windows = " / ".join(map(str, arrivals["peak_rate"]))
    rate = f"{arrivals['rate']:.2f}/s" if arrivals["rate"] else "all at once"
    span = f"{info['requests']:,} over {arrivals['span_s']:,.1f} s, {rate}"
    yield "requests", f"{span}; peak {peaks} per s over {windows} s"
    if arrivals["rate"]:
        ties = f"{_percent(arrivals['zero_gap_share'])} of gaps are 0"
        step = f"median step {arrivals['median_step_s']:.3g} s"
        empty = f"{_percent(arrivals['empty_10s_share'], 0)} of 10 s windows empty"
        text = f"CV {arrivals['gap_cv']:.2f}; {arrivals['distinct_times']:,} distinct times"
        yield "arrivals", f"{text}, {ties}, {step}; {empty}"


def _prefix_lines(prefix: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if prefix is None:
        yield "prefix", "no prefix information: nothing can hit"
        return
    size, ids = prefix["block_size"], prefix["ids"]
    if ids is not None:
        once = f"{_percent(ids['used_once'])} used once"
        text = f"{ids['total']:,}, {ids['distinct']:,} distinct, {once}"
        yield "ids", f"{text}; {ids['in_every_request']:,} in every request"
    counts = f"{prefix['blocks']:,} in prompts, {prefix['distinct_blocks']:,} distinct"
    yield "blocks", f"{counts} (full blocks of {size} tokens)"
    most = ", ".join(f"{_percent(share, 2)} (block {b})" for b, share in prefix["ceiling"].items())
    outputs = f"{_percent(prefix['ceiling_with_outputs'], 2)} (block {size})"
    text = f"of the input tokens at most {most} can hit, {outputs} if outputs are kept too"
    yield "reuse", text
    yield "KV tokens", _cells(f"{tokens:,}" for tokens in prefix["capacity_tokens"])
    yield "  LRU", _cells(_percent(share, 2) for share in prefix["lru"])
    yield "  MIN", _cells(_percent(share, 2) for share in prefix["min"])
    yield "", _ALONE


def _session_lines(sessions: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if sessions is None:
        return
    parts = []
    if sessions["turns"] is not None:
        turns = sessions["turns"]
        cells = f"mean {turns['mean']:.1f}, p50 {turns['p50']:.0f}, max {turns['max']:,}"
        parts.append(f"{sessions['sessions']:,}; turns {cells}")
    if sessions["think_s"] is not None:
        cells = ", ".join(f"{key} {value:,.1f} s" for key, value in sessions["think_s"].items())
        parts.append(f"think time {cells}")
    parts.append(f"{sessions['without_predecessor']:,} requests follow no other request")
    yield "sessions", "; ".join(parts)


def _cells(texts: Iterable[str]) -> str:
    return "  ".join(f"{text:>10}" for text in texts)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"
