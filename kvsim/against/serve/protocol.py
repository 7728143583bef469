"""What clients of vLLM's OpenAI-compatible server send, and what they get.

Source: vLLM 0.33.0, `entrypoints/openai/completion/protocol.py`, `chat_completion/protocol.py`.
Fields that change no decision (temperature, stop, tools' choice) are accepted and do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from kvsim.against.serve.watch import Entry
from kvsim.against.serve.words import tokens_of, tokens_of_chat

_ERRORS = {404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


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
