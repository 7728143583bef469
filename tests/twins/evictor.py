"""The eviction walk of vLLM 0.6.3, exactly as its rule is worded."""


class WalkingEvictor:
    """An insertion-ordered map that is walked from the front at every eviction."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[int, int]] = {}

    def add(self, block: int, tokens: int, last: int) -> None:
        self.entries[block] = (tokens, last)

    def remove(self, block: int) -> None:
        del self.entries[block]

    def evict(self) -> int:
        entries = iter(self.entries.items())
        candidate, (tokens, last) = next(entries)
        for block, (other_tokens, other_last) in entries:
            if other_last > last:
                break
            if other_tokens > tokens:
                candidate, tokens, last = block, other_tokens, other_last
        del self.entries[candidate]
        return candidate
