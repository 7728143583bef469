"""Results for people: words, terminals, pages, notebooks, and tracks for trace viewers.

In go tables and figures (`kvsim.results`) and explanations (`kvsim.explain`). Out come sentences,
rows, and HTML files that need no other file and no network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsim.face import face_of

if TYPE_CHECKING:
    from kvsim.report.compare import (
        Explanation,
        Named,
        Row,
        change_words,
        compare_table,
        explain,
        value_words,
    )
    from kvsim.report.files import (
        PAGE,
        is_fleet,
        read_block_map,
        read_results,
        read_transitions,
        write_results,
    )
    from kvsim.report.screen import make_console, make_table, print_remarks
    from kvsim.report.terminal import render, render_comparison, render_fleet
    from kvsim.report.wording import (
        Remark,
        diagnosis_of,
        finished,
        measured,
        outcome_title,
        time_source,
        verdict,
    )

__getattr__ = face_of(
    __name__,
    screen="make_console make_table print_remarks",
    wording="Remark diagnosis_of finished measured outcome_title time_source verdict",
    files="PAGE is_fleet read_block_map read_results read_transitions write_results",
    terminal="render render_comparison render_fleet",
    compare="Explanation Named Row change_words compare_table explain value_words",
)
