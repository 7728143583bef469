"""What clients of vLLM's OpenAI-compatible server send, and what they get.

Source: vLLM 0.33.0, `entrypoints/openai/completion/protocol.py`, `chat_completion/protocol.py`.
Fields that change no decision (temperature, stop, tools' choice) are accepted and do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvsim.against.serve.watch import Entry
from kvsim.against.serve.words import FILLER, tokens_of, tokens_of_chat

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

    prompt: str | list[str | Natural | list[Natural]]

    def prompts(self) -> list[Sequence[int]]:
        """The tokens of each prompt. Raises `ValueError`."""
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if all(isinstance(each, int) for each in given):
            given = [given]
        found: list[Sequence[int]] = []
        for each in given:
            if isinstance(each, int):
                raise ValueError("prompt: token ids among texts or lists; give one kind")
            found.append(tokens_of(each) if isinstance(each, str) else each)
        if not found or not all(found):
            raise ValueError("prompt: it is empty; give at least one token")
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

    def text(self) -> str:
        """Its text. Raises `ValueError` for what is no text."""
        if isinstance(self.content, list):
            kinds = {str(part.get("type")) for part in self.content} - {"text"}
            if kinds:
                raise ValueError(
                    f"messages: {', '.join(sorted(kinds))} is not simulated; give text"
                )
            said = "".join(str(part.get("text", "")) for part in self.content)
        else:
            said = self.content or ""
        return said + (msgspec.json.encode(self.tool_calls).decode() if self.tool_calls else "")


class Chat(_Common, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Natural | None = None
    tools: Any = None

    def prompts(self) -> list[Sequence[int]]:
        """The tokens of the conversation. Raises `ValueError`."""
        turns = [(each.role, each.text()) for each in self.messages]
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
        """Raises `ValueError`."""
        if self.messages is not None:
            turns = [(each.role, each.text()) for each in self.messages]
            return tokens_of_chat(turns, opens=self.add_generation_prompt)
        if self.prompt is None:
            raise ValueError("prompt: it is missing; give prompt or messages")
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
        choices = [self._choice(place, entry, 0, True) for place, entry in enumerate(entries)]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._encoded(kind, choices, usage(entries))

    def chunk(
        self, place: int, entry: Entry, sent: int, said: dict[str, Any] | None, **more: Any
    ) -> bytes:
        """The tokens of an answer that were not sent yet, as an event of a stream."""
        choices = [self._choice(place, entry, sent, False)]
        return self._event(choices, said, **more)

    def around(self, place: int, entry: Entry) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event of tokens that says nothing else."""
        begun = Entry(entry.request, [0], tokens=1)
        before, text, after = self.chunk(place, begun, 0, None).partition(FILLER[0].encode())
        assert text
        return before, after

    def opening(self, place: int) -> bytes:
        """The first event of a stream of a chat."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event([choice], None)

    def closing(self, entries: Sequence[Entry] | None) -> bytes:
        """The last events of a stream: with `entries`, what they used."""
        used = b"" if entries is None else self._event([], usage(entries))
        return used + b"data: [DONE]\n\n"

    def _event(
        self, choices: list[dict[str, Any]], said: dict[str, Any] | None, **more: Any
    ) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return b"data: " + self._encoded(kind, choices, said, **more) + b"\n\n"

    def _encoded(
        self, kind: str, choices: list[Any], said: dict[str, Any] | None, **more: Any
    ) -> bytes:
        told = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        told |= {"choices": choices} | more
        return msgspec.json.encode(told if said is None else {**told, "usage": said})

    def _choice(self, place: int, entry: Entry, sent: int, whole: bool) -> dict[str, Any]:
        text = entry.text(sent)
        said: dict[str, Any] = {"text": text}
        if self.chat and whole:
            said = {"message": {"role": "assistant", "content": text}}
        elif self.chat:
            said = {"delta": {"content": text}}
        ended = entry.reason or None
        return {
            "index": place,
            **said,
            "logprobs": None,
            "finish_reason": ended,
            "stop_reason": None,
        }
