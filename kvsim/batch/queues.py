"""The queues of a replica, and who of the running is looked at together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvsim import transitions
from kvsim.batch.pace import GiveWay, Pace
from kvsim.blocks.tables import Tables
from kvsim.plan import Plan
from kvsim.request import FINISHED, RUNNING, SWAPPED, Request
from kvsim.tally import Tally


class Queues:
    """All requests of one replica that have arrived and not ended.

    Those that are running are in order in `behind`, unless a cohort of them is looked at together
    (`kvsim.batch.lockstep`): it goes before them.
    """

    def __init__(self, blocks: Tables) -> None:
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.behind: deque[Request] = deque()
        """Running requests that are looked at one by one: here all of them, in order."""
        self.swapped: deque[Request] = deque()
        self.ended: list[Request] = []
        """Requests that ended since the replica last looked, in order."""
        self.aside: list[Request] = []
        """Requests that an engine keeps out of its queues for a step, with their blocks."""
        self.lost: list[Request] = []
        """Requests that ended without giving their blocks back."""
        self.lingering: list[Request] = []
        """Of those that decode together, who got its last token in the step settled last, where
        the scheduler finds that out later (`Pace.lingers`)."""
        self.token_gaps_ns = Tally()
        """Time between consecutive tokens of a sequence → how often it occurred."""
        self.transitions = transitions.Transitions()
        self.busy_until_ns = 0
        """When the last step dispatched ends: one composed before begins only then."""
        self.plan = Plan()
        self.now_ns = 0

    def __len__(self) -> int:
        return len(self.waiting) + self.num_running + len(self.swapped)

    # -- who is running --------------------------------------------------------------------------

    @property
    def running(self) -> deque[Request]:
        """All running requests in order, with every field up to date."""
        self.dissolve()
        return self.behind

    @running.setter
    def running(self, requests: deque[Request]) -> None:
        self.dissolve()
        self.behind = requests

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self.behind) + self.num_together

    @property
    def num_together(self) -> int:
        """Running requests before those in `behind`, which are looked at together."""
        return 0

    def dissolve(self) -> None:
        """From now on, look at every running request one by one."""

    def lead(self, requests: Iterable[Request]) -> None:
        """Put requests at the head of the running queue, in this order."""
        leading = list(requests)
        if leading:
            self.running.extendleft(reversed(leading))

    def has_more(self, request: Request) -> bool:
        """Whether a request decodes together with others and has not got its last token yet."""
        return False

    def look_at(self, request: Request) -> None:
        """From now on, look at this request by itself; its fields are up to date."""

    def length(self, request: Request) -> int:
        """Known tokens of a request of one sequence."""
        return request.sequences[0].length

    def decode_together(self, pace: Pace, give_way: GiveWay | None, spare: bool) -> int:
        """One token for each of the leading running requests, all at once; answers how many.

        `give_way` is told of each victim, which has left the running queue: always its tail; None:
        victims are chosen otherwise. `spare`: whether a request whose last block has room is
        taken to need a free block, too. 0: it is to be done one by one, as the scheduler states
        its rules. `kvsim.batch.lockstep` may answer more.
        """
        return 0

    def settle_together(self, plan: Plan, pace: Pace) -> list[tuple[Request, int, bool]]:
        """The tokens of `decode_together` exist, and are booked; who has its last one is told.

        Answers the entries (as `Plan.entries`) of requests that have left the cohort meanwhile, in
        running order: their tokens are to be booked one by one.
        """
        return []

    def shortcuts(self) -> dict[str, int]:
        """How often requests were looked at together; none here."""
        return {}

    def remove_ended(self) -> None:
        """Take requests that ended off the running queue, keeping the order."""
        self.behind = deque(request for request in self.behind if request.finish_ns < 0)

    # ------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Assert that queues, states, tables and pools agree."""
        queues = (self.waiting, self.running, self.swapped, self.aside, self.lost)
        everywhere = [request for queue in queues for request in queue]
        assert len(set(everywhere)) == len(everywhere), "a request is in two queues"
        for queue, state in ((self.running, RUNNING), (self.swapped, SWAPPED)):
            for request in queue:
                assert all(s.state in (state, FINISHED) for s in request.sequences)
        self.blocks.audit(everywhere)
