"""The least or the most of one setting that keeps objectives: blocks, memory, replicas, a rate.

In go a load, a configuration, objectives and a knob (`make_knob`). Values are tried until the
answer has no untried neighbour (`searched`); out come a verdict, rows around the answer, a page.
"""

from kvsim.search.size.search import (
    LASTING,
    Answer,
    Bounds,
    Laboratory,
    Search,
    endless,
    make_knob,
    neighbourhood,
    searched,
    sharing,
    what_varies,
)
from kvsim.search.size.verdict import (
    HEAD,
    NAME,
    PAGE,
    build_page,
    compared,
    router_head,
    router_of,
    router_rows,
    row,
    size_record,
    verdict,
)
