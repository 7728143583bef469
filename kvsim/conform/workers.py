"""Workers of recorded cases, whose transfers take a number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvsim.engines.vllm_v1_features.connector import Connector, Worker
from kvsim.engines.vllm_v1_features.plan import FeaturePlan
from kvsim.engines.vllm_v1_features.scheduler import VllmV1Features
from kvsim.engines.vllm_v1_features.tables import FullTables

CONNECTORS: dict[str, Callable[[Mapping[str, Any], FullTables], tuple[Connector, Worker]]] = {}
"""Connector → what builds it and its worker for a case."""


class Reporter:
    """Writes down transfers, as the logs of a connector do."""

    def __init__(self, name: str, scheduler: VllmV1Features) -> None:
        self._name = name

    def handed_over(self, plan: FeaturePlan) -> dict[str, Any]:
        """What a step hands to the worker."""
        return {}

    def reported(self) -> list[Any]:
        """The transfers of which the last result said that they are over."""
        return []
