"""What a scheduler with features knows of a request in progress, beside its tokens and blocks."""

from __future__ import annotations

from kvsim.engines.vllm_v1_features.connector import Match

UNLOADED, LOADING, LOADED = range(3)
"""Whether a connector loads into the blocks of a waiting request. LOADED: the load has been
reported, and the request has not been looked at since."""


class Live:
    """The state of one request."""

    __slots__ = (
        *("batch", "drafts", "drop", "fly", "held", "load", "match", "mid_prompt", "passed_over"),
        *("resumes_at", "stale"),
    )

    def __init__(self) -> None:
        self.drafts = 0
        """Drafts proposed for its next step."""
        self.fly = 0
        """Tokens in batches whose result is not known yet."""
        self.stale = 0
        """The part of `fly` from before a preemption. Its outputs still count."""
        self.drop = False
        """Whether such outputs are thrown away instead."""
        self.load = UNLOADED
        self.held = False
        """Whether the connector could not say yet what it can load."""
        self.match = Match()
        """What was loaded, or is being loaded, for its last admission."""
        self.passed_over = False
        """Whether it runs and got no slot, because blocks are released late."""
        self.mid_prompt = False
        """Whether known tokens were left over by its last step."""
        self.resumes_at = 0
        """Number of the scheduling call that may give it a token again."""
        self.batch = 0
        """Number of the last batch that it took part in; batches without tokens do not count."""


class Budget:
    """The tokens that a step may still take on."""

    def __init__(self, tokens: int, slots: int) -> None:
        """`slots`: positions that every request takes from the inputs beside its tokens."""
        self.tokens = self._inputs = tokens
        self._slots = slots

    @property
    def spent(self) -> bool:
        """Whether no further request fits."""
        return self.tokens <= 0 or self._inputs <= self._slots

    @property
    def left(self) -> int:
        """Most tokens that one more request may take on."""
        return min(self.tokens, self._inputs - self._slots)

    def spend(self, tokens: int) -> None:
        """A request takes on tokens."""
        self.tokens -= tokens
        self._inputs -= tokens + self._slots

    def refund(self, tokens: int) -> None:
        """A request gives back the tokens it took on, as it is preempted after all."""
        self.tokens += tokens
        self._inputs += tokens + self._slots
