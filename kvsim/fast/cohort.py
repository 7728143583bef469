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

Every member gets one token in each step, so lengths, slots and contexts all grow by one. Only two
events need attention: a member opens a block, which depends on its length modulo the block size, or
it ends. Both are filed under the step in which they are due.

A request that leaves the cohort (it ends, it is preempted, a policy reads `Batch.running`) is
brought up to date, as if it had been handled one by one all along. If steps are in flight, some of
its tokens are still to come: their plans list it in `left`. Fields of a member's sequence are
computed when they are read, so they are always current (`MemberSequence`).

A cohort works with two kinds of block managers (`Tables.lockstep`). If blocks are only counted, a
step takes a number of blocks, and content that no other request can look up is noted when a member
leaves. If blocks have ids, members that open or fill one are visited in running order, and the
scheduler grows them by its own rules. The same is done if a member fills a block that others may
look up and that can move another block (`Tables.label_moves`).

A batch without a cohort handles every request in every step. It is the exact twin: it makes the
same decisions, with the same times and figures.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heappush
from sys import maxsize

from kvsim.engine.batch import Batch, Endings, Entry, GiveWay
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request, Sequence
from kvsim.engine.scheduler import Scheduler
from kvsim.engine.tables import NAMED
from kvsim.fast.member import LAST_TOKEN_NS, Member, MemberSequence


class Cohort:
    """The leading running requests of a batch that only decode, handled as a group."""

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
        """Whether a step is composed before the tokens of the previous step are known."""
        self.most = maxsize
        """Most requests that decode in one step. Those behind them sit it out."""
        self.requests: dict[Request, Member] = {}
        """The members, in running order."""
        self.sitting: dict[Request, None] = {}
        """Members whose last token is in flight. They take part in no further step."""
        self.lingering: list[Request] = []
        """Members with their last token that the scheduler ends one step later."""
        self.phases: list[dict[Request, int]] = [{} for _ in range(self.size)]
        """Step modulo block size → members that open a block in it, with their places."""
        self.awaited: set[Request] = set()
        """Members whose blocks others may look up once they are full (`Tables.awaited`)."""
        self.ends: dict[int, dict[Request, None]] = {}
        """Settled steps → members with their last token by then."""
        self.next_ends: list[int] = []
        """Heap of the keys of `ends`, and of some that are gone."""
        self._newcomers: dict[int, dict[Request, None]] = {}
        """Step → members that join with it and whose previous token came at a time of their own.
        Some may have left since."""
        self.flying: deque[Plan] = deque()
        """Plans with cohort steps that are not settled, in order."""
        self.composed = 0
        self.settled = 0
        """Number of cohort steps settled so far."""
        self.context_tokens = 0
        """Sum of the lengths of the members that still take part, including the next token."""
        self.ranks: list[int] | None = None
        """Lengths minus composed steps of the members that still take part, ascending. None unless
        lengths are needed (`rank`)."""
        self.settled_then = 0
        """Number of steps that were settled when the last one was composed."""
        self.composed_ns = 0
        self.token_ns = 0
        """When the last step was composed, and when the last settled one produced its tokens."""
        self._places = 0
        self.given = 0
        """Blocks taken for the step being composed before a request was preempted to make room."""
        self.grown = 0
        """Number of members with slots for the step being composed, but not yet in its plan."""
        self._parted: list[Request] = []
        """Members that left after they got these slots."""
        self.together_steps = 0
        """Number of steps that the cohort took part in."""
        self.dissolutions = 0
        """Number of times that the whole cohort was dissolved."""

    @property
    def number(self) -> int:
        """Number of members."""
        return len(self.requests)

    def __contains__(self, request: Request) -> bool:
        return request in self.requests

    # -- a step of the cohort --------------------------------------------------------------------

    def decode(self, give_way: GiveWay | None, spare: bool, most: int) -> int:
        """Gives each member slots for one more token (`Batch.decode_together`)."""
        assert not (self.grown or self._parted), "run_together was forgotten"
        if self.ahead:
            self.seat()
        self.most = most
        if len(self.requests) - len(self.sitting) > most:
            self.dissolve()
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
        """Puts the members that have slots into the plan (`Batch.run_together`)."""
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
        """Books the tokens of a step (`Batch.settle_together`)."""
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
        """Returns the members that take part in the step being composed, in running order."""
        if not self.sitting:
            return list(self.requests)
        return [request for request in self.requests if request not in self.sitting]

    def lengths(self) -> list[int]:
        """Returns the lengths of `members` in the step composed last, including its token."""
        step, members = self.composed - 1, self.requests
        return [
            members[request].known - members[request].joined + step for request in self.members()
        ]

    def rank(self) -> None:
        """Keeps lengths sorted from now on, for `longest`. Called before any member joins."""
        self.ranks = []

    def longest(self, number: int, step: int) -> list[int]:
        """Returns the `number` greatest lengths, in descending order, of the step that follows
        `step` composed ones. It assumes that no member leaves until then."""
        ranks = self.ranks
        assert ranks is not None, "ask for rank first"
        return [rank + step for rank in ranks[: -number - 1 : -1]]

    def take_part(self, number: int, given: int = 0) -> None:
        """Starts a step of `number` members and gives each a slot for one more token.

        `given` is the number of blocks that `make_room` already took for them.
        """
        if self.awaited:
            self.given = given
            self.grow(number)
        else:
            opening = len(self.phases[self.composed % self.size])
            self.blocks.open_together(opening, number, given)
        self.compose(number)

    def compose(self, number: int) -> None:
        """Starts a step of `number` members that already have their slots."""
        self.context_tokens += number
        self.composed += 1
        self.settled_then = self.settled
        self.composed_ns = self.batch.now_ns
        self.together_steps += 1

    def book(self, number: int) -> list[Request]:
        """Books the tokens of the oldest unsettled step for `number` members.

        Returns the members that have their last token now. They leave, unless the engine lets them
        linger.
        """
        batch, settled = self.batch, self.settled
        now_ns = batch.now_ns
        if settled in self._newcomers:
            self.count_gaps(number, settled)
        elif number:
            batch.token_gaps_ns.add(now_ns - self.token_ns, number)
        batch.tokens += number
        self.settled = settled = settled + 1
        self.token_ns = now_ns
        if settled not in self.ends:
            return []
        ended = self.due(settled)
        self.part(ended)
        return ended

    def due(self, step: int) -> list[Request]:
        """Removes and returns the members whose last token is that of `step`."""
        return list(self.ends.pop(step, ()))

    def part(self, ended: list[Request]) -> None:
        """Removes members that have their last token, or marks them as lingering."""
        if self.lingers:
            self.lingering = ended
            return
        sitting = self.sitting
        for request in ended:
            member = self.requests.pop(request)
            if request in sitting:
                del sitting[request]
            else:
                self._sit_out(request, member, self.composed)
            self._have_all(request, member, member.last - member.joined)

    def _have_all(self, request: Request, member: Member, filled: int) -> None:
        """Brings a former member with all its tokens, and `filled` more slots, up to date."""
        sequence, tokens = request.sequences[0], member.last - member.joined
        sequence.__class__, sequence.member = Sequence, None
        if self.awaited:
            self.awaited.discard(request)
        sequence.length += tokens
        sequence.computed += tokens
        sequence.filled = member.filled + filled
        sequence.access_ns = self.composed_ns
        sequence.last_token_ns = self.token_ns

    def _sit_out(self, request: Request, member: Member, composed: int) -> None:
        """Lets a member take part in no further step, after `composed` of them."""
        del self.phases[(member.joined - member.filled) % self.size][request]
        self.context_tokens -= member.known + composed - member.joined
        if self.ranks is not None:
            del self.ranks[bisect_left(self.ranks, member.known - member.joined)]

    def dissolve(self) -> None:
        """Dissolves the cohort. Its members move to the head of `Batch.others`."""
        if self.requests:
            everybody = list(self.requests)
            for request in everybody:
                self.part_with(request)
            self.batch.others.extendleft(reversed(everybody))
            self.dissolutions += 1

    # -- parts of a step -------------------------------------------------------------------------

    def seat(self) -> None:
        """Marks members whose last token is in flight as sitting."""
        composed = self.composed
        for request in self.ends.get(composed, ()):
            if request not in self.sitting:
                self.sitting[request] = None
                self._sit_out(request, self.requests[request], composed)

    def recruit(self) -> None:
        """Takes in the leading requests of `Batch.others` that only decode, `most` at most."""
        others, only_decodes = self.batch.others, self._scheduler.only_decodes
        while others and len(self.requests) - len(self.sitting) < self.most:
            request = others[0]
            if not (only_decodes(request) and self.take_in(request, request.sequences[0])):
                return
            others.popleft()

    def take_in(self, request: Request, sequence: Sequence, apart: bool = True) -> bool:
        """Lets a running request join that only decodes from the next step on. Returns False, and
        changes nothing, if its last token is already in flight. See `join` for `apart`."""
        tokens = self._endings.left(sequence) - sequence.placeholders
        if tokens > 0:
            self.join(request, sequence, tokens, apart)
        return tokens > 0

    def join(self, request: Request, sequence: Sequence, tokens: int, apart: bool = True) -> None:
        """Adds a running request that will produce `tokens` more tokens.

        `apart` is False if it gets the token before these together with the other members.
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
        """Makes sure that every member can grow. Returns False if members must grow one by one, or
        if none is left. `leave` removes a member; without it, `part_with` also updates its table.

        The outcome equals that of the engines, which go through the running requests one by one:
        the tail is preempted as long as a request before it lacks a block.
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
            if give_way is None or self.visits():
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
        """Gives each participating member a slot for one more token."""
        opening = self.phases[self.composed % self.size]
        blocks = self.blocks
        if not self.visits():
            blocks.open_together(len(opening), number, self.given)
            if self.awaited:
                self.publish(self.composed, self.settled)
            return
        visited = self._at_edges(self.composed)
        for request in visited:
            self._visit(request)
        blocks.empty_slots -= number - len(visited)

    def visits(self) -> bool:
        """Whether the order matters in which members open or fill a block in the next step."""
        blocks = self.blocks
        return blocks.lockstep == NAMED or (blocks.label_moves and self.publishes(self.composed))

    def publish(self, step: int, settled: int) -> None:
        """Publishes blocks of awaited members that open or fill one in `step`, which was composed
        when `settled` steps were settled."""
        for request in self._at_edges(step):
            if request in self.awaited:
                known = _known(self.requests[request], step, settled)
                self.blocks.publish(request.sequences[0], known)

    def publish_all(self, first: int, last: int, in_flight: int) -> None:
        """Calls `publish` for the steps `first .. last - 1`, each composed with `in_flight` steps
        in flight before it."""
        opening = {
            (m.joined - m.filled) % self.size for m in map(self.requests.__getitem__, self.awaited)
        }
        edges = opening | {(step - 1) % self.size for step in opening}
        for step in range(first, last):
            if step % self.size in edges:
                self.publish(step, step - in_flight)

    def publishes(self, step: int) -> bool:
        """Whether a member whose blocks can be looked up opens or fills one in a step."""
        return bool(self.awaited) and not self.awaited.isdisjoint(self._at_edges(step))

    def _at_edges(self, step: int) -> list[Request]:
        """Returns the members that open or fill a block in a step, in running order."""
        opening, filling = self.phases[step % self.size], self.phases[(step + 1) % self.size]
        if not (opening and filling):
            return list(opening or filling)
        both = {**opening, **filling}
        return sorted(both, key=both.__getitem__)

    def _visit(self, request: Request) -> None:
        """Brings a member's fields up to date and lets the scheduler grow it by its own rules."""
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
        """Records the time since the previous token for each of `number` members that got one."""
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
        """Removes a member and brings it up to date, including its block table."""
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
        """Removes a member and brings it up to date, except for its block table, because its blocks
        are freed next."""
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
            self._sit_out(request, member, composed)
        if self.lingering and request in self.lingering:
            self.lingering.remove(request)
        elif member.last > self.settled:
            del self.ends[member.last][request]
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
        """Ends the lingering members at the beginning of a step, and returns them. If it is a step
        of the cohort, they have taken part in it."""
        parting = self.lingering
        for request in parting:
            member = self.requests.pop(request)
            self._sit_out(request, member, self.composed)
            self._have_all(request, member, self.composed - member.joined)
            self.batch.complete(request)
        self.lingering = []
        return parting


def _known(member: Member, step: int, settled: int) -> int:
    """Returns the number of tokens of a member that were known when `step` was composed with
    `settled` steps settled; 0 if it took no part in it."""
    if step <= member.joined:
        return member.length if step == member.joined else 0
    # Whatever was in flight when it joined had its token by then.
    return member.known + max(0, settled - member.joined)


def _place(left: tuple[int, Request]) -> int:
    return left[0]
