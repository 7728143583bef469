"""Logs of a vLLM server with its requests (`--enable-log-requests`, log level DEBUG).

The traps (vLLM 0.33.0, `entrypoints/serve/utils/request_logger.py`, and 0.6.3): at level INFO a
line has the limits of a request but not its prompt, so there is nothing to replay; at DEBUG the
token ids are there, cut to `--max-log-len` if that was given, which cannot be seen here. **Outputs
are not in the log**: `max_tokens` is taken as their length. Times have whole seconds and no year.
"""

from __future__ import annotations

import re

from kvsim.workload.gather import Gathered
from kvsim.workload.source import Head, Source, date, shown, tokens
from kvsim.workload.trace import TokenContent, Trace

_LINE = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d)\b")
_DETAILS = re.compile(r"Request (\S+) details: ")
_RECEIVED = re.compile(r"Received request ([^\s:]+): ")
_PROMPT_IDS = re.compile(r"prompt_token_ids: \[([\d, ]*)\]")
_LORA = re.compile(r"\bLoRARequest\(lora_name='([^']+)'")
_LIMIT = re.compile(r"\bmax_tokens=(\d+|None)")
_LEAP_YEAR = "2000"
"""Stands in for the year that the log does not have."""
_HOW = "start the server with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG"
_NOTES = (
    "outputs are as long as their limit (max_tokens): how long they became is not in the log",
    "arrivals have whole seconds: --spread-ties spreads those of one second",
    "prompts are taken whole: with --max-log-len the server would have cut them",
)


def recognises(head: Head) -> bool:
    """Whether this looks like the log of a vLLM server."""
    return not head.is_json and _LINE.search(head.text) is not None


def read(source: Source) -> Trace:
    """The requests of a log, at the time they were received, with their tokens."""
    gathered = Gathered(source, "vllm-log")
    prompts: dict[str, tuple[int, ...]] = {}
    received = 0
    for line in source.lines():
        ids = _PROMPT_IDS.search(line)
        details = _DETAILS.search(line)
        if details and ids:
            prompts[details[1]] = _token_ids(source, ids[1])
        request = _RECEIVED.search(line)
        time, limit = _LINE.search(line), _LIMIT.search(line)
        if not (request and time and limit):
            continue
        received += 1
        prompt = _token_ids(source, ids[1]) if ids else prompts.pop(request[1], ())
        if limit[1] == "None":
            gathered.drop("no max_tokens, so the length of the output is unknown")
        elif not prompt:
            gathered.drop(f"no prompt token ids; {_HOW}")
        else:
            lora = _LORA.search(line)
            adapter = None if lora is None else lora[1]
            _add(source, gathered, request[1], time[1], prompt, limit[1], adapter)
    if not received:
        what = (
            "a log of vLLM without requests; for its settings give it as --startup-log, for a trace"
        )
        raise source.error(f"{what} {_HOW}", line=0)
    return gathered.trace(*_NOTES)


def _add(
    source: Source,
    gathered: Gathered,
    name: str,
    time: str,
    prompt: tuple[int, ...],
    limit: str,
    lora: str | None,
) -> None:
    most = tokens(source, "max_tokens", limit)
    gathered.add(
        len(prompt),
        most,
        time_ns=date(source, "time", f"{_LEAP_YEAR}-{time}"),
        id=name,
        content=TokenContent(prompt),
        max_new_tokens=most,
        lora=lora,
    )


def _token_ids(source: Source, text: str) -> tuple[int, ...]:
    """The numbers of a list. Raises `TraceError` for one that is none, or beyond 63 bits."""
    words = [word for each in text.split(",") if (word := each.strip())]
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 19):
            raise source.error(f"{shown(word)} is not a token id; fix it", "prompt_token_ids")
    return tuple(map(int, words))
