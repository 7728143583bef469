"""Constants of a machine, fitted to a run that was simulated with known ones."""

import json
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import long

from kvsim.against.fit import FEWEST, WARM_UP, fit_run, priced_by, with_constants
from kvsim.against.matched import Change, errors, matched, with_change
from kvsim.cli import main
from kvsim.cost.profile import Profile, load_profile, to_json
from kvsim.errors import ConfigError
from kvsim.results.statistics import durations_ns
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload import Trace, open_trace

PUBLIC = "rtx-pro-6000-server-llama-3.1-8b-public"
SETTINGS: dict[str, Any] = {"model": "llama-3.1-8b", "hardware": "rtx pro 6000"}
NUMBER, FIRST = 80, 50

Lengths = Callable[[int], tuple[int, int]]


def worst(errors: dict[str, float]) -> float:
    """The greatest absolute error."""
    return max(map(abs, errors.values()))


def chats(i: int) -> tuple[int, int]:
    """Short prompts, long outputs: a step with a prompt is little else."""
    return 40 + 37 * i % 160, 60 + 11 * i % 50


def documents(i: int) -> tuple[int, int]:
    """Long prompts of all sizes, short outputs."""
    return 500 + 977 * i % 3000, 20 + i % 15


def served(
    tmp_path: Path,
    profile: Profile,
    lengths: Lengths = chats,
    settings: dict[str, Any] = SETTINGS,
    start_ns: float = 0.0,
) -> Trace:
    """A run of a machine that `profile` describes: its requests and what was measured of them."""
    path, made = tmp_path / "served.jsonl", tmp_path / "true.json"
    made.write_text(to_json(profile))
    rows: list[dict[str, Any]] = [
        {"arrival_s": 0.31 * i + 0.007 * (i * i % 13)}
        | dict(zip(("input_length", "output_length"), lengths(i), strict=True))
        for i in range(NUMBER)
    ]
    _write(path, rows)
    cost = {**settings.get("cost", {}), "model": "table", "profile": str(made)}
    late = with_change(Change(start_ns=start_ns))
    result = simulate(path, {**settings, "cost": cost}, parts_of=late)
    found = durations_ns(result.requests)
    for row, ttft, e2el in zip(rows, found["ttft"] / 1e9, found["e2el"] / 1e9, strict=True):
        row["observed"] = {"ttft_s": float(ttft), "e2e_s": float(e2el)}
    _write(path, rows)
    return open_trace(str(path))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in [{"kvsim_trace": 1}, *rows]) + "\n")


def fitted(trace: Trace, first: int = FIRST) -> Profile:
    return fit_run(load_profile(PUBLIC), trace, make_config(SETTINGS), first)


@pytest.mark.parametrize(
    ("truth", "lengths"),
    [
        ({"prompt_step_us": 4000.0}, chats),
        pytest.param({"linear_factor": 1.05}, documents, marks=long),
    ],
)
def test_a_constant_is_found_again(
    tmp_path: Path, truth: dict[str, float], lengths: Lengths
) -> None:
    machine = with_constants(load_profile(PUBLIC), truth)
    found = fitted(served(tmp_path, machine, lengths)).fitted
    assert found["constants"] == pytest.approx(truth, rel=0.2)
    assert worst(found["error_percent"]) < 4 < 5 < worst(found["error_percent_before"])
    counts = (found["warm_up_requests"], found["fitted_requests"], found["judged_requests"])
    assert counts == (WARM_UP, FIRST - WARM_UP, NUMBER - FIRST)


def test_a_profile_that_meets_the_run_is_left_as_it_is(tmp_path: Path) -> None:
    profile = fitted(served(tmp_path, load_profile(PUBLIC)))
    assert profile.fitted["constants"] == {}
    assert set(profile.fitted["refused"]) == {"linear_factor", "step_us", "prompt_step_us"}
    assert profile.fit == load_profile(PUBLIC).fit


def test_the_price_of_the_front_end_is_no_constant_of_the_machine(tmp_path: Path) -> None:
    settings = {**SETTINGS, "cost": {"front_end": {"request_ms": 60.0}}}
    trace = served(tmp_path, load_profile(PUBLIC), settings=settings)
    found = fit_run(load_profile(PUBLIC), trace, make_config(settings), FIRST).fitted
    assert found["constants"] == {}
    assert worst(found["error_percent"]) < 0.01


def test_the_first_requests_of_a_cold_engine_are_not_fitted(tmp_path: Path) -> None:
    trace = served(tmp_path, load_profile(PUBLIC))
    for row in trace.rows[:WARM_UP]:
        assert row.observed is not None
        row.observed = {key: time + 5 for key, time in row.observed.items()}
    assert fitted(trace).fitted["constants"] == {}


@long
def test_a_late_start_of_an_overloaded_run_is_no_constant_of_the_machine(tmp_path: Path) -> None:
    """Everybody waits half a second longer for the kernels of the first step."""
    settings = {**SETTINGS, "max_num_seqs": 2}
    profile = load_profile(PUBLIC)
    trace = served(tmp_path, profile, settings=settings, start_ns=5e8)
    made = fit_run(profile, trace, make_config(settings), FIRST)
    found = made.fitted
    assert found["start_s"] == pytest.approx(0.5, abs=1e-6)
    assert found["constants"] == {} and made.fit == profile.fit
    assert worst(found["error_percent"]) < 0.01 < 1 < worst(found["error_percent_before"])


def test_an_early_first_token_is_no_late_start(tmp_path: Path) -> None:
    trace = served(tmp_path, load_profile(PUBLIC))
    assert trace.rows[0].observed is not None
    trace.rows[0].observed["ttft_s"] /= 2
    assert fitted(trace).fitted["start_s"] == 0


@long
def test_the_judged_part_is_not_seen(tmp_path: Path) -> None:
    """Other times of the rest change the judgement, and not the constants."""
    machine = with_constants(load_profile(PUBLIC), {"prompt_step_us": 4000.0})
    trace = served(tmp_path, machine)
    one = fitted(trace).fitted
    for row in trace.rows[FIRST:]:
        assert row.observed is not None
        row.observed = {key: 2 * time for key, time in row.observed.items()}
    two = fitted(trace).fitted
    assert one["constants"] == two["constants"]
    assert worst(two["error_percent"]) > 40


def test_too_short_and_repeated_fits_are_refused(tmp_path: Path) -> None:
    trace = served(tmp_path, load_profile(PUBLIC))
    with pytest.raises(ConfigError, match=f"at least {FEWEST} of each"):
        fitted(trace, NUMBER - FEWEST + 1)
    with pytest.raises(ConfigError, match="were fitted before"):
        fit_run(fitted(trace), trace, make_config(SETTINGS), FIRST)
    for row in trace.rows:
        row.observed = None
    with pytest.raises(ConfigError, match="no request has measured times"):
        fitted(trace)


def test_errors_are_of_the_statistics(tmp_path: Path) -> None:
    trace = served(tmp_path, load_profile(PUBLIC))
    pairs = matched(trace, simulate(trace, priced_by(PUBLIC, make_config(SETTINGS))))
    slower = {kind: 1.1 * seconds for kind, seconds in pairs.measured_s.items()}
    found = errors(pairs._replace(predicted_s=slower), np.arange(5, 30))
    assert len(found) == 12
    assert list(found.values()) == pytest.approx([log(1.1)] * 12)


@long
def test_a_check_fits_first_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = with_constants(load_profile(PUBLIC), {"prompt_step_us": 4000.0})
    path, out = served(tmp_path, machine).path, tmp_path / "fitted.json"
    arguments = ["check", path, "--model", "llama-3.1-8b", "--hardware", "rtx pro 6000"]
    arguments += ["--no-corrections", "--json"]

    def worst_of(*further: str) -> float:
        with pytest.raises(SystemExit) as caught:
            main([*arguments, *further])
        assert not caught.value.code
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        return float(record["worst_error"])

    before = worst_of()
    assert worst_of("--fit", str(out), "--fit-first", str(FIRST)) < 0.5 * before
    assert set(load_profile(str(out)).fitted["constants"]) == {"prompt_step_us"}
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--cost-model", "roofline", "--fit", str(out)])
    assert caught.value.code == 2
    assert "give one with --set cost.profile=FILE" in capsys.readouterr().err


@long
def test_the_command_writes_a_profile_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = with_constants(load_profile(PUBLIC), {"prompt_step_us": 4000.0})
    path, out = served(tmp_path, machine).path, tmp_path / "fitted.json"
    arguments = ["profile", "fit-run", PUBLIC, "--run", path, "--first", str(FIRST)]
    arguments += ["--model", "llama-3.1-8b", "--hardware", "rtx pro 6000", "--out", str(out)]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert not caught.value.code
    shown = capsys.readouterr().out
    assert "prompt_step_us" in shown
    assert "does not show it" in shown
    cost = {"model": "table", "profile": str(out)}
    source = simulate(path, {**SETTINGS, "cost": cost}).summary["meta"]["cost"]["source"]
    assert f"fitted to the first {FIRST} requests of served.jsonl" in source
