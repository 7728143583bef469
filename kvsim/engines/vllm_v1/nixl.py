"""The prefill/decode split of vLLM V1: `NixlConnector`, where the decode side pulls.

The prefill side keeps the blocks of a prompt that is done until the other side has read them. The
decode side allocates blocks for the whole prompt, pulls what it has not cached, and then computes
the last token again. vLLM 0.33.0 `distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`.
"""

from __future__ import annotations

from kvsim.core.plan import Plan
from kvsim.core.request import DECODE, PREFILL, Request
from kvsim.engines.vllm_v1.connector import Connector, Done, Job, Match, Reported, Transfers
from kvsim.engines.vllm_v1.groups import Group, Sliding
from kvsim.engines.vllm_v1.manager import KVCacheManager


class Nixl(Connector):
    """Pulls prompts from another engine, and keeps prompts for it."""

    def __init__(self, blocks: KVCacheManager, kv_role: str = "kv_both") -> None:
        self._blocks = blocks
        self.loads = kv_role != "kv_producer"
        self.delivers = kv_role != "kv_consumer"
        self._pulled: set[Request] = set()
        """Requests whose pull has begun. It is not repeated after a preemption."""
        self._pulls: list[Job] = []
        self._sends: list[Request] = []

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> Match:
        tokens = request.input_length - computed
        if self._pulls_still(request) and tokens > 0:
            return Match(tokens, asynchronous=True)
        return Match()

    def update_state_after_alloc(self, request: Request, local: int, match: Match) -> None:
        if not self._pulls_still(request):
            return
        self._pulled.add(request)
        targets: list[list[int]] = []
        if match.tokens:
            tables = self._blocks.tables(request)
            for group, table in zip(self._blocks.groups, tables, strict=True):
                new = [block for block in table if block and not self._blocks.has_key(block)]
                targets.append(_still_there(group, new))
        self._note(request, targets, match.tokens > 0)

    def build_connector_meta(self, plan: Plan) -> Transfers:
        pulls, self._pulls = self._pulls, []
        sends, self._sends = self._sends, []
        return Transfers(pulls, [], [], sends)

    def request_finished(self, request: Request) -> bool:
        if self._pulls_still(request):
            # The other engine is told that its blocks are not needed.
            self._note(request, [], False)
            return False
        self._pulled.discard(request)
        # With a reason, it was given up, and nobody will read its blocks.
        if request.options.kv_transfer != PREFILL or request.reason:
            return False
        held = any(self._blocks.tables(request))
        if held:
            self._sends.append(request)
        return held

    def update_connector_output(self, done: Done) -> Reported:
        return Reported(done.loads, done.stores)

    def _pulls_still(self, request: Request) -> bool:
        return request.options.kv_transfer == DECODE and request not in self._pulled

    def _note(self, request: Request, targets: list[list[int]], awaited: bool) -> None:
        self._pulls.append(Job(len(self._pulls), request, targets, None, awaited))


def _still_there(group: Group, blocks: list[int]) -> list[int]:
    """Returns the blocks that the other engine still has: of a window, only its last ones."""
    if isinstance(group, Sliding):
        return blocks[-(-(-group.window // group.block_size) + 1) :]
    return blocks
