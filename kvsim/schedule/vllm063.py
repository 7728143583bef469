"""The scheduler of vLLM 0.6.3.post1 (`core/scheduler.py`), to be read beside its source.

A step is prompts *or* decodes; with chunked prefill it is both, running requests first. Growth
needs a free block for every running sequence, even where its last block has room. The victim of
a shortage is the tail of the running queue: recomputed if it has one sequence, else swapped. The
watermark guards admissions and swap-ins, not growth. Prefix hits reduce neither the token budget
nor the admission need.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from kvsim.batch.batch import Batch
from kvsim.batch.pace import GiveWay
from kvsim.plan import Plan
from kvsim.recorder import BLOCKED
from kvsim.request import RUNNING, SWAPPED, WAITING, Request
from kvsim.schedule import vllm063_deaths as deaths
from kvsim.schedule.groups import by_priority, count, width
from kvsim.schedule.victims import tail
from kvsim.schedule.vllm063_entries import Admissions, Entries, by_stage, run
from kvsim.schedule.vllm063_outputs import process_outputs
from kvsim.schedule.vllm063_rules import Rules

SWAPPED_OUT = BLOCKED.index("swapped")


class Vllm063(Rules):
    """vLLM 0.6.3.post1 with synchronous output processing."""

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Decide what the next step does."""
        plan = batch.begin(now_ns)
        self._tokens = 0
        self._seqs = 0
        if self.chunked:
            self._compose_chunked(batch)
        else:
            self._compose_default(batch)
        plan.batched_tokens = self._tokens
        return batch.composed()

    def _compose_default(self, batch: Batch) -> None:
        self._seqs = batch.num_together + sum(map(width, batch.behind))
        prompts: Admissions = []
        if not batch.swapped:
            prompts = self._prompts(batch)
        elif batch.waiting:
            batch.plan.blocked = SWAPPED_OUT
        swapped_out: list[Request] = []
        victims: list[Request] = []
        decodes: Entries = []
        back: Entries = []
        if not prompts:
            if self.priority:
                self._preempt_by_priority(batch)
            decodes = self._running(batch, victims, swapped_out)
            if not (victims or swapped_out):
                back = self._swap_in(batch)
        self._give_up(batch, victims, swapped_out)
        for entries in (prompts, decodes, back):
            if entries:
                batch.behind.extend([entry[0] for entry in entries])
        run(batch, prompts, [*decodes, *back])

    def _compose_chunked(self, batch: Batch) -> None:
        swapped_out: list[Request] = []
        victims: list[Request] = []
        running = self._running(batch, victims, swapped_out)
        back: Entries = []
        if not (victims or swapped_out):
            back = self._swap_in(batch)
        infeasible = batch.plan.ignored
        batch.plan.ignored = []
        prompts = self._prompts(batch)
        batch.plan.ignored += infeasible
        self._give_up(batch, victims, swapped_out)
        running_prefills, running_decodes = by_stage(running)
        back_prefills, back_decodes = by_stage(back)
        if back:
            batch.lead(entry[0] for entry in (*back_decodes, *back_prefills))
        for entries in (running_decodes, running_prefills, prompts):
            if entries:
                batch.behind.extend([entry[0] for entry in entries])
        run(batch, prompts, [*running_prefills, *back_prefills, *running_decodes, *back_decodes])

    def _give_up(self, batch: Batch, victims: list[Request], swapped_out: list[Request]) -> None:
        """Queue up those who were preempted, in that order."""
        for victim in victims:
            self.requeue(batch.waiting, victim)
        batch.swapped.extend(swapped_out)

    def _prompts(self, batch: Batch) -> Admissions:
        """Admit from the head of the waiting queue until one is refused.

        `core/scheduler.py`, `_schedule_prefills`.
        """
        admitted: Admissions = []
        waiting, plan, blocks = batch.waiting, batch.plan, batch.blocks
        rule = blocks.hits_save
        while waiting:
            request = waiting[0]
            if count(request, WAITING) != 1:
                raise deaths.swapped_in_waiting(request)
            saved = self._saved(batch, request) if rule.charged else 0
            tokens = self._new_tokens(request, WAITING, self.chunked, saved)
            need = blocks.admission_need(request)
            reason = self.turns_away(blocks, saved + tokens, need)
            if reason:
                waiting.popleft()
                batch.ignore(request, reason)
                continue
            asked = tokens if rule.tested or self.chunked else saved + tokens
            if saved + tokens == 0:
                # Not even one token is left of the budget.
                asked = self.max_num_batched_tokens + 1
            plan.blocked = self._hindrance(batch, request, need, asked)
            if plan.blocked:
                request.blocked_steps += 1
                break
            batch.admit(request)
            admitted.append((request, saved + tokens, tokens))
            self._tokens += tokens
            self._seqs += width(request)
        return admitted

    def _running(
        self, batch: Batch, victims: list[Request], swapped_out: list[Request]
    ) -> list[tuple[Request, int]]:
        """Let running requests grow, those behind giving way where blocks run out."""
        scheduled: list[tuple[Request, int]] = []
        running = batch.behind
        self._begin_running(batch)
        if not self.priority:
            self._together(batch, victims, swapped_out)
        while running:
            request = running[0]
            tokens = self._new_tokens(request, RUNNING, self.chunked)
            if tokens == 0:
                break
            running.popleft()
            if self._stopped(batch, request):
                continue
            if not self._make_room(batch, request, victims, swapped_out):
                continue
            batch.grow(request)
            scheduled.append((request, tokens))
            self._tokens += tokens
            if self.chunked:
                self._seqs += width(request)
        return scheduled

    def _make_room(
        self, batch: Batch, request: Request, victims: list[Request], swapped_out: list[Request]
    ) -> bool:
        """Preempt until `request` can grow; False where it had to go itself."""
        blocks = batch.blocks
        while True:
            need = 0
            for sequence in request.sequences:
                if sequence.state == RUNNING:
                    need += blocks.growth_need(sequence)
            if need <= blocks.gpu.free:
                return True
            victim = request
            if batch.behind:
                victim = self.victim(batch.behind, blocks)
                batch.behind.remove(victim)
            self._give_way(batch, victim, victims, swapped_out)
            if victim is request:
                return False

    def _give_way(
        self, batch: Batch, victim: Request, victims: list[Request], swapped_out: list[Request]
    ) -> None:
        """Take the blocks of a victim, unless it turns out to have ended."""
        if not self._ended_meanwhile(batch, victim):
            means = self._preempt(batch, victim, batch.plan.swaps_out)
            (swapped_out if means == "swap" else victims).append(victim)

    def _together(self, batch: Batch, victims: list[Request], swapped_out: list[Request]) -> None:
        """The same, all at once, for the leading requests that only decode."""
        give_way: GiveWay | None = None
        if self.victim is tail:
            give_way = partial(self._give_way, batch, victims=victims, swapped_out=swapped_out)
        number = batch.decode_together(self, give_way, batch.blocks.spare_block)
        self._tokens += number
        if self.chunked:
            self._seqs += number

    def _swap_in(self, batch: Batch) -> list[tuple[Request, int]]:
        """Bring swapped requests back, in order, until one does not fit (`_schedule_swapped`)."""
        back: list[tuple[Request, int]] = []
        swapped, blocks = batch.swapped, batch.blocks
        while swapped:
            request = swapped[0]
            moving = [s for s in request.sequences if s.state == SWAPPED]
            need = blocks.swap_need(moving, blocks.gpu)
            if blocks.gpu.size < need:
                # Its CPU blocks stay taken for ever, as in the engine.
                swapped.popleft()
                batch.ignore(request, "outgrew-pool")
                continue
            if blocks.gpu.free - need < self.watermark_blocks:
                break
            tokens = self._new_tokens(request, SWAPPED, chunking=False)
            if tokens == 0 or not self._fits(tokens, width(request)):
                break
            batch.swap_in(request)
            batch.grow(request)
            back.append((request, tokens))
            self._tokens += tokens
            self._seqs += width(request)
        return back

    def _preempt_by_priority(self, batch: Batch) -> None:
        """Make the worst of the running give way to a better head of the waiting queue."""
        running = deque(sorted(batch.running, key=by_priority))
        waiting = batch.waiting
        if waiting:
            head = waiting.popleft()
            tokens = self._new_tokens(head, WAITING, chunking=False)
            while running and by_priority(running[-1]) > by_priority(head):
                need = batch.blocks.admission_need(head)
                if not self._never(batch, need) and not self._hindrance(batch, head, need, tokens):
                    break
                victim = running.pop()
                self._seqs -= width(victim)
                # The engine drops the block pairs of a victim swapped out here.
                self._preempt(batch, victim, [])
                waiting.appendleft(victim)
            waiting.appendleft(head)
            batch.waiting = deque(sorted(waiting, key=by_priority))
        batch.running = running

    # -- what asynchronous output processing does otherwise --------------------------------------

    def _begin_running(self, batch: Batch) -> None:
        """The running requests are about to be looked at."""

    def _stopped(self, batch: Batch, request: Request) -> bool:
        """Whether a running request is left out because it is about to end."""
        return False

    def _ended_meanwhile(self, batch: Batch, victim: Request) -> bool:
        """Whether a victim turns out to have ended already."""
        return False

    def overlap(self, batch: Batch, now_ns: int) -> None:
        """What the engine does while the model runs."""

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """The step's time has passed: tokens exist, samples fork, requests end."""
        batch.now_ns = now_ns
        batch.publish(plan)
        if process_outputs(batch, plan, self):
            batch.remove_ended()
