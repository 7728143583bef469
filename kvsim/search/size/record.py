"""What `size.json` holds: each search with its answer, and every value that was tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsim.fleet.settings import FleetConfig
from kvsim.results.plain import plain
from kvsim.search.size.answer import Search
from kvsim.search.size.verdict import cost_of, verdict
from kvsim.settings.config import to_table
from kvsim.version import __version__

NAME = "size.json"


def size_record(searches: Sequence[Search], price: float | None = None) -> dict[str, Any]:
    """Searches as plain values; `price`: of a GPU for an hour. Figures are means over the seeds."""
    lab = searches[0].lab
    record: dict[str, Any] = plain(
        {
            "kvsim_version": __version__,
            "find": lab.knob.key,
            "slo": lab.objectives.text,
            "seeds": list(lab.seeds),
            "searches": [_searched(search, price) for search in searches],
        }
    )
    return record


def _searched(search: Search, price: float | None) -> dict[str, Any]:
    lab, found = search
    base, cost = lab.base, None if price is None else cost_of(lab, found, price)
    return {
        "router": base.router if isinstance(base, FleetConfig) else None,
        "config": to_table(base),
        "trace": {
            "name": Path(lab.trace.path).name,
            "sha256": lab.trace.sha256,
            "requests": len(lab.trace.rows),
        },
        "value": found.value,
        "meets": found.meets,
        "longer_requests": found.held or None,
        "cost": None if cost is None else cost._asdict(),
        "verdict": [remark.text for remark in verdict(lab, found, price)],
        "tried": [
            {
                "value": value,
                "outcome": configuration.outcome,
                "seeds_met": configuration.met,
                "figures": configuration.figures,
            }
            for value, configuration in lab.ascending
        ],
    }
