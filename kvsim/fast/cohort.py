"""Decoding in lockstep: a batch whose leading decodes cost the same however many they are.

```
 running order    a   b   c   d   e ‖ p   q            ‖ ends the cohort: p is still in its prompt
                  └─── cohort ───┘   └ others ┘

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

A request that leaves the cohort (it ends, it is preempted, somebody asks for `Batch.running`) is
brought up to date; then it is as if it had been looked at one by one all the time. With steps in
flight, some of its tokens are still to come: those plans list it in `left`. Whoever reads a field
of a member's sequence meanwhile finds it true: it is worked out then (`MemberSequence`).

Two kinds of block managers go along (`Tables.lockstep`). Where blocks are counted and not named,
a step takes a number of blocks; content that nobody can look for is noted when a member leaves.
Where they are named, members that open or fill a block in a step
are visited in running order, and the scheduler lets them grow by its own rules. So it is where one
of them fills a block that others may look for, if that moves further blocks (`Tables.label_moves`).

A batch without a cohort looks at every request in every step. It is the twin: the same decisions,
times and figures.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heappush

from kvsim.engine.batch import Batch, Endings, Entry, GiveWay
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request, Sequence
from kvsim.engine.scheduler import Scheduler
from kvsim.engine.tables import NAMED
from kvsim.fast.member import LAST_TOKEN_NS, Member, MemberSequence


class Cohort:
    """The leading running requests of a batch that only decode, looked at together."""

    def __init__(self, batch: Batch, scheduler: Scheduler, endings: Endings) -> None:
        self.batch = batch
        self._scheduler = scheduler
        self._endings = endings
        self.blocks = batch.blocks
        self.size = batch.blocks.block_size
        """Tokens per block."""
        self.counts_composed = scheduler.counts_composed
        self.lingers = scheduler.lingers
        self.ahead = scheduler.in_flight > 1
        """Whether a step is composed before the tokens of the step before are known."""
        self.requests: dict[Request, Member] = {}
        """The members, in running order."""
        self.sitting: dict[Request, None] = {}
        """Members whose last token is being sampled: they take part in no further step."""
        self.lingering: list[Request] = []
        """Members that got their last token in the step settled last, where the scheduler finds
        that out one step later."""
        self.phases: list[dict[Request, int]] = [{} for _ in range(self.size)]
        """Step modulo block size → members that open a block in it, in running order, and their
        places in that order."""
        self.awaited: set[Request] = set()
        """Members whose blocks others may look for as soon as they fill (`Tables.awaited`)."""
        self.ends: dict[int, dict[Request, None]] = {}
        """Steps settled → members whose last token exists by then; some may have left since."""
        self.next_ends: list[int] = []
        """Heap of the keys of `_ends`, and of some that are gone."""
        self._newcomers: dict[int, dict[Request, None]] = {}
        """Step → members for which it is the first, and which got their last token apart from the
        others; some may have left since."""
        self.flying: deque[Plan] = deque()
        """Plans with steps of the cohort that are not settled, in order."""
        self.composed = 0
        self.settled = 0
        """Steps of the cohort."""
        self.context_tokens = 0
        """Sum of the lengths of the members that are not sitting, the next token included."""
        self.ranks: list[int] | None = None
        """Lengths less steps composed of the members that are not sitting, ascending; None: nobody
        asks for lengths (`rank`)."""
        self.settled_then = 0
        """Steps settled when the last one was composed."""
        self.composed_ns = 0
        self.token_ns = 0
        """When the last step was composed, and when the last one settled had its tokens."""
        self._places = 0
        self.given = 0
        """Blocks of the step being composed that were given out before somebody made room."""
        self.grown = 0
        """Members that have slots for the step being composed, and are not in its plan yet."""
        self._parted: list[Request] = []
        """Members that left meanwhile."""
        self.together_steps = 0
        """Steps that the cohort took part in."""
        self.dissolutions = 0
        """Times that all of it had to be looked at one by one."""

    @property
    def number(self) -> int:
        """Members."""
        return len(self.requests)

    def __contains__(self, request: Request) -> bool:
        return request in self.requests

    # -- a step of the cohort --------------------------------------------------------------------

    def decode(self, give_way: GiveWay | None, spare: bool) -> int:
        """Slots for one more token of each member (`Batch.decode_together`)."""
        assert not (self.grown or self._parted), "run_together was forgotten"
        if self.ahead:
            self.seat()
        self.recruit()
        if not self.requests or not self.make_room(give_way, spare):
            return 0
        number = len(self.requests) - len(self.sitting)
        if not number:
            return 0
        self.grow(number)
        self.grown = number
        return number

    def run(self) -> None:
        """Put the members that have grown into the plan (`Batch.run_together`)."""
        batch, number = self.batch, self.grown
        for request in self._parted:
            self._scheduler.run_one(batch, request)
        self._parted, self.grown = [], 0
        if number:
            plan = batch.plan
            plan.run_together(number, self.members, self.lengths)
            plan.decode_seqs += number
            plan.context_tokens += self.context_tokens
            self.compose(number)
            self.flying.append(plan)

    def settle(self, plan: Plan) -> list[Entry]:
        """The tokens of a step exist (`Batch.settle_together`)."""
        if self.lingering:
            self.lingering = []
        if not self.flying or self.flying[0] is not plan:
            return []
        self.flying.popleft()
        ended = self.book(plan.together - len(plan.left))
        if ended:
            self._scheduler.last_tokens(self.batch, ended)
        if not plan.left:
            return []
        left = [request for _, request in sorted(plan.left, key=_place)]
        return [(request, 1, True) for request in left]

    def members(self) -> list[Request]:
        """Those that take part in the step being composed, in running order."""
        if not self.sitting:
            return list(self.requests)
        return [request for request in self.requests if request not in self.sitting]

    def lengths(self) -> list[int]:
        """The lengths of `members` in the step composed last, its token included."""
        step, members = self.composed - 1, self.requests
        return [
            members[request].known - members[request].joined + step for request in self.members()
        ]

    def rank(self) -> None:
        """From now on, `longest` is asked for; there are no members yet."""
        self.ranks = []

    def longest(self, number: int, step: int) -> list[int]:
        """The first of `lengths` in descending order, in a step before which so many are composed,
        as long as nobody leaves."""
        ranks = self.ranks
        assert ranks is not None, "ask for rank first"
        return [rank + step for rank in ranks[: -number - 1 : -1]]

    def take_part(self, number: int, given: int = 0) -> None:
        """A step of so many members begins now, with slots for one more token of each of them.

        `given`: how many of the blocks that they open `make_room` gave them already.
        """
        if self.awaited or self.blocks.lockstep == NAMED:
            self.given = given
            self.grow(number)
        else:
            opening = len(self.phases[self.composed % self.size])
            self.blocks.open_together(opening, number, given)
        self.compose(number)

    def compose(self, number: int) -> None:
        """A step of so many members, who have their slots, begins now."""
        self.context_tokens += number
        self.composed += 1
        self.settled_then = self.settled
        self.composed_ns = self.batch.now_ns
        self.together_steps += 1

    def book(self, number: int) -> list[Request]:
        """Book the tokens of the oldest step that is not settled, for `number` members.

        Returns who has its last token now. They leave, unless they linger.
        """
        if self.settled in self._newcomers:
            self.count_gaps(number, self.settled)
        elif number:
            self.batch.token_gaps_ns.add(self.batch.now_ns - self.token_ns, number)
        self.batch.tokens += number
        self.settled += 1
        self.token_ns = self.batch.now_ns
        if self.settled not in self.ends:
            return []
        ended = self.due(self.settled)
        self.part(ended)
        return ended

    def due(self, step: int) -> list[Request]:
        """Members whose last token is that of a step."""
        members = self.requests
        due = self.ends.pop(step, ())
        return [request for request in due if request in members and members[request].last == step]

    def part(self, ended: list[Request]) -> None:
        """These members have their last token."""
        if self.lingers:
            self.lingering = ended
            return
        for request in ended:
            member = self.requests.pop(request)
            if request in self.sitting:
                del self.sitting[request]
            else:
                del self.phases[(member.joined - member.filled) % self.size][request]
                self.context_tokens -= member.known + self.composed - member.joined
                self._unrank(member)
            self._have_all(request, member, member.last - member.joined)

    def _have_all(self, request: Request, member: Member, filled: int) -> None:
        """A request that was a member has all its tokens, and as many more slots as it says."""
        sequence, tokens = request.sequences[0], member.last - member.joined
        sequence.__class__, sequence.member = Sequence, None
        if self.awaited:
            self.awaited.discard(request)
        sequence.length += tokens
        sequence.computed += tokens
        sequence.filled = member.filled + filled
        sequence.access_ns = self.composed_ns
        sequence.last_token_ns = self.token_ns

    def dissolve(self) -> None:
        """From now on, each member is looked at by itself, at the head of `Batch.others`."""
        if self.requests:
            everybody = list(self.requests)
            for request in everybody:
                self.part_with(request)
            self.batch.others.extendleft(reversed(everybody))
            self.dissolutions += 1

    # -- parts of a step -------------------------------------------------------------------------

    def seat(self) -> None:
        """Let those sit down whose last token is being sampled."""
        for request in self.ends.get(self.composed, ()):
            member = self.requests.get(request)
            if member and member.last == self.composed and request not in self.sitting:
                del self.phases[(member.joined - member.filled) % self.size][request]
                self.context_tokens -= member.known + self.composed - member.joined
                self._unrank(member)
                self.sitting[request] = None

    def recruit(self) -> None:
        """Take in the leading ones of `Batch.others` that only decode."""
        others, only_decodes = self.batch.others, self._scheduler.only_decodes
        while others:
            request = others[0]
            if not (only_decodes(request) and self.take_in(request, request.sequences[0])):
                return
            others.popleft()

    def take_in(self, request: Request, sequence: Sequence) -> bool:
        """Let a running request join that only decodes from the next step on; False, changing
        nothing, where its last token is in flight."""
        tokens = self._endings.left(sequence) - sequence.placeholders
        if tokens > 0:
            self.join(request, sequence, tokens)
        return tokens > 0

    def join(self, request: Request, sequence: Sequence, tokens: int, apart: bool = True) -> None:
        """Take a running request in, which produces so many more tokens.

        `apart`: whether it did not get its last one with the others.
        """
        step, filled, length = self.composed, sequence.filled, sequence.length
        known, last = length + sequence.placeholders, step + tokens
        member = Member(self, self._places, step, last, filled, length, known)
        self.requests[request] = sequence.member = member
        self._places += 1
        self.phases[(step - filled) % self.size][request] = member.place
        ends = self.ends.get(last)
        if ends is None:
            ends = self.ends[last] = {}
            heappush(self.next_ends, last)
        ends[request] = None
        self.context_tokens += known
        if self.ranks is not None:
            insort(self.ranks, known - step)
        if apart:
            self._newcomers.setdefault(step, {})[request] = None
        if self.blocks.awaited(sequence):
            self.awaited.add(request)
        sequence.__class__ = MemberSequence

    def make_room(
        self, give_way: GiveWay | None, spare: bool, leave: GiveWay | None = None
    ) -> bool:
        """See that every member can grow; False where that is to be done one by one, or no member
        is left. `leave` is how a member leaves: `part_with`, unless nobody looks at its table.

        Going through the running requests one by one, as the engines do, preempts the same: the
        tail gives way as long as somebody before it lacks a block.
        """
        members, gpu, others = self.requests, self.blocks.gpu, self.batch.others
        opening = self.phases[self.composed % self.size]
        self.given = 0
        while members:
            free, need = gpu.free, len(opening) - self.given
            if need < free:
                return True
            last = next(reversed(members))
            if need == free and (not spare or last in opening):
                return True
            if give_way is None or self._visits():
                self.dissolve()
                return False
            # The first to open blocks get what is free; whoever finds nothing makes the tail go.
            if free:
                self.blocks.lend_together(free)
                self.given += free
            if others:
                last = others.pop()
            else:
                (leave or self.part_with)(last)
            give_way(last)
        return False

    def grow(self, number: int) -> None:
        """Slots for one more token of each member that takes part."""
        opening = self.phases[self.composed % self.size]
        blocks = self.blocks
        if not self._visits():
            blocks.open_together(len(opening), number, self.given)
            if self.awaited:
                self.publish(self.composed, self.settled)
            return
        visited = self._at_edges(self.composed)
        for request in visited:
            self._visit(request)
        blocks.empty_slots -= number - len(visited)

    def _visits(self) -> bool:
        """Whether members that open or fill a block in the next step are looked at one by one, as
        it matters in which order they do."""
        blocks = self.blocks
        return blocks.lockstep == NAMED or (blocks.label_moves and self.publishes(self.composed))

    def publish(self, step: int, settled: int) -> None:
        """Members whose blocks others may look for fill or open one in a step, which was composed
        when so many were settled."""
        for request in self._at_edges(step):
            if request in self.awaited:
                known = _known(self.requests[request], step, settled)
                self.blocks.publish(request.sequences[0], known)

    def publish_all(self, first: int, last: int, in_flight: int) -> None:
        """`publish` for the steps `first .. last - 1`, each composed when so many before it were
        under way."""
        opening = {
            (m.joined - m.filled) % self.size for m in map(self.requests.__getitem__, self.awaited)
        }
        edges = opening | {(step - 1) % self.size for step in opening}
        for step in range(first, last):
            if step % self.size in edges:
                self.publish(step, step - in_flight)

    def publishes(self, step: int) -> bool:
        """Whether blocks that others may look for are opened or filled in a step."""
        return bool(self.awaited) and not self.awaited.isdisjoint(self._at_edges(step))

    def _at_edges(self, step: int) -> list[Request]:
        """Members that open or fill a block in a step, in running order."""
        opening, filling = self.phases[step % self.size], self.phases[(step + 1) % self.size]
        if not (opening and filling):
            return list(opening or filling)
        both = {**opening, **filling}
        return sorted(both, key=both.__getitem__)

    def _visit(self, request: Request) -> None:
        """Let the scheduler grow one member by its own rules; its fields are true meanwhile."""
        sequence, member = request.sequences[0], self.requests[request]
        steps = self.composed - member.joined
        settled = self.settled - member.joined
        if settled < 0:
            settled = 0
        sequence.__class__ = Sequence
        before = sequence.length, sequence.placeholders, sequence.computed
        sequence.length += settled
        sequence.placeholders += steps - settled
        sequence.computed += steps if self.counts_composed else settled
        sequence.filled = member.filled + steps
        self.blocks.recount(sequence, 0)
        self._scheduler.grow_one(self.batch, request)
        sequence.length, sequence.placeholders, sequence.computed = before
        sequence.__class__ = MemberSequence

    def count_gaps(self, number: int, step: int) -> None:
        """Book the time since the token before for each of `number` members that got one."""
        gaps, now_ns = self.batch.token_gaps_ns, self.batch.now_ns
        if step in self._newcomers:
            for request in self._newcomers.pop(step):
                member = self.requests.get(request)
                if member is not None and member.joined == step:
                    number -= 1
                    gaps.add(now_ns - LAST_TOKEN_NS.__get__(request.sequences[0]))
        if number:
            gaps.add(now_ns - self.token_ns, number)

    # -- leaving ---------------------------------------------------------------------------------

    def part_with(self, request: Request) -> None:
        """Bring a member up to date, its block table included, and let it leave."""
        member, sequence = self.requests[request], request.sequences[0]
        sits = request in self.sitting
        grown = self.grown and not sits
        composed, settled = member.last if sits else self.composed, self.settled_then
        if grown:
            composed, settled = composed + 1, self.settled
        known = _known(member, composed - 1, settled)
        self.leave(request)
        if grown:
            sequence.filled += 1
            self._parted.append(request)
            self.grown -= 1
        self.blocks.recount(sequence, known)

    def leave(self, request: Request) -> None:
        """Bring a member up to date, but for its block table, and let it leave: it is about to give
        its blocks back."""
        member = self.requests.pop(request)
        joined, composed, settled = member.joined, self.composed, self.settled
        sequence = request.sequences[0]
        sequence.__class__, sequence.member = Sequence, None
        if self.awaited:
            self.awaited.discard(request)
        if self.sitting and request in self.sitting:
            del self.sitting[request]
            composed = member.last
        else:
            del self.phases[(joined - member.filled) % self.size][request]
            self.context_tokens -= member.known + composed - joined
            self._unrank(member)
        if self.lingering and request in self.lingering:
            self.lingering.remove(request)
        steps = composed - joined
        sequence.filled = member.filled + steps
        if steps:
            sequence.access_ns = self.composed_ns
        settled = (settled if settled < composed else composed) - joined
        if settled > 0:
            sequence.length += settled
            sequence.last_token_ns = self.token_ns
        else:
            settled = 0
        sequence.computed += steps if self.counts_composed else settled
        if steps > settled:
            if self.ahead:
                sequence.placeholders += steps - settled
            first = max(self.settled, joined) - self.settled
            for number in range(first, first + steps - settled):
                self.flying[number].left.append((member.place, request))

    def farewell(self) -> list[Request]:
        """Those that linger end as a step begins, having taken part in it if it is one of the
        cohort; returns them."""
        parting = self.lingering
        for request in parting:
            member = self.requests.pop(request)
            steps = self.composed - member.joined
            del self.phases[(member.joined - member.filled) % self.size][request]
            self.context_tokens -= member.known + steps
            self._unrank(member)
            self._have_all(request, member, steps)
            self.batch.complete(request)
        self.lingering = []
        return parting

    def _unrank(self, member: Member) -> None:
        if self.ranks is not None:
            del self.ranks[bisect_left(self.ranks, member.known - member.joined)]


def _known(member: Member, step: int, settled: int) -> int:
    """A member's tokens that were known when a step was composed, with so many settled; 0: it took
    no part in it."""
    if step <= member.joined:
        return member.length if step == member.joined else 0
    # Whatever was in flight when it joined had its token by then.
    return member.known + max(0, settled - member.joined)


def _place(left: tuple[int, Request]) -> int:
    return left[0]
