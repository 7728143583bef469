"""ShareGPT conversations: a JSON list of `{"id", "conversations": [{"from", "value"}, ...]}`.

Every answer (`gpt`) is a request whose prompt is all that was said before it, so a conversation is
a session whose turns share their history; each turn follows the one before without a think time.
The traps: there are no arrivals; ids are often repeated, so conversations are numbered; texts have
no token counts (`kvsim.workload.texts`); some conversations have no answer. `vllm bench serve
--dataset-name sharegpt` (0.33.0) sends the first exchange of each alone, drops long and very short
ones, and shuffles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvsim.workload import texts
from kvsim.workload.document import read_elements
from kvsim.workload.gather import Gathered
from kvsim.workload.head import Head
from kvsim.workload.source import Source, parse
from kvsim.workload.trace import Trace

_ANSWERS = "gpt", "chatgpt", "assistant", "bing", "bard", "model"
_NOTE = (
    "each conversation is a session of turns with their whole history; vllm bench serve sends the"
    " first exchange of each alone"
)


def recognises(head: Head) -> bool:
    """Whether the file begins with a conversation."""
    return "conversations" in head.keys


def read(source: Source) -> Trace:
    """The turns of all conversations, without arrivals. Raises `TraceError`."""
    gathered, known = Gathered(source, "sharegpt"), texts.TextIds()
    for number, entry in enumerate(_entries(source)):
        where = f"[{number}].conversations"
        messages = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(messages, list):
            what = "not a list of messages; give the file as it was published"
            raise source.error(what, where)
        _add(source, gathered, texts.Stream(known), messages, where, str(number))
    return texts.identified(gathered.trace(_NOTE, texts.NOTE))


def _entries(source: Source) -> Iterator[Any]:
    """The conversations of a list, or of a file with one per line."""
    if source.beginning().lstrip().startswith("["):
        return read_elements(source)
    return (parse(source, line) for line in source.lines())


def _add(
    source: Source,
    gathered: Gathered,
    stream: texts.Stream,
    messages: list[Any],
    where: str,
    session: str,
) -> None:
    before, turn = -1, 0
    for number, message in enumerate(messages):
        said = message.get("value") if isinstance(message, dict) else None
        if not isinstance(said, str):
            raise source.error("no text; give the file as it was published", f"{where}[{number}]")
        prompt = stream.tokens
        stream.append(said)
        if message.get("from") not in _ANSWERS or not said:
            continue
        if not prompt:
            gathered.drop("an answer without a question before it")
            continue
        output = max(1, stream.tokens - prompt)
        content = stream.content(prompt, output)
        row = gathered.add(
            prompt, output, content=content, after=before, session=session, turn=turn
        )
        before, turn = row.index, turn + 1
