"""Offers results as pandas data frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvsim.report import tables

if TYPE_CHECKING:
    import pandas as pd


def requests_frame(requests: Mapping[str, Any]) -> pd.DataFrame:
    """One row per request, with the columns of `requests.parquet`; missing: it never happened."""
    frame: pd.DataFrame = tables.requests_table(requests).to_pandas()
    return frame


def steps_frame(steps: Mapping[str, Any]) -> pd.DataFrame:
    """One row per step, with the columns of `steps.parquet`."""
    frame: pd.DataFrame = tables.steps_table(steps).to_pandas()
    return frame
