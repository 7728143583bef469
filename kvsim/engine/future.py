"""What is to come, for oracles: policies that no engine can follow, as bounds of the possible.

A policy is an oracle if its constructor names the parameter `future`. There is no other way to get
at one, and a result says which policies asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Future:
    """The trace, ahead of time. It is filled when the run begins, after policies are made."""

    def __init__(self) -> None:
        self.oracles: list[str] = []
        """The policies that were given it, as in `victim: mine:Clairvoyant`."""
        self._output_length: Callable[[int], int] | None = None
        self._keys: Callable[[int, int], Sequence[int]] | None = None

    def given_to(self, policy: str) -> None:
        """Note that a policy is an oracle."""
        if policy not in self.oracles:
            self.oracles.append(policy)

    def fill(
        self, output_length: Callable[[int], int], keys: Callable[[int, int], Sequence[int]]
    ) -> None:
        """A run begins; see the two methods below for what is to be known."""
        self._output_length, self._keys = output_length, keys

    def output_length(self, index: int) -> int:
        """Tokens that each sample of the request at this place of the trace will generate."""
        assert self._output_length is not None, "the run has not begun"
        return self._output_length(index)

    def prompt_keys(self, index: int, block_size: int) -> Sequence[int]:
        """Keys of the full blocks of the prompt of the request at this place of the trace."""
        assert self._keys is not None, "the run has not begun"
        return self._keys(index, block_size)
