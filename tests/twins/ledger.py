"""The time ledger the dull way: a watcher that goes through every step and every request.

It knows nothing of transitions or sums. Each step's time is handed out to each request by what the
step's plan says about it, and its prices are those of the constant cost model.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvsim.core.batch import Batch
from kvsim.core.plan import RECOMPUTE, Plan
from kvsim.core.request import Request
from kvsim.core.schema import BLOCKED
from kvsim.workload import Trace

REASONS = dict(
    zip(
        BLOCKED[1:],
        ("slots", "prefills", "blocks", "watermark", "swap_ins", "preemptions", "loras"),
        strict=True,
    )
)


@dataclass
class Seen:
    """What one call of the scheduler decided."""

    now_ns: int
    computes: bool
    blocked: str
    prompts: dict[int, str]
    """Requests with prompt tokens → what those are: new, again or last."""
    decodes: set[int]
    first: set[int]
    """Of these, who has no token yet."""
    out: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


class LedgerTwin:
    """Watches a run, and hands its time out afterwards."""

    def begin(self) -> None:
        self.seen: list[Seen] = []

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        prompts = {}
        for request, scheduled, cached, before, samples, _ in plan.prefills:
            again = min(before + scheduled, request.lost_tokens) > before + cached
            kind = "again" if again or request.first_token_ns >= 0 else "new"
            prompts[request.index] = f"{kind} last" if samples else kind
        # A sample whose KV is computed again counts as a decode of several tokens.
        prompts |= {
            r.index: "again last"
            for r, tokens, _ in plan.entries
            if r in plan.decodes and tokens > 1
        }
        seen = Seen(
            now_ns,
            plan.computes,
            BLOCKED[plan.blocked],
            prompts,
            {request.index for request in plan.decodes},
            {request.index for request in plan.decodes if request.first_token_ns < 0},
        )
        for request, means in plan.preempted:
            (seen.lost if means == RECOMPUTE else seen.out).append(request.index)
        seen.back = [request.index for request in plan.swapped_in]
        if not plan.empty:
            self.seen.append(seen)

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        pass

    def hand_out(self, result: Any, in_flight: int, prices: dict[str, int]) -> list[Counter[str]]:
        """Nanoseconds by part, for each request."""
        return _HandOut(self.seen, result, in_flight, prices).run()


class _HandOut:
    def __init__(
        self, seen: list[Seen], result: Any, in_flight: int, prices: dict[str, int]
    ) -> None:
        self.requests, self.prices, self.in_flight = result.requests, prices, in_flight
        self.steps = [
            {name: int(column[i]) for name, column in result.steps.items()}
            for i in range(len(result.steps["start_ns"]))
        ]
        self.end_ns = max(
            [step["end_ns"] for step in self.steps]
            + [int(x) for name in ("finish_ns", "arrival_ns") for x in self.requests[name]]
        )
        self.seen = seen
        number = len(self.requests["id"])
        self.state = ["waiting"] * number
        self.parts: list[Counter[str]] = [Counter() for _ in range(number)]

    def run(self) -> list[Counter[str]]:
        computing = [i for i, s in enumerate(self.steps) if s["prefill_seqs"] + s["decode_seqs"]]
        others = [i for i in range(len(self.steps)) if i not in set(computing)]
        upto = min((s["start_ns"] for s in self.steps), default=self.end_ns)
        self.wait_before(0, upto)
        for seen in self.seen:
            if seen.computes:
                if not computing:  # cut off by the end of the run
                    break
                place = computing.pop(0)
            else:
                place = next((i for i in others if self.steps[i]["start_ns"] == seen.now_ns), -1)
                if place >= 0:
                    others.remove(place)
            self.change(seen)
            if place >= 0 and (seen.computes or self.in_flight == 1):
                self.step(seen, place)
            self.finish(seen)
        return self.parts

    def wait_before(self, since: int, upto: int) -> None:
        for i in range(len(self.parts)):
            begin, end = self.life(i)
            self.add(i, "waiting_step", max(begin, since), min(end, upto))

    def life(self, i: int) -> tuple[int, int]:
        arrival, finish = int(self.requests["arrival_ns"][i]), int(self.requests["finish_ns"][i])
        if arrival < 0:
            return 0, 0
        return arrival, finish if finish >= 0 else max(self.end_ns, arrival)

    def add(self, i: int, part: str, begin: int, end: int) -> None:
        if end > begin:
            self.parts[i][part] += end - begin

    def change(self, seen: Seen) -> None:
        for i in seen.lost:
            self.state[i] = "preempted"
        for i in seen.out:
            self.state[i] = "swapped"
        for i in seen.back:
            self.state[i] = "running"
        for i, kind in seen.prompts.items():
            if self.state[i] in ("waiting", "preempted"):
                self.state[i] = "recompute" if self.state[i] == "preempted" else "prefill"
            if self.state[i] == "recompute" and kind.startswith("new"):
                self.state[i] = "prefill"
        for i in seen.decodes - seen.prompts.keys():
            # A last token of a chunked prompt that looks like a decode, or the newest one.
            if self.state[i] == "recompute" and i not in seen.first:
                self.state[i] = "running"

    def finish(self, seen: Seen) -> None:
        for i, kind in seen.prompts.items():
            if kind.endswith("last"):
                self.state[i] = "running"
        for i in seen.decodes:
            self.state[i] = "running"

    def step(self, seen: Seen, place: int) -> None:
        step = self.steps[place]
        start, end = step["start_ns"], step["end_ns"]
        last = place + 1 == len(self.steps)
        until = self.end_ns if last else self.steps[place + 1]["start_ns"]
        for i, state in enumerate(self.state):
            arrival, life_end = self.life(i)
            begin = max(start, arrival)
            stop = min(until, life_end)
            if stop <= begin:
                continue
            if state == "waiting":
                late = arrival > start
                self.add(i, "waiting_step" if late else self.reason(seen), begin, stop)
            elif state == "preempted":
                self.add(i, "preempted_waiting", begin, stop)
            else:
                assert stop >= end, "who runs in a step ends with it at the earliest"
                self.run_through(i, state, seen, step)
                rest = "swapped_waiting" if state == "swapped" else "host_overhead"
                self.add(i, rest, end, stop)

    def reason(self, seen: Seen) -> str:
        if seen.blocked:
            return f"waiting_{REASONS[seen.blocked]}"
        chunk = seen.prompts and self.in_flight == 1
        return "waiting_prefills" if chunk else "waiting_step"

    def run_through(self, i: int, state: str, seen: Seen, step: dict[str, int]) -> None:
        parts, prices = self.parts[i], self.prices
        computing = step["end_ns"] - step["start_ns"] - step["transfer_ns"] - step["link_wait_ns"]
        blocks = max(step["swap_out_blocks"] + step["swap_in_blocks"], 1)
        out = step["transfer_ns"] * step["swap_out_blocks"] // blocks
        back = step["transfer_ns"] - out
        if state == "swapped":
            own = i in seen.out
            parts["swap_out"] += own * out
            parts["link_queue"] += own * step["link_wait_ns"]
            whole = step["end_ns"] - step["start_ns"]
            parts["swapped_waiting"] += whole - own * (out + step["link_wait_ns"])
            return
        own = i in seen.back
        parts["swap_in"] += own * back
        parts["swap_stall"] += out + back - own * back
        parts["link_queue"] += step["link_wait_ns"]
        host = min(prices["step"], computing)
        if state in ("prefill", "recompute") or self.in_prompt(i, step):
            name = "recompute" if state == "recompute" else "own_prefill"
            parts[name] += computing - host
            parts["host_overhead"] += host
        elif not step["decode_seqs"]:
            parts["interference"] += computing
        else:
            alone = step["decode_seqs"] * prices["seq"] + step["context_tokens"] * prices["context"]
            parts["own_decode"] += alone
            parts["interference"] += computing - host - alone
            parts["host_overhead"] += host

    def in_prompt(self, i: int, step: dict[str, int]) -> bool:
        """Whether it came back from the CPU before its prompt was complete."""
        first = int(self.requests["first_token_ns"][i])
        return first < 0 or first > step["start_ns"]


def assert_same(result: Any, trace: Trace, twin: list[Counter[str]]) -> None:
    """The ledger of a result and what the twin handed out."""
    from kvsim.results.ledger import TIME_PARTS

    for i, row in enumerate(trace.rows):
        found = {name.removesuffix("_ns"): int(result.requests[name][i]) for name in TIME_PARTS}
        expected = {name: twin[i][name] for name in found}
        assert found == expected, row.id
        assert set(twin[i]) <= set(found)
