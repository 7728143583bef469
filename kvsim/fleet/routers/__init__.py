"""Routers: which replica gets a request, decided as the real routers decide.

A new router is a class in this folder and a line in `ROUTERS`; a user's own is named
`package.module:Class`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.errors import ConfigError
from kvsim.fleet.routers import llm_d, router, sglang, vllm
from kvsim.fleet.routers.dynamo import DynamoKv
from kvsim.fleet.routers.router import Router
from kvsim.settings.library import construct

ROUTERS: Mapping[str, type[Router]] = {
    "random": router.Uniform,
    "round-robin": router.RoundRobin,
    "least-loaded": router.LeastLoaded,
    "power-of-two": router.PowerOfTwo,
    "session-affinity": router.SessionAffinity,
    "bounded-hash": router.BoundedHash,
    "dynamo-kv": DynamoKv,
    "sglang-cache_aware": sglang.CacheAware,
    "sglang-round_robin": router.RoundRobin,
    "sglang-random": router.Uniform,
    # Without token loads from a monitor, 0.3.2 counts the requests of no worker, and all are equal.
    "sglang-power_of_two": router.Uniform,
    "production-stack-roundrobin": vllm.RoundRobin,
    "production-stack-session": vllm.Session,
    "production-stack-prefixaware": vllm.PrefixAware,
    "llm-d-default": llm_d.Default,
    "llm-d-precise": llm_d.Precise,
    "vllm-dp": vllm.DataParallel,
}
"""Name of a router → its class. Real routers have the name of the project and of their policy."""


def make_router(
    name: str, args: Mapping[str, Any], workers: Sequence[str], *, seed: int = 0, block_size: int
) -> Router:
    """Returns the router of this name, with a user's arguments. Raises `ConfigError`."""
    made = construct(
        "router", ROUTERS, name, args, workers=workers, seed=seed, block_size=block_size
    )
    if not isinstance(made, Router):
        raise ConfigError(
            f"router: {name} is not a router; make it a subclass of"
            " kvsim.fleet.routers.router.Router"
        )
    for key, least in _TIMES.items():
        if (time_ns := getattr(made, key)) is not None and time_ns < least:
            raise ConfigError(f"router: {name}: {key} is {time_ns}; give {least} or more")
    return made


_TIMES = {"scrape_ns": 1, "tick_ns": 1, "scrape_delay_ns": 0, "event_delay_ns": 0}
"""Attribute of a router → its least value in nanoseconds."""
