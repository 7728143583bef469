"""Token streams of the conformance traces: known prompts, outputs made by a rule."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from zlib import crc32

import xxhash

END = 32000
"""The token that ends a sequence."""


class RuleStream:
    """A prompt of known tokens, continued by the test corpus's rule for generated tokens.

    Output token k of label L is `crc32("L:k") mod 32000`; where samples have lengths of their own,
    the last one is `END`. Keys are chained xxh128 digests.
    """

    knows_tokens = True

    def __init__(
        self,
        label: str,
        prompt: Seq[int],
        sample: int | None = None,
        lengths: Seq[int] | None = None,
        salt: str = "",
    ) -> None:
        """Streams with different salts share no key."""
        self._id = label
        self._lengths = lengths
        self._end = lengths[sample or 0] - 1 if lengths else -1
        """Number of the output token that is `END`; -1: none."""
        self._label = label if sample is None else f"{label}/{sample}"
        self._prompt = prompt
        self._tokens = list(prompt)
        self._keys: dict[int, list[int]] = {}
        """Block size → keys so far."""
        self._salt = salt.encode()
        self._digests: dict[int, bytes] = {}

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        """Keys of full blocks `first .. last - 1`."""
        keys, digest = (
            self._keys.setdefault(block_size, []),
            self._digests.get(block_size, self._salt),
        )
        while len(keys) < last:
            digest = xxhash.xxh128_digest(digest + self._block(len(keys), block_size))
            keys.append(int.from_bytes(digest, "little"))
        self._digests[block_size] = digest
        return keys[first:last]

    def contents(self, first: int, last: int, block_size: int) -> list[int]:
        """Identities of the tokens in blocks `first .. last - 1`, whatever is before them."""
        return [xxhash.xxh128_intdigest(self._block(i, block_size)) for i in range(first, last)]

    def _block(self, index: int, block_size: int) -> bytes:
        """The tokens of a full block, spelled out."""
        tokens, start = self._tokens, len(self._prompt)
        end = (index + 1) * block_size
        for k in range(len(tokens) - start, end - start):
            token = crc32(f"{self._label}:{k}".encode()) % 32000
            tokens.append(END if k == self._end else token)
        return repr(tokens[end - block_size : end]).encode()

    def sample(self, index: int) -> RuleStream:
        """The stream of the corpus's sample `index - 1`."""
        return RuleStream(self._id, self._prompt, index - 1, self._lengths, self._salt.decode())
