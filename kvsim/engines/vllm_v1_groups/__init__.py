"""KV cache groups: block tables of models whose layers do not all keep the same of a sequence.

```
  layers   sliding 5x  full  sliding 5x  full ...      a group: layers with equal rules
             │          │
  tables   [0|0|7|3]  [4|9|2|1]                        one table for each group and sequence
             └────┬─────┘
  pool      blocks of equal size, of any group
```

A kind of group is one class in one file. `KINDS` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvsim.engines.vllm_v1_groups.chunked import Chunked
from kvsim.engines.vllm_v1_groups.full import Full
from kvsim.engines.vllm_v1_groups.group import Group
from kvsim.engines.vllm_v1_groups.mamba import Mamba
from kvsim.engines.vllm_v1_groups.sliding import Sliding

KINDS = Full | Sliding | Chunked | Mamba
"""The kinds of groups, by their `type` in a configuration."""


def groups_of(tables: Sequence[dict[str, Any]]) -> tuple[Group, ...]:
    """Returns the groups that a configuration describes. Raises `ValueError` where it is not
    understood."""
    return tuple(msgspec.convert(table, KINDS) for table in tables)
