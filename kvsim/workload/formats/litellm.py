"""LiteLLM's spend logs and standard logging payloads: JSON Lines, a list, or a page of its API.

The traps (LiteLLM, `proxy/schema.prisma`, `LiteLLM_SpendLogs`): dates of the database, seconds
since 1970 in payloads; rows that failed, or that LiteLLM's own cache answered, reached no engine;
a row may be an embedding. Prompts are not told from each other, so nothing is shared.
"""

from __future__ import annotations

from kvsim.workload.gather import Gathered
from kvsim.workload.head import Head
from kvsim.workload.served import add_served, records
from kvsim.workload.source import Source
from kvsim.workload.trace import Trace

_TIMES = ("startTime", "completionStartTime", "endTime")
_NAMES = ("request_id", "session_id", "model")


def recognises(head: Head) -> bool:
    """Whether the rows have LiteLLM's names of times and tokens."""
    return {"startTime", "prompt_tokens", "completion_tokens"} <= head.keys or (
        '"startTime"' in head.text and '"prompt_tokens"' in head.text and head.is_json
    )


def read(source: Source) -> Trace:
    """The requests of a log, each when it came. Raises `TraceError` at the first wrong record."""
    gathered = Gathered(source, "litellm")
    for record in records(source):
        table = record.table
        if table.get("status", "success") != "success" or table.get("error_str"):
            gathered.drop("they failed")
        elif str(table.get("cache_hit")).lower() == "true":
            gathered.drop("LiteLLM's own cache answered them")
        elif "embedding" in str(table.get("call_type")):
            gathered.drop("they are embeddings")
        else:
            counts = (table.get("prompt_tokens"), table.get("completion_tokens"))
            add_served(source, gathered, record, counts, _TIMES, _NAMES)
    return gathered.trace()
