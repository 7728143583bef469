"""The future of a trace, for oracles: policies that no real engine can follow, used as bounds.

A policy is an oracle if its constructor has a parameter `future`; no other policy can see the
future. The result lists the policies that asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Future:
    """What the trace will bring. It is filled when the run begins, after the policies are made."""

    def __init__(self) -> None:
        self.oracles: list[str] = []
        """Labels of the policies that received it, such as `victim: mine:Clairvoyant`."""
        self.requests = 0
        """Number of requests of the run."""
        self._output_length: Callable[[int], int] | None = None
        self._keys: Callable[[int, int], Sequence[int]] | None = None
        self._admitted: Callable[[int], bool] | None = None
        self._expected_ns: Callable[[int, int], int] | None = None

    def given_to(self, policy: str) -> None:
        """Records that a policy is an oracle."""
        if policy not in self.oracles:
            self.oracles.append(policy)

    def fill(
        self,
        requests: int,
        output_length: Callable[[int], int],
        keys: Callable[[int, int], Sequence[int]],
        admitted: Callable[[int], bool],
        expected_ns: Callable[[int, int], int],
    ) -> None:
        """Fills it when a run begins, with the functions behind the methods below."""
        self.requests = requests
        self._output_length, self._keys = output_length, keys
        self._admitted, self._expected_ns = admitted, expected_ns

    def output_length(self, index: int) -> int:
        """Tokens that each sample of the request at this place of the trace will generate."""
        assert self._output_length is not None, "the run has not begun"
        return self._output_length(index)

    def prompt_keys(self, index: int, block_size: int) -> Sequence[int]:
        """Keys of the full blocks of the prompt of the request at this place of the trace."""
        assert self._keys is not None, "the run has not begun"
        return self._keys(index, block_size)

    def admitted(self, index: int) -> bool:
        """Whether the request at this place of the trace has been given blocks before."""
        assert self._admitted is not None, "the run has not begun"
        return self._admitted(index)

    def expected_ns(self, index: int, now_ns: int) -> int:
        """When the client of the request at this place of the trace will send it. A turn that waits
        for another one is expected as if that one ended now, or took no time."""
        assert self._expected_ns is not None, "the run has not begun"
        return self._expected_ns(index, now_ns)
