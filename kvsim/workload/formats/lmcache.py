"""LMCache look-up logs (`--lookup-hash-log-dir`): JSON Lines of chained chunk hashes.

The traps (LMCache 0.5.6, `subscribers/logging/lookup_hash.py`): **outputs are not in the log**, so
each is read as 1 token and decoding is not simulated; hashes are hexadecimal, of whole chunks of
`chunk_size` tokens (256 by default), and are numbered here in order of first use; times are Unix
seconds. A directory holds several files, each is read alone.
"""

from __future__ import annotations

from typing import Any

from kvsim.workload.chain import settle_blocks
from kvsim.workload.gather import Gathered
from kvsim.workload.source import NS_PER_S, Head, Source, instant, parse, shown, tokens
from kvsim.workload.trace import HashContent, Trace, collapse

_NOTE = "outputs are not in the log: each is read as 1 token, so decoding is not simulated"


def recognises(head: Head) -> bool:
    """Whether the rows have chunk hashes."""
    return {"chunk_hashes", "seq_len"} <= head.keys


def read(source: Source) -> Trace:
    """The requests of an LMCache log. Raises `TraceError` at the first line that is wrong."""
    gathered = Gathered(source, "lmcache")
    numbers: dict[str, int] = {}
    size: int | None = None
    for line in source.lines():
        table = parse(source, line)
        chunk = tokens(source, "chunk_size", table.get("chunk_size"))
        size = size or chunk
        if chunk != size:
            what = f"{chunk}, but {size} on earlier rows; split the file by chunk size"
            raise source.error(what, "chunk_size")
        length = tokens(source, "seq_len", table.get("seq_len"), 0)
        if not length:
            gathered.drop("seq_len is 0")
            continue
        name, model = table.get("request_id"), table.get("model_name")
        gathered.add(
            length,
            1,
            time_ns=instant(source, "timestamp", table.get("timestamp"), NS_PER_S),
            id=name if isinstance(name, str) else None,
            content=_content(source, table, numbers),
            model=model if isinstance(model, str) else None,
        )
    trace = gathered.trace(_NOTE)
    settle_blocks(source, trace, size or 1, "make sure that the rows are of one log")
    return trace


def _content(source: Source, table: dict[str, Any], numbers: dict[str, int]) -> HashContent:
    hashes = table.get("chunk_hashes")
    if not isinstance(hashes, list) or not all(isinstance(each, str) for each in hashes):
        raise source.error(f"{shown(hashes)} is not a list of hashes; fix it", "chunk_hashes")
    return HashContent(collapse(numbers.setdefault(each, len(numbers)) for each in hashes))
