"""Superseded within its session: the cache described in a comment on SGLang #24656.

    PYTHONPATH=docs/examples/agents kvsim run --workload agentx --model qwen3-30b-a3b-2507 \
        --hardware h200 --block-size 64 --set block_manager_args.eviction=superseded:Superseded

Once prompt M of a session is computed, what only prompt M - 1 had is worth nothing; nor is anything
of an agent that has ended. There is no TTL and no prediction: sessions and ends are enough.
"""

from typing import Any

from kvsim.policies.sessions import SessionOrder, Use


class Superseded(SessionOrder):
    """What nobody will ask for again first; the rest by last use."""

    def worth(self, use: Use) -> Any:
        ended = use.request is not None and "release" in use.request.extra
        return 0 if ended or self.superseded(use) else 1
