"""What requests say: made-up prompts that agree with the identity of their blocks, and outputs.

A block manager shares a block because its key is equal, so tokens must be equal where keys are.
Whoever looks at a full block first decides its tokens: a prompt makes them up from the key, an
output takes what the model sampled. Everybody else with that key gets the same ones.

```
request 0   | 7 3 | 9 1 | 4 .        key of each full block -> its tokens, shared
request 1   | 7 3 | 9 1 | 6 2 |      without keys, a block belongs to one request alone
```
"""

from collections.abc import Sequence
from typing import Protocol

_MIX, _STIR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_WORD = (1 << 64) - 1


class Stream(Protocol):
    """Identity of the blocks of one request (`kvsim/workload/streams.py`)."""

    def keys(self, first: int, last: int, block_size: int) -> Sequence[int]:
        """Keys of the full blocks `first .. last - 1`."""
        ...


class Text:
    """The tokens of one request, prompt and output."""

    def __init__(self, texts: "Texts", number: int, stream: Stream | None) -> None:
        self._texts, self._number, self._stream = texts, number, stream
        self._blocks: list[list[int]] = []

    def tokens(self, first: int, last: int) -> list[int]:
        """Tokens at the positions `first .. last - 1`; undecided tokens are made up now."""
        size = self._texts.block_size
        said: list[int] = []
        for place in range(first // size, -(-last // size)):
            begin, end = max(first - place * size, 0), min(last - place * size, size)
            said += self._block(place, end)[begin:end]
        return said

    def say(self, position: int, token: int) -> int:
        """A token was sampled for `position`; returns the token that stands there."""
        place, offset = divmod(position, self._texts.block_size)
        block = self._block(place, offset)
        if len(block) == offset:
            block.append(token)
        return block[offset]

    def _block(self, place: int, upto: int) -> list[int]:
        """The tokens of a block, at least the first `upto` of them."""
        while len(self._blocks) <= place:
            self._blocks.append(self._texts.block(self._key(len(self._blocks))))
        block = self._blocks[place]
        while len(block) < upto:
            block.append(self._texts.made_up(self._key(place), len(block)))
        return block

    def _key(self, place: int) -> tuple[int, int]:
        if self._stream is not None:
            return -1, self._stream.keys(place, place + 1, self._texts.block_size)[0]
        return self._number, place


class Texts:
    """All texts of a run, over a vocabulary of `vocab` tokens, in blocks of `block_size`."""

    def __init__(self, vocab: int, block_size: int) -> None:
        self.block_size = block_size
        self._vocab = vocab
        self._blocks: dict[tuple[int, int], list[int]] = {}

    def begin(self, number: int, stream: Stream | None) -> Text:
        """The text of request `number`; None if no other request shares a token with it."""
        return Text(self, number, stream)

    def block(self, key: tuple[int, int]) -> list[int]:
        """The tokens decided so far of a block: (-1, shared key) or (request, place)."""
        return self._blocks.setdefault(key, [])

    def made_up(self, key: tuple[int, int], offset: int) -> int:
        """A token from the identity of its place alone, the same in every process."""
        word = (key[0] * _STIR ^ key[1] * _MIX) + offset * _STIR & _WORD
        word = (word ^ word >> 31) * _MIX & _WORD
        return (word ^ word >> 29) % self._vocab
