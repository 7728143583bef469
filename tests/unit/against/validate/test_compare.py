"""What is known of the recorded times must come out as errors, and nothing else."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from small import PROFILE, recording, write_profile, write_trace

from kvsim.against.validate.errors import (
    COUNTS,
    LATENCIES,
    SIDES,
    STATISTICS,
    compare,
    with_profile,
)
from kvsim.against.validate.setup import RUNS
from kvsim.errors import ConfigError


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("world")
    return write_trace(folder), write_profile(folder)


@pytest.fixture(scope="module")
def exact(world: tuple[Path, Path]) -> dict[str, Any]:
    """An engine that takes exactly what the profile says."""
    return compare(recording(*world, lambda: 1.0), str(world[1]))


def test_an_engine_that_is_its_profile_has_no_error(exact: dict[str, Any]) -> None:
    for policy in exact["policies"]:
        assert policy["steps"]["count"] > 50
        for part in (policy["steps"]["all"], policy["copies"] or policy["steps"]["all"]):
            for judged in ("prediction", "noise"):
                assert set(part[judged].values()) == {0.0}
        for kind in LATENCIES:
            for statistic in STATISTICS:
                figures = policy["requests"][kind][statistic]
                assert figures["real"] == figures["repeat"] == figures["simulated"] > 0
                assert figures["error"] == figures["noise"] == 0
        for sides in policy["counts"].values():
            assert len(set(sides.values())) == 1


def test_the_world_has_pressure(exact: dict[str, Any]) -> None:
    recompute, swap, prefix = (policy["counts"] for policy in exact["policies"])
    assert recompute["preemptions"]["real"] > 0 and recompute["recomputed_tokens"]["real"] > 0
    assert swap["swapped_out_blocks"]["real"] == swap["swapped_in_blocks"]["real"] > 0
    assert prefix["hit_tokens"]["real"] > 0


def test_a_constant_factor_is_the_error_of_every_step(world: tuple[Path, Path]) -> None:
    result = compare(recording(*world, lambda: 1.25, policies=("swap",)), str(world[1]))
    [policy] = result["policies"]
    for part in (policy["steps"]["all"], policy["copies"]):
        for key in ("median", "p95", "max"):
            assert part["prediction"][key] == pytest.approx(0.2, abs=1e-4)
        assert part["prediction"]["total"] == pytest.approx(-0.2, abs=1e-4)
        assert set(part["noise"].values()) == {0.0}
    tpot = policy["requests"]["tpot"]["mean"]
    assert tpot["error"] == tpot["simulated"] / tpot["real"] - 1 < 0
    assert tpot["noise"] == 0


def test_noise_is_what_two_measurements_differ_by(world: tuple[Path, Path]) -> None:
    up_and_down = cycle((0.9, 1.1))
    made = recording(
        *world, lambda: 1.0, lambda: 1.5, lambda: next(up_and_down), policies=("recompute",)
    )
    [policy] = compare(made, str(world[1]))["policies"]
    steps = policy["steps"]["all"]
    assert set(steps["prediction"].values()) == {0.0}
    assert steps["noise"]["median"] == pytest.approx(0.1, abs=1e-3)
    assert abs(steps["noise"]["total"]) < 0.02
    assert policy["requests"]["e2el"]["mean"]["noise"] > 0.4
    assert policy["requests"]["e2el"]["mean"]["error"] == 0


def test_kinds_of_steps_make_up_all_of_them(exact: dict[str, Any]) -> None:
    for policy in exact["policies"]:
        steps = policy["steps"]
        parts = [steps[kind] for kind in ("decode", "prefill", "mixed") if kind in steps]
        assert sum(part["count"] for part in parts) == steps["all"]["count"] == steps["count"]
        assert sum(part["share_of_time"] for part in parts) == pytest.approx(1)
        assert len(policy["points"]["kind"]) == steps["count"]


def test_chunks_and_decodes_are_a_kind_of_their_own(world: tuple[Path, Path]) -> None:
    made = recording(*world, lambda: 1.0, policies=("chunked-prefill",), max_num_batched_tokens=64)
    [policy] = compare(made, str(world[1]))["policies"]
    assert policy["steps"]["mixed"]["count"] > 0
    assert set(policy["steps"]["all"]["prediction"].values()) == {0.0}


def test_keys_have_a_fixed_order_and_equal_inputs_give_equal_results(
    exact: dict[str, Any], world: tuple[Path, Path]
) -> None:
    again = compare(recording(*world, lambda: 1.0), str(world[1]))
    assert str(again) == str(exact)
    assert list(exact)[:2] == ["schema", "kvsim_version"]
    assert [list(policy["counts"]) for policy in exact["policies"]] == [list(COUNTS)] * 3
    assert all(tuple(each) == SIDES for each in exact["policies"][0]["counts"].values())


def test_a_recording_that_was_tampered_with_is_noticed(world: tuple[Path, Path]) -> None:
    made = recording(*world, lambda: 1.0, policies=("recompute",))
    for run in RUNS[:2]:
        original = list(made["policies"][0][run]["step_ns"])
        for changed in ([*original, 5], original[:-1], [original[0] + 1_000, *original[1:]]):
            made["policies"][0][run]["step_ns"] = changed
            with pytest.raises(ConfigError, match="does not lead to its own schedule"):
                compare(made, str(world[1]))
        made["policies"][0][run]["step_ns"] = original


def test_another_trace_is_refused(world: tuple[Path, Path], tmp_path: Path) -> None:
    made = recording(*world, lambda: 1.0, policies=("recompute",))
    made["setup"]["trace"]["path"] = str(write_trace(tmp_path, requests=9))
    with pytest.raises(ConfigError, match=r"trace\.jsonl: not the trace that was recorded"):
        compare(made, str(world[1]))


def test_a_profile_of_another_model_is_refused(world: tuple[Path, Path]) -> None:
    made = recording(*world, lambda: 1.0, policies=("recompute",))
    made["model"] = {**made["model"], "dtype": "float16"}
    with pytest.raises(ConfigError, match="model: dtype is float32, the recording's is float16"):
        compare(made, str(world[1]))


def test_the_link_of_a_profile_is_the_mean_of_both_directions() -> None:
    settings, engine = {"model": "tiny", "cost": {}}, PROFILE["engine"]
    swap = {"cross": {"d2h": [10.0, 4.0], "h2d": [20.0, 6.0], "both": [9.0, 9.0]}}
    config = with_profile(settings, "p", engine, swap)
    assert config.cost["link"] == {"block_us": 5.0, "call_us": 15.0}
    own = {"model": "tiny", "cost": {"link": {"block_us": 1.0}}}
    assert with_profile(own, "p", engine, swap).cost["link"] == {"block_us": 1.0}
    assert "link" not in with_profile(settings, "p", engine, {"layer": swap["cross"]}).cost


def test_steps_are_priced_for_the_kernel_that_ran() -> None:
    engine = {**PROFILE["engine"], "decode_kernel": "decode_v1"}
    config = with_profile({"model": "tiny", "cost": {"model": "roofline"}}, "p", engine, {})
    assert config.cost == {"model": "table", "profile": "p", "decode_kernel": "v1"}
