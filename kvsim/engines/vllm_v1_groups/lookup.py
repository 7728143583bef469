"""The longest prefix that every KV cache group still has.

Source: vLLM 0.33.0, `v1/core/kv_cache_coordinator.py`, `find_longest_cache_hit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvsim.engines.vllm_v1_groups.full import Full
from kvsim.engines.vllm_v1_groups.group import Entry, Found, Group, Layout
from kvsim.engines.vllm_v1_groups.mamba import Mamba


class Hits(NamedTuple):
    """What a lookup found of a sequence."""

    tokens: int
    """Tokens that need not be computed."""
    blocks: list[list[int]]
    """For each group the blocks in token order; 0 where none is needed."""


class Alike(NamedTuple):
    """Groups with equal rules. They are looked up together: a block counts if all of them have
    it."""

    rules: Group
    members: tuple[int, ...]
    drop: bool
    """Whether their hits lose the last block."""

    @property
    def full(self) -> bool:
        """Whether a prefix of a hit is always a hit."""
        return isinstance(self.rules, Full)


def sets_of(groups: Sequence[Group], layout: Layout) -> tuple[Alike, ...]:
    """Returns the groups in sets of equal ones, full attention first."""
    marked = any(group.eagle for group in groups)
    sets: dict[Group, list[int]] = {}
    for number, group in enumerate(groups):
        sets.setdefault(replace(group, eagle=False), []).append(number)

    def drops(members: list[int]) -> bool:
        return layout.drops_last and any(groups[each].eagle or not marked for each in members)

    found = [Alike(rules, tuple(members), drops(members)) for rules, members in sets.items()]
    return tuple(sorted(found, key=lambda each: not each.full))


Finder = Callable[[Alike], Found]
"""Maps groups with equal rules to a search in their blocks."""


def longest_common(
    sets: Sequence[Alike], finder: Finder, longest: int, known: int, align: int
) -> tuple[list[list[Entry]], int, int]:
    """Returns the hits of each set, the tokens on which all sets agree, and the junction.

    At most `longest` tokens are hit; blocks are known by their keys up to `known` tokens. Each set
    shortens what the others found, until all agree.
    """
    found: dict[int, list[Entry]] = {}
    tokens, best, dropped = longest, 0, set[int]()
    simple = len(sets) == 2 and sets[0].full
    while True:
        common = tokens
        for number, (rules, _, drop) in enumerate(sets):
            size = rules.block_size
            if sets[number].full and number in found:
                common = min(common, len(found[number]) * size)
                continue
            drops = drop and number not in dropped
            most = common
            if drops and not isinstance(rules, Mamba):
                most = min(common + size, known)
            entries = found[number] = rules.find(finder(sets[number]), most, drops, align)
            hit = len(entries) * size
            if drops:
                dropped.add(number)
            elif hit < common:
                dropped.clear()
            common = hit
            best = max(best, common)
        shorter, tokens = common < tokens, min(common, tokens)
        if not shorter or simple:
            break
    for number, alike in enumerate(sets):
        if alike.full:
            del found[number][-(-tokens // alike.rules.block_size) :]
    return [found[number] for number in range(len(sets))], tokens, best if best > tokens else 0


def tables_of(sets: Sequence[Alike], found: Sequence[list[Entry]], groups: int) -> list[list[int]]:
    """Returns the hits of each group, in the order of the groups."""
    tables: list[list[int]] = [[] for _ in range(groups)]
    for (_, members, _), entries in zip(sets, found, strict=True):
        for place, number in enumerate(members):
            tables[number] = [entry[place] if entry else 0 for entry in entries]
    return tables
