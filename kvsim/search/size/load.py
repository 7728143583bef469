"""Makes the load that a search is about: longer, with prefixes that are assumed; and says what
differs from seed to seed."""

from __future__ import annotations

import msgspec

from kvsim.errors import ConfigError
from kvsim.fleet.settings import FleetConfig
from kvsim.run.assembly import assemble
from kvsim.search.replicates import Load, redrawn
from kvsim.search.size.knobs import open_arrivals
from kvsim.settings.config import RunConfig
from kvsim.workload.spec import assume_hit_rate
from kvsim.workload.trace import Trace, beginning

_AT_RANDOM = (
    "the turns of sessions are sent at random times like all requests; none waits for the one"
    " before it"
)

Made = tuple[Trace, RunConfig, list[str]]
"""A load, its configuration, and what to say of them."""


def endless(trace: Trace, config: RunConfig, find: str) -> Made:
    """The load of a search whose answer has to last, which will be made longer. With open arrivals,
    where there is a rate and no client waits."""
    notes, waits = list[str](), config.sessions == "closed" or config.max_concurrency is not None
    if find == "request_rate" or (config.request_rate is not None and not waits):
        if config.sessions == "auto" and any(row.after >= 0 for row in trace.rows):
            notes.append(_AT_RANDOM)
        config = open_arrivals(config)
    shorter = beginning(trace, config.num_prompts)
    return shorter, msgspec.structs.replace(config, num_prompts=None), notes


def sharing(trace: Trace, config: RunConfig, hit_rate: float, prefixes: int) -> Made:
    """The trace with assumed prefixes, and a configuration with the cache that they need."""
    if config.enable_prefix_caching is False:
        raise ConfigError("--hit-rate: prefix caching is off; leave out --no-enable-prefix-caching")
    config = msgspec.structs.replace(config, enable_prefix_caching=True)
    block_size = assemble(config).config.block_size
    assert block_size is not None
    shared = assume_hit_rate(trace, hit_rate, block_size, prefixes=prefixes, seed=config.seed)
    return shared, config, shared.notes[len(trace.notes) :]


def what_varies(trace: Trace, config: RunConfig, find: str) -> tuple[str, ...]:
    """What differs from seed to seed when a knob is searched."""
    if find == "request_rate":
        config = msgspec.structs.replace(config, request_rate=1.0)
    routed = ("the draws of the router",) if isinstance(config, FleetConfig) else ()
    return redrawn(Load(trace), [("", config)]) + routed
