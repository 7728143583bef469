"""What clients of vLLM's OpenAI-compatible server send, what they get, and how: as it comes, or in
one piece once it is whole.

Source: vLLM 0.33.0, `entrypoints/openai/completion/protocol.py`, `chat_completion/protocol.py`.
Fields that change no decision (temperature, stop, tools' choice) are accepted and do nothing.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvsim.against.serve.session import Options
from kvsim.against.serve.watch import Entry, nobody, tokens_of, tokens_of_chat

_ERRORS = {404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}

ARRIVAL = "x-kvsim-arrival-s"
"""When a request arrives, in simulated seconds, where nobody waits for the wall clock."""
_STREAM = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """A request that is answered by an error."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self._status = status

    def body(self) -> bytes:
        """The error, as vLLM writes it."""
        kind = _ERRORS.get(self._status, "BadRequestError")
        error = {"message": str(self), "type": kind, "param": None, "code": self._status}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """The answer."""
        return Response(self.body(), self._status, media_type="application/json")


Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]
Samples = Annotated[int, Meta(ge=1, le=128)]


class StreamOptions(Struct):
    """What a stream tells beside tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Common(Struct, kw_only=True):
    model: str | None = None
    n: Samples | None = 1
    max_tokens: Natural | None = None
    min_tokens: Natural = 0
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None


class Completion(_Common, kw_only=True):
    """`POST /v1/completions`."""

    prefix: ClassVar[str] = "cmpl"
    prompt: str | list[str | Natural | list[Natural]]

    def prompts(self) -> list[Sequence[int]]:
        """The tokens of each prompt. Raises `Refused`."""
        given: Any = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        kinds = {type(each) for each in given}
        if int in kinds:
            if len(kinds) > 1:
                raise Refused("prompt: token ids among texts or lists; give one kind")
            given = [given]
        found = [tokens_of(each) if isinstance(each, str) else each for each in given]
        if not found or not all(found):
            raise Refused("prompt: it is empty; give at least one token")
        return found

    @property
    def most(self) -> int | None:
        """Most tokens of an answer; OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens


class Message(Struct):
    """A turn of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: Any = None

    def turn(self) -> tuple[str, str]:
        """Its role and text. Raises `Refused` for what is no text."""
        parts = self.content or ""
        if not isinstance(parts, str):
            if other := sorted({str(part.get("type")) for part in parts} - {"text"}):
                raise Refused(f"messages: {', '.join(other)} is not simulated; give text")
            parts = "".join(str(part.get("text", "")) for part in parts)
        calls = msgspec.json.encode(self.tool_calls).decode() if self.tool_calls else ""
        return self.role, parts + calls


class Chat(_Common, kw_only=True):
    """`POST /v1/chat/completions`."""

    prefix: ClassVar[str] = "chatcmpl"
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Natural | None = None
    tools: Any = None

    def prompts(self) -> list[Sequence[int]]:
        """The tokens of the conversation. Raises `Refused`."""
        turns = [each.turn() for each in self.messages]
        if self.tools:
            turns.insert(0, ("tools", msgspec.json.encode(self.tools).decode()))
        return [tokens_of_chat(turns)]

    @property
    def most(self) -> int | None:
        """Most tokens of an answer; None: as many as fit."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given


class Tokenize(Struct):
    """`POST /tokenize`."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool = True

    def tokens(self) -> list[int]:
        """Raises `Refused`."""
        if self.messages is not None:
            turns = [each.turn() for each in self.messages]
            return tokens_of_chat(turns, opens=self.add_generation_prompt)
        if self.prompt is None:
            raise Refused("prompt: it is missing; give prompt or messages")
        return tokens_of(self.prompt)


def usage(entries: Sequence[Entry]) -> dict[str, Any]:
    """Tokens of a request: its prompts once, all samples of answers."""
    # Samples of one prompt have it in common.
    firsts = [entry for entry in entries if not entry.family or entry.family[0] is entry]
    prompt = sum(int(entry.request.input_length) for entry in firsts)
    generated = sum(entry.tokens for entry in entries)
    cached = sum(int(entry.request.cached_tokens) for entry in firsts)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Answer(NamedTuple):
    """How an answer is written."""

    chat: bool
    id: str
    created: int
    model: str

    def whole(self, entries: Sequence[Entry]) -> bytes:
        """The answer in one piece."""
        choices = [
            _choice(place, self._said("message", entry.text(), role="assistant"), entry.reason)
            for place, entry in enumerate(entries)
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._encoded(kind, choices, usage=usage(entries))

    def event(self, place: int, text: bytes, reason: str = "", **more: Any) -> bytes:
        """An event of a stream: what a sample got."""
        return self._event(_choice(place, self._said("delta", text), reason), **more)

    def around(self, place: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event of tokens that says nothing else."""
        # NUL stands for the text: JSON writes it as no other text.
        before, _, after = self.event(place, b"\0").rpartition(rb"\u0000")
        return before, after

    def opening(self, samples: int) -> bytes:
        """The first events of a stream."""
        said = self._said("delta", b"", role="assistant")
        events = [self._event(_choice(place, said, "")) for place in range(samples)]
        return b"".join(events) if self.chat else b""

    def closing(self, entries: Sequence[Entry] | None) -> bytes:
        """The last events of a stream: with `entries`, what they used."""
        return (self._event(usage=usage(entries)) if entries else b"") + b"data: [DONE]\n\n"

    def _said(self, name: str, text: bytes, **role: str) -> dict[str, Any]:
        words = text.decode()
        return {name: {**role, "content": words}} if self.chat else {"text": words}

    def _event(self, *choices: dict[str, Any], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return b"data: " + self._encoded(kind, choices, **more) + b"\n\n"

    def _encoded(self, kind: str, choices: Sequence[Any], **more: Any) -> bytes:
        told = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return msgspec.json.encode({**told, "choices": choices, **more})


def _choice(place: int, said: dict[str, Any], reason: str) -> dict[str, Any]:
    ends = {"finish_reason": reason or None, "stop_reason": None}
    return {"index": place, **said, "logprobs": None, **ends}


@dataclass(slots=True)
class _Sample:
    """One of the texts of a stream."""

    entry: Entry
    place: int
    before: bytes
    """What stands before new text in an event that says nothing else."""
    after: bytes
    sent: int = 0
    """Tokens that are sent."""


class Reply:
    """The answer to a request.

    A step that makes tokens sends them itself, without a task that it would have to wake, unless
    the client reads too slowly: that one gets several tokens at once, when it has read what was
    sent before, and nobody waits for it.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        answer: Answer,
        asked: Completion | Chat,
        entries: Sequence[Entry],
        options: Options,
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._answer, self._entries = answer, entries
        self._interval, self._virtual = options.stream_interval, options.virtual
        self._options = asked.stream_options or StreamOptions()
        self.error: Exception | None = None
        """Why it could not be sent."""
        self._task = asyncio.current_task()
        self._sending: asyncio.Future[None] | None = None
        """What waits for a slow client."""
        self._left: list[_Sample] = []
        self._head = b""
        self._streams = bool(asked.stream)
        for entry in entries:
            entry.client = self._changed
        if self._streams:
            self._left = [
                _Sample(entry, place, *answer.around(place)) for place, entry in enumerate(entries)
            ]
            self._head = answer.opening(len(entries))
            self._begin(send(_STREAM))

    def close(self) -> None:
        """The client is gone, or has everything."""
        if self._sending is not None:
            self._sending.cancel()

    def _changed(self) -> None:
        """There are new tokens, or ends."""
        if not self._streams:
            if all(entry.reason for entry in self._entries):
                self._begin(self._whole())
        elif self._sending is None and self._left and (body := self._events()):
            more = bool(self._left)
            self._begin(self._send({"type": "http.response.body", "body": body, "more_body": more}))

    def _begin(self, sending: Any) -> None:
        """Lets it run as far as it goes at once, which is to its end for all but slow clients."""
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except Exception as error:
            self._fail(error)
            return
        self._sending = asyncio.ensure_future(_rest(sending, waits_for))
        self._sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Future[None]) -> None:
        self._sending = None
        if sending.cancelled():
            return
        if isinstance(error := sending.exception(), Exception):
            self._fail(error)
        elif self._streams:
            self._changed()

    def _fail(self, error: Exception) -> None:
        """Ends the task that waits for the client; the engine serves the others on."""
        self.error, self._left = error, []
        for entry in self._entries:
            entry.client = nobody
        if self._task is not None:
            self._task.cancel()

    def _events(self) -> bytes:
        """What a stream tells next."""
        events, often = [self._head], self._options.continuous_usage_stats
        for sample in self._left:
            entry, first = sample.entry, sample.sent
            if entry.tokens - first < (self._interval if first else 1) and not entry.reason:
                continue
            sample.sent = entry.tokens
            if often or entry.reason:
                events.append(self._event(entry, sample.place, first))
            else:
                events += (sample.before, entry.text(first), sample.after)
        if len(events) == 1:
            return b""
        self._head = b""
        self._left = [sample for sample in self._left if not sample.entry.reason]
        if not self._left:
            used = self._entries if self._options.include_usage else None
            events.append(self._answer.closing(used))
        return b"".join(events)

    def _event(self, entry: Entry, place: int, first: int) -> bytes:
        """What a sample gets that is not mere tokens."""
        if entry.error:
            return b"data: " + Refused(entry.error, 500).body() + b"\n\n"
        more: dict[str, Any] = {}
        if self._options.continuous_usage_stats:
            more["usage"] = usage([entry])
        if entry.reason and self._virtual:
            more["kvsim"] = times([entry])
        return self._answer.event(place, entry.text(first), entry.reason, **more)

    async def _whole(self) -> None:
        if error := next((each.error for each in self._entries if each.error), ""):
            response = Refused(error, 500).response()
        else:
            response = Response(self._answer.whole(self._entries), media_type="application/json")
        response.headers.update(times(self._entries))
        await response(self._scope, self._receive, self._send)


@types.coroutine
def _rest(begun: Any, waits_for: Any) -> Generator[Any, None, None]:
    """The rest of a coroutine that has begun, and waits for something."""
    yield waits_for
    yield from begun


def times(entries: Sequence[Entry]) -> dict[str, str]:
    """Simulated seconds of requests: the first arrival, the first token, the last end."""
    requests: list[Any] = [entry.request for entry in entries]
    firsts = [each.first_token_ns for each in requests if each.first_token_ns >= 0]
    found = {
        ARRIVAL: min(each.arrival_ns for each in requests),
        "x-kvsim-first-token-s": min(firsts, default=-1),
        "x-kvsim-finish-s": max(each.finish_ns for each in requests),
    }
    return {name: f"{ns / 1e9:.9f}" for name, ns in found.items() if ns >= 0}
