"""Qwen-Bailian traces: JSON Lines like Mooncake's, in other units.

Times are **seconds** and ids are **16-token** blocks, the partial last one included, under the keys
that Mooncake uses for milliseconds and 512 tokens (alibaba-edu/qwen-bailian-usagetraces-anon).
`chat_id` names the request and `parent_chat_id` the request that it continues, -1 for none. A turn
follows its parent; how long the user thought is not recorded, so the delay is 0 after the parent's
end in closed sessions, and the recorded time otherwise. Thinking tokens are removed between turns:
a child's prompt is what its ids say, not the parent's prompt and output.
"""

from __future__ import annotations

from typing import Any

from kvsim.workload.chain import settle_blocks
from kvsim.workload.gather import Gathered
from kvsim.workload.source import (
    NS_PER_S,
    Head,
    Source,
    identifier,
    instant,
    integers,
    parse,
    shown,
    tokens,
)
from kvsim.workload.trace import MAX_ID, HashContent, Row, Trace, collapse

BLOCK_SIZE = 16
_NO_PARENT = "-1"
_ZERO = "output_length 0 read as 1"


def recognises(head: Head) -> bool:
    """Whether the rows name their chat and its parent."""
    return {"chat_id", "parent_chat_id"} <= head.keys


def read(source: Source) -> Trace:
    """A Qwen-Bailian trace. Raises `TraceError` at the first line that is wrong."""
    gathered = Gathered(source, "qwen")
    chats: dict[str, Row] = {}
    for line in source.lines():
        _add(source, parse(source, line), gathered, chats)
    trace = gathered.trace()
    settle_blocks(source, trace, BLOCK_SIZE, "make sure that this is a Qwen-Bailian file")
    return trace


def _add(source: Source, table: dict[str, Any], gathered: Gathered, chats: dict[str, Row]) -> None:
    for key in ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"):
        if key not in table:
            raise source.error("missing; give it on every row", key)
    chat = identifier(source, table, "chat_id")
    if chat in chats:
        what = f"{shown(chat)} is also on line {chats[chat].line}; make it unique"
        raise source.error(what, "chat_id")
    name = identifier(source, table, "parent_chat_id")
    parent = chats.get(name)
    if parent is None and name != _NO_PARENT:
        gathered.change("parent_chat_id is not on an earlier row: sent at its own time")
    output_length = tokens(source, "output_length", table["output_length"], 0)
    if not output_length:
        gathered.change(_ZERO)
    content = None
    if table.get("hash_ids") is not None:
        content = HashContent(collapse(integers(source, table, "hash_ids", MAX_ID)))
    chats[chat] = gathered.add(
        tokens(source, "input_length", table["input_length"]),
        max(1, output_length),
        time_ns=instant(source, "timestamp", table["timestamp"], NS_PER_S),
        id=chat,
        content=content,
        after=-1 if parent is None else parent.index,
        session=chat if parent is None else parent.session,
        turn=0 if parent is None else (parent.turn or 0) + 1,
    )
