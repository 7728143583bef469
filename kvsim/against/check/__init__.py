"""Replays a measured run, and says how far the prediction is off, and why.

In go a trace with measured times and the settings of its server. Out comes one record (`check`)
with the errors, where they come from, and what to correct first; rows and a page say and draw it.
"""

from kvsim.against.check.check import check
from kvsim.against.check.remarks import build_check, correction_rows, figure_rows, named, part_rows

__all__ = ["build_check", "check", "correction_rows", "figure_rows", "named", "part_rows"]
