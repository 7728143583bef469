"""Several replicas behind a router, or prefill and decode apart, in one simulation.

In go settings of the replicas and the name of a router. Out come a result for each replica, and
what the router's decisions cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsim.face import face_of

if TYPE_CHECKING:
    from kvsim.fleet.figures import find_bounds, summarise_fleet
    from kvsim.fleet.fleet import (
        EngineResult,
        contender,
        figures_of,
        simulate_contender,
        simulate_engine,
        simulate_fleet,
    )
    from kvsim.fleet.folder import FleetRun, fleet_run, read_fleet
    from kvsim.fleet.page import build_fleet, explain_fleets
    from kvsim.fleet.result import FleetResult
    from kvsim.fleet.routers import ROUTERS
    from kvsim.fleet.settings import FleetConfig, make_settings

__getattr__ = face_of(
    __name__,
    settings="FleetConfig make_settings",
    routers="ROUTERS",
    result="FleetResult",
    figures="find_bounds summarise_fleet",
    folder="FleetRun fleet_run read_fleet",
    fleet="EngineResult contender figures_of simulate_contender simulate_engine simulate_fleet",
    page="build_fleet explain_fleets",
)
