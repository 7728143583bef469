"""Many runs: which settings to try, each combination once, and which of them is best.

In go a configuration and what may vary in it (`parse_space`). Runs are planned in a folder
(`make_plan`), and gathered from it; out come a ranking (`choose`), a table and a page.
"""

from kvsim.search.sweep.grid import expand, parse_space
from kvsim.search.sweep.page import PAGE, Side, build_page, origin_panels, side, tags
from kvsim.search.sweep.sweep import (
    MANIFEST,
    TABLE,
    Chosen,
    Configuration,
    Outcome,
    Plan,
    choose,
    chosen_record,
    gather,
    joined,
    make_plan,
    manifest,
    merge,
    read_plan,
    shard_of,
    sources,
    table_bytes,
    value_words,
    write_plan,
)
