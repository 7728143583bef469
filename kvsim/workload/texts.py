"""Counts and identifies the tokens of plain text by a rule, since no tokenizer is at hand.

`CHARACTERS_PER_TOKEN` characters are one token. Lengths are estimates: English prose has about as
many, other languages and code have fewer. Equal beginnings of texts get equal ids, so that a prefix
cache finds them, and that is exact to 64 characters.
"""

from __future__ import annotations

from xxhash import xxh3_128_digest

from kvsim.workload.runs import collapse
from kvsim.workload.trace import HashContent, Trace

CHARACTERS_PER_TOKEN = 4
BLOCK_SIZE = 16
"""Tokens per id."""
_CHARACTERS = BLOCK_SIZE * CHARACTERS_PER_TOKEN
NOTE = (
    f"lengths are estimates, {CHARACTERS_PER_TOKEN} characters a token, without the chat template;"
    " count the file with your model's tokenizer if they matter"
)


class TextIds:
    """The ids of a file: one per 64 characters and all before them, numbered by first use."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], int] = {}

    def after(self, before: int, block: str) -> int:
        """The id of a block of text that follows the block with id `before` (-1: none)."""
        key = (before, xxh3_128_digest(block.encode("utf-8", "surrogatepass")))
        return self._known.setdefault(key, len(self._known))


class Stream:
    """A text that grows, such as a conversation."""

    def __init__(self, ids: TextIds) -> None:
        self.characters = 0
        self._ids = ids
        self._blocks: list[int] = []
        self._tail = ""

    @property
    def tokens(self) -> int:
        """How many tokens the text has, 0 for an empty one."""
        return max(self.characters // CHARACTERS_PER_TOKEN, min(self.characters, 1))

    def append(self, text: str) -> None:
        """Continue the text."""
        self.characters += len(text)
        tail = self._tail + text
        whole = len(tail) - len(tail) % _CHARACTERS
        for start in range(0, whole, _CHARACTERS):
            before = self._blocks[-1] if self._blocks else -1
            self._blocks.append(self._ids.after(before, tail[start : start + _CHARACTERS]))
        self._tail = tail[whole:]

    def content(self, input_length: int | None = None, output_length: int = 0) -> HashContent:
        """The ids of a prompt of the first `input_length` tokens (default: all), and of an output
        that follows it in this text."""
        prompt = (self.tokens if input_length is None else input_length) // BLOCK_SIZE
        last = prompt if input_length is None else (input_length + output_length) // BLOCK_SIZE
        return HashContent(collapse(self._blocks[:prompt]), collapse(self._blocks[prompt:last]))


def identified(trace: Trace) -> Trace:
    """State in the trace that its hash ids are those of `TextIds`."""
    trace.block_size, trace.hash_kind, trace.partial_hash = BLOCK_SIZE, "prefix", False
    return trace
