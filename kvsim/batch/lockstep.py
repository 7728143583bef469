"""Decoding in lockstep: a batch whose leading decodes cost the same however many they are.

```
 running order    a   b   c   d   e ‖ p   q            ‖ ends the cohort: p is still in its prompt
                  └─── cohort ───┘   └ behind ┘

 a clock that counts the cohort's steps                 composed C = 7, settled S = 7

 what a member was when it joined                       a: joined at 3, had 18 slots filled, ...
 what it is now      slots = 18 + (C − 3)               computed only when somebody looks

 phases: step mod block_size → members that open a block in that step
            0 ·   1 ▪▪   2 ·   3 ▪   4 ·  ...           a step takes as many blocks as it has
 ends:   step → members whose last token is of that step
            9: b      12: a, d                          a step ends those, and touches nobody else
```

Every member of the cohort gets one token in each step. So lengths, slots and contexts all grow by
one, and only two things need attention: who opens a block, which depends on the length modulo the
block size, and who ends. Both are filed under the step in which they are due.

A request that leaves the cohort (it ends, it is preempted, somebody looks at `running`) is brought
up to date by `_extract`; then it is as if it had been looked at one by one all the time. With
steps in flight, some of its tokens are still to come: those plans list it in `left`.

Two kinds of block managers go along (`Tables.lockstep`). Where blocks are counted and not named,
a step takes a number of blocks. Where they are named, members that open or fill a block in a step
are visited in running order, and the scheduler lets them grow by its own rules.

`Batch`, which looks at every request in every step, is the twin of this class: the same decisions,
times and figures.
"""

from __future__ import annotations

from collections import deque
from heapq import heappush
from typing import NamedTuple

from kvsim.batch.batch import Batch
from kvsim.batch.pace import GiveWay, Pace
from kvsim.blocks.tables import COUNTED, NAMED, Tables
from kvsim.plan import Plan
from kvsim.request import Request, Sequence


class Member(NamedTuple):
    """Standing of a request when it joined the cohort."""

    place: int
    """Members are ordered by it, as they are in the running queue."""
    joined: int
    """Steps of the cohort composed before its first."""
    last: int
    """Steps of the cohort composed when its last token will be."""
    filled: int
    """Its tokens that had a slot."""
    known: int
    """Its tokens that were known or being sampled."""


class Lockstep(Batch):
    """All requests of one replica; those that only decode are looked at together."""

    def __init__(self, blocks: Tables) -> None:
        super().__init__(blocks)
        self._size = blocks.block_size
        self._members: dict[Request, Member] = {}
        """The cohort, in running order."""
        self._sitting: dict[Request, None] = {}
        """Members whose last token is being sampled: they take part in no further step."""
        self._phases: list[dict[Request, None]] = [{} for _ in range(self._size)]
        """Step modulo block size → members that open a block in it, in running order."""
        self._ends: dict[int, dict[Request, None]] = {}
        """Steps settled → members whose last token exists by then; some may have left since."""
        self._next_ends: list[int] = []
        """Heap of the keys of `_ends`, and of some that are gone."""
        self._newcomers: dict[int, dict[Request, None]] = {}
        """Step → members for which it is the first, and which got their last token apart from the
        others; some may have left since."""
        self._flying: deque[Plan] = deque()
        """Plans with steps of the cohort that are not settled, in order."""
        self._composed = 0
        self._settled = 0
        """Steps of the cohort."""
        self._context_tokens = 0
        """Sum of the lengths of the members that are not sitting, the next token included."""
        self._composed_ns = 0
        self._token_ns = 0
        """When the last step was composed, and when the last one settled had its tokens."""
        self._places = 0
        self._given = 0
        """Blocks of the step being composed that were given out before somebody made room."""
        self._counts_composed = False
        """`Pace.counts_composed` of the scheduler."""
        self.together_steps = 0
        """Steps that the cohort took."""
        self.dissolutions = 0
        """Times that all of it had to be looked at one by one."""

    @property
    def num_together(self) -> int:
        return len(self._members)

    def shortcuts(self) -> dict[str, int]:
        """Steps that a cohort took part in, and times it was dissolved to go one by one."""
        return {"together_steps": self.together_steps, "dissolutions": self.dissolutions}

    # -- a step of the cohort --------------------------------------------------------------------

    def decode_together(self, pace: Pace, give_way: GiveWay | None, spare: bool) -> int:
        if not self.blocks.lockstep:
            return 0
        if pace.ahead:
            self._seat()
        self._counts_composed = pace.counts_composed
        self._recruit(pace)
        if not self._members or not self._make_room(give_way, spare):
            return 0
        number = len(self._members) - len(self._sitting)
        if not number:
            return 0
        self._grow(pace, number)
        plan = self.plan
        plan.together = number
        plan.decode_seqs += number
        plan.context_tokens += self._context_tokens
        self._compose(number)
        self._flying.append(plan)
        return number

    def settle_together(self, plan: Plan, pace: Pace) -> list[tuple[Request, int, bool]]:
        if self.lingering:
            self.lingering = []
        if not self._flying or self._flying[0] is not plan:
            return []
        self._flying.popleft()
        ended = self._settle(pace, plan.together - len(plan.left))
        if ended:
            pace.last_tokens(self, ended)
        if not plan.left:
            return []
        left = [request for _, request in sorted(plan.left, key=_place)]
        for request in left:
            request.sequences[0].placeholders -= 1
        return [(request, 1, True) for request in left]

    def _compose(self, number: int) -> None:
        """A step of so many members, who have their slots, begins now."""
        self._context_tokens += number
        self._composed += 1
        self._composed_ns = self.now_ns
        self.together_steps += 1

    def _settle(self, pace: Pace, number: int) -> list[Request]:
        """So many members have their token of the next step to be settled; answers who has got its
        last one: they leave, or linger."""
        if self._settled in self._newcomers:
            self._count_gaps(number, self._settled)
        elif number:
            self.token_gaps_ns.add(self.now_ns - self._token_ns, number)
        self._settled += 1
        self._token_ns = self.now_ns
        if self._settled not in self._ends:
            return []
        ended = self._due(self._settled)
        self._part(pace, ended)
        return ended

    def _due(self, step: int) -> list[Request]:
        """Whose last token is that of a step."""
        members = self._members
        due = self._ends.pop(step, ())
        return [request for request in due if request in members and members[request].last == step]

    def _part(self, pace: Pace, ended: list[Request]) -> None:
        """They have got their last token."""
        if pace.lingers:
            self.lingering = ended
        else:
            for request in ended:
                self._leave(request)

    def has_more(self, request: Request) -> bool:
        return request in self._members and request not in self.lingering

    def look_at(self, request: Request) -> None:
        if request in self._members:
            self._extract(request)

    def length(self, request: Request) -> int:
        length = request.sequences[0].length
        member = self._members.get(request)
        return length if member is None else length + max(0, self._settled - member.joined)

    def dissolve(self) -> None:
        if self._members:
            everybody = list(self._members)
            for request in everybody:
                self._extract(request)
            self.behind.extendleft(reversed(everybody))
            self.dissolutions += 1

    # -- parts of a step -------------------------------------------------------------------------

    def _seat(self) -> None:
        """Let those sit down whose last token is being sampled."""
        for request in self._ends.get(self._composed, ()):
            member = self._members.get(request)
            if member and member.last == self._composed and request not in self._sitting:
                del self._phases[(member.joined - member.filled) % self._size][request]
                self._context_tokens -= member.known + self._composed - member.joined
                self._sitting[request] = None

    def _recruit(self, pace: Pace) -> None:
        """Take in the requests behind that only decode, up to the first that does not."""
        behind = self.behind
        while behind:
            request = behind[0]
            tokens = pace.decodes(request)
            if not tokens:
                return
            behind.popleft()
            self._join(request, request.sequences[0], tokens)

    def _join(self, request: Request, sequence: Sequence, tokens: int, apart: bool = True) -> None:
        """Take a running request in, which produces so many more tokens.

        `apart`: whether it did not get its last one with the others.
        """
        step, filled = self._composed, sequence.filled
        known, last = sequence.length + sequence.placeholders, step + tokens
        self._members[request] = Member(self._places, step, last, filled, known)
        self._places += 1
        self._phases[(step - filled) % self._size][request] = None
        ends = self._ends.get(last)
        if ends is None:
            ends = self._ends[last] = {}
            heappush(self._next_ends, last)
        ends[request] = None
        self._context_tokens += known
        if apart:
            newcomers = self._newcomers.get(step)
            if newcomers is None:
                newcomers = self._newcomers[step] = {}
            newcomers[request] = None

    def _make_room(
        self, give_way: GiveWay | None, spare: bool, leave: GiveWay | None = None
    ) -> bool:
        """See that every member can grow; False where that is to be done one by one, or none is
        left.

        Going through the running requests one by one, as the engines do, preempts the same: the
        tail gives way as long as somebody before it lacks a block. `leave` is how it leaves the
        cohort: by `_extract`, unless nobody looks at its table.
        """
        members, gpu = self._members, self.blocks.gpu
        opening = self._phases[self._composed % self._size]
        self._given = 0
        while members:
            free, need = gpu.free, len(opening) - self._given
            if need < free:
                return True
            last = next(reversed(members))
            if need == free and (not spare or last in opening):
                return True
            if give_way is None or self.blocks.lockstep == NAMED:
                self.dissolve()
                return False
            # The first to open blocks get what is free; whoever finds nothing makes the tail go.
            if free:
                self.blocks.lend_together(free)
                self._given += free
            if self.behind:
                last = self.behind.pop()
            else:
                (leave or self._extract)(last)
            give_way(last)
        return False

    def _grow(self, pace: Pace, number: int) -> None:
        """Slots for one more token of each member that takes part."""
        opening = self._phases[self._composed % self._size]
        blocks = self.blocks
        if blocks.lockstep == COUNTED:
            blocks.open_together(len(opening), number, self._given)
            return
        filling = self._phases[(self._composed + 1) % self._size]
        visited = list(opening or filling)
        if opening and filling:
            both = {**opening, **filling}
            visited = sorted(both, key=lambda request: self._members[request].place)
        for request in visited:
            self._visit(pace, request)
        blocks.empty_slots -= number - len(visited)

    def _visit(self, pace: Pace, request: Request) -> None:
        """Let the scheduler grow one member by its own rules; its fields are true meanwhile."""
        sequence, member = request.sequences[0], self._members[request]
        steps = self._composed - member.joined
        settled = max(0, self._settled - member.joined)
        before = sequence.length, sequence.placeholders, sequence.computed
        sequence.length += settled
        sequence.placeholders += steps - settled
        sequence.computed += steps if pace.counts_composed else settled
        sequence.filled = member.filled + steps
        pace.grow_one(self, request)
        sequence.length, sequence.placeholders, sequence.computed = before

    def _count_gaps(self, number: int, step: int) -> None:
        """Book the time since the token before for each member that got one."""
        gaps, now_ns = self.token_gaps_ns, self.now_ns
        if step in self._newcomers:
            for request in self._newcomers.pop(step):
                member = self._members.get(request)
                if member is not None and member.joined == step:
                    number -= 1
                    gaps.add(now_ns - request.sequences[0].last_token_ns)
        if number:
            gaps.add(now_ns - self._token_ns, number)

    # -- leaving ---------------------------------------------------------------------------------

    def _extract(self, request: Request) -> None:
        """Bring a member up to date and let it leave."""
        self._leave(request)
        self.blocks.recount(request.sequences[0])

    def _leave(self, request: Request) -> None:
        """The same of one that is about to give its blocks back: its table may be behind."""
        place, joined, last, filled, known = self._members.pop(request)
        composed = self._composed
        if request in self._sitting:
            del self._sitting[request]
            composed = last
        else:
            del self._phases[(joined - filled) % self._size][request]
            self._context_tokens -= known + composed - joined
        steps = composed - joined
        settled = max(0, min(self._settled, composed) - joined) if self._flying else steps
        sequence = request.sequences[0]
        sequence.length += settled
        sequence.computed += steps if self._counts_composed else settled
        sequence.filled = filled + steps
        if steps:
            sequence.access_ns = self._composed_ns
        if settled:
            request.output_tokens += settled
            sequence.last_token_ns = self._token_ns
        if steps > settled:
            sequence.placeholders += steps - settled
            first = max(self._settled, joined) - self._settled
            for number in range(first, first + steps - settled):
                self._flying[number].left.append((place, request))


def _place(left: tuple[int, Request]) -> int:
    return left[0]
