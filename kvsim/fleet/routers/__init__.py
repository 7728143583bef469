"""Routers: which replica gets a request, decided as the real routers decide.

A new router is a class in this folder and a line in `ROUTERS`; a user's own is named
`package.module:Class`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.errors import ConfigError
from kvsim.fleet.routers import llm_d, plain, production_stack, sglang
from kvsim.fleet.routers.dynamo import DynamoKv
from kvsim.fleet.routers.router import Router
from kvsim.fleet.routers.vllm_dp import DataParallel
from kvsim.settings.library import construct

ROUTERS: Mapping[str, type[Router]] = {
    "random": plain.Uniform,
    "round-robin": plain.RoundRobin,
    "least-loaded": plain.LeastLoaded,
    "power-of-two": plain.PowerOfTwo,
    "session-affinity": plain.SessionAffinity,
    "bounded-hash": plain.BoundedHash,
    "dynamo-kv": DynamoKv,
    "sglang-cache_aware": sglang.CacheAware,
    "sglang-round_robin": sglang.RoundRobin,
    "sglang-random": sglang.Uniform,
    "sglang-power_of_two": sglang.PowerOfTwo,
    "production-stack-roundrobin": production_stack.RoundRobin,
    "production-stack-session": production_stack.Session,
    "production-stack-prefixaware": production_stack.PrefixAware,
    "llm-d-default": llm_d.Default,
    "llm-d-precise": llm_d.Precise,
    "vllm-dp": DataParallel,
}
"""Name of a router → its class. Real routers have the name of the project and of their policy."""


def make_router(
    name: str, args: Mapping[str, Any], workers: Sequence[str], *, seed: int = 0, block_size: int
) -> Router:
    """Returns the router of this name, with a user's arguments. Raises `ConfigError`."""
    router = construct(
        "router", ROUTERS, name, args, workers=workers, seed=seed, block_size=block_size
    )
    if not isinstance(router, Router):
        raise ConfigError(
            f"router: {name} is not a router; make it a subclass of"
            " kvsim.fleet.routers.router.Router"
        )
    for key, least in _TIMES.items():
        if (time_ns := getattr(router, key)) is not None and time_ns < least:
            raise ConfigError(f"router: {name}: {key} is {time_ns}; give {least} or more")
    return router


_TIMES = {"scrape_ns": 1, "tick_ns": 1, "scrape_delay_ns": 0, "event_delay_ns": 0}
"""Attribute of a router → its least value in nanoseconds."""
