"""A run lets go of its trace: only its columns stay."""

import gc

from kvsim.run.simulation import simulate
from kvsim.workload import Row, Trace


def test_a_result_keeps_no_row_of_its_trace() -> None:
    rows = [Row(i, f"let-go-{i}", i, 1000 * i, 40, 5) for i in range(9)]
    settings = {"num_gpu_blocks_override": 1000, "cost": {"model": "constant"}}
    result = simulate(Trace("x", "native", "", rows), settings)
    del rows
    gc.collect()
    kept = [each for each in gc.get_objects() if type(each) is Row]
    assert not [row for row in kept if row.id.startswith("let-go-")]
    assert list(result.requests["id"]) == [f"let-go-{i}" for i in range(9)]
