"""A policy of a user's own that misbehaves ends a command in one line that names it."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command import run_here
from places import ROOT

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.engines.vllm_063.blocks import Naive
from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.engines.vllm_v1.scheduler import VllmV1Async
from kvsim.errors import PolicyError
from kvsim.fleet.routers.router import Choice, Router
from kvsim.policies.order import Order
from kvsim.run.simulation import simulate

SHORT = ["--trace", "chat", "--num-prompts", "30", "--max-model-len", "2048"]
SHORT += ["--num-gpu-blocks-override", "150"]
SETTINGS = {"num_prompts": 30, "num_gpu_blocks_override": 150, "max_model_len": 2048}


class Error(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError


def raising(error: BaseException) -> Callable[..., Any]:
    """A method that raises."""

    def method(*args: Any, **kwargs: Any) -> Any:
        raise error

    return method


def returning(value: Any) -> Callable[..., Any]:
    """A method that returns always the same."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return value

    return method


def engine(compose: Callable[..., Any], **more: Any) -> type:
    return type("Engine", (VllmV1Async,), {"compose": compose, **more})


def between(act: Callable[[Any, Any], Any]) -> type:
    """An engine that does something between running requests and admissions."""

    def before_admissions(self: Any, batch: Batch, now_ns: int) -> None:
        if batch.running:
            act(self, batch)

    return type("Engine", (VllmV1Async,), {"before_admissions": before_admissions})


class Unnamed(VllmV1Async):
    """Its constructor names few settings."""

    def __init__(self, *, blocks: Any, max_model_len: int, max_num_seqs: int) -> None:
        raise AssertionError


def usual(self: Any, batch: Batch, now_ns: int) -> Plan:
    return VllmV1Async.compose(self, batch, now_ns)


ENGINES = {
    "Raises": (engine(raising(KeyError("boom"))), "KeyError: 'boom' (test_policies.py:"),
    "Exits": (engine(raising(SystemExit(7))), "SystemExit: 7"),
    "Overflows": (engine(raising(OverflowError("mine"))), "OverflowError: mine"),
    "Opens": (engine(raising(FileNotFoundError(2, "none", "f"))), "FileNotFoundError"),
    "Odd": (engine(raising(Error())), "exception str() failed"),
    "Nothing": (engine(returning(None)), "compose returned None; return the plan that"),
    "Keeps": (engine(usual, arrive=returning(None)), "arrive left out <Request 0"),
    "Nobody": (
        engine(usual, choose_victim=returning(None)),
        "choose_victim returned None; return one of batch.running",
    ),
    "Refuses": (engine(usual, __init__=raising(ValueError("not now"))), "Refuses: not now"),
    "Writes": (
        between(lambda self, batch: setattr(batch.running[0], "length", 1)),
        "Request.length is kept by kvsim, and no policy sets it; your notes on a request go to"
        " request.extra (test_policies.py:",
    ),
    "Asks": (
        between(lambda self, batch: batch.ending(batch.running[0])),
        "Batch.ending is for kvsim alone: no policy reads or calls it (test_policies.py:",
    ),
    "Peeks": (
        between(lambda self, batch: batch.plan.places),
        "Plan.places is for kvsim alone: no policy reads or calls it (test_policies.py:",
    ),
    "Sorts": (
        between(lambda self, batch: batch.running.sort()),  # type: ignore[arg-type]
        "'ReadOnlyList' object has no attribute 'sort' (test_policies.py:",
    ),
    "Invents": (
        between(lambda self, batch: setattr(batch, "waiting", [*batch.waiting, *batch.running])),
        "do not wait",
    ),
    "Manages": (KVCacheManager, "is a block manager, for --block-manager; make it a subclass of"),
    "Gauges": (type("G", (VllmV1Async,), {"gauged": ("none",)}), "may have broken a rule"),
    "Remarks": (type("R", (VllmV1Async,), {"remarks": returning(None)}), "may have broken"),
}
globals().update({name: kind for name, (kind, _) in ENGINES.items()})


def cost(step_ns: Callable[..., Any], **more: Any) -> type:
    figures = {"kind": "constant", "source": "mine", "describe": returning({})}
    return type("Cost", (), {**figures, "step_ns": step_ns, "__module__": __name__, **more})


COSTS = {
    **{
        name: (cost(returning(ns)), f"priced a step at {ns!r}; return whole nanoseconds")
        for name, ns in (("Below", -5), ("Half", 0.5), ("Never", float("nan")), ("No", None))
    },
    "Fails": (cost(raising(KeyError("x"))), "KeyError: 'x' (test_policies.py:"),
    "Silent": (cost(returning(5), describe=returning(None)), "may have broken a rule"),
    "Strange": (cost(returning(5), describe=returning({"x": object()})), "not JSON serializable"),
}
globals().update({name: kind for name, (kind, _) in COSTS.items()})


def router(choice: Any, **more: Any) -> type:
    return type("Own", (Router,), {"choose": returning(choice), "__module__": __name__, **more})


ROUTERS = {
    "Far": (router(Choice((99,))), "chose 99, which is none of the workers that can be chosen"),
    "None_": (router(None), "may have broken a rule of kvsim: TypeError"),
    "Empty": (router(Choice(())), "may have broken a rule of kvsim: IndexError"),
    "Busy": (router(Choice((0,)), tick_ns=0), "tick_ns is 0; give 1 or more"),
    "Early": (router(Choice((0,)), event_delay_ns=-1), "event_delay_ns is -1; give 0 or more"),
    "NoRouter": (type("N", (), {"__init__": lambda self: None}), "is not a router; make it"),
    "Deaf": (router(Choice((0,)), ended=raising(KeyError("e"))), "KeyError: 'e' (test_pol"),
}
globals().update({name: kind for name, (kind, _) in ROUTERS.items()})


def hanging(wait: Callable[[], None]) -> Callable[..., Any]:
    """A method that never returns, and catches what it can."""

    def method(*args: Any, **kwargs: Any) -> Any:
        while True:
            with contextlib.suppress(Exception):
                wait()

    return method


HANGING = {
    "Loops": ["--engine", engine(hanging(lambda: None))],
    "Sleeps": ["--engine", engine(hanging(lambda: time.sleep(1000)))],
    "Waits": ["--engine", engine(hanging(threading.Event().wait))],
    "Starts": ["--engine", engine(raising(KeyError()), __init__=hanging(lambda: None))],
    "Gathers": ["--engine", type("G", (VllmV1Async,), {"remarks": hanging(lambda: None)})],
    "Prices": ["--set", cost(hanging(lambda: None))],
    "Chooses": ["--router", router(None, choose=hanging(lambda: None))],
    "chosen_victim": ["--victim", hanging(lambda: None)],
}
globals().update({name: kind for name, (_, kind) in HANGING.items()})


class Frees(KVCacheManager):
    free = raising(KeyError("f"))


class Old(Naive):
    """A manager of another engine."""


MANAGERS = {
    "Unnamed": "is a scheduler, for --engine; give a subclass of",
    "Old": "is one of another engine than vllm-v1; give a subclass of",
    "victim": "is not a block manager; give a subclass of",
}


class Stuck(Order):
    hit = put = returning(None)
    pop = raising(IndexError("empty"))


def victim(candidates: Sequence[Any], blocks: Any) -> Any:
    raise KeyError("v")


OTHERS = {
    "Frees": ["--block-manager"],
    "Stuck": ["--set", "block_manager_args.eviction="],
    "victim": ["--victim"],
}


def assert_one_line(words: list[str], name: str, told: str, cwd: Path) -> None:
    done = run_here([*words[:-1], words[-1] + f"{__name__}:{name}"], cwd)
    assert done.returncode == 2, done.stdout
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1
    assert lines[0].startswith("kvsim: ") and f"{__name__}:{name}" in lines[0], lines
    assert told in lines[0], lines


for _made in (COSTS, ROUTERS):
    for _name, (_kind, _) in _made.items():
        _kind.__qualname__ = _name


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine(name: str, tmp_path: Path) -> None:
    assert_one_line(["run", *SHORT, "--engine", ""], name, ENGINES[name][1], tmp_path)


@pytest.mark.parametrize("name", MANAGERS)
def test_what_is_no_block_manager_of_the_engine(name: str, tmp_path: Path) -> None:
    assert_one_line(["run", *SHORT, "--block-manager", ""], name, MANAGERS[name], tmp_path)


def test_a_setting_that_a_constructor_does_not_name(tmp_path: Path) -> None:
    words = ["run", *SHORT, "--scheduling-policy", "priority", "--engine", ""]
    told = f"scheduling_policy: {__name__}:Unnamed does not name it in its constructor"
    assert_one_line(words, "Unnamed", told, tmp_path)


@pytest.mark.parametrize("name", COSTS)
def test_a_cost_model(name: str, tmp_path: Path) -> None:
    words = ["run", *SHORT, "--engine", "vllm-v1", "--set", "cost.model="]
    assert_one_line(words, name, COSTS[name][1], tmp_path)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router(name: str, tmp_path: Path) -> None:
    words = ["run", *SHORT, "--replicas", "2", "--router", ""]
    assert_one_line(words, name, ROUTERS[name][1], tmp_path)


@pytest.mark.parametrize("name", OTHERS)
def test_another_rule(name: str, tmp_path: Path) -> None:
    words = [*OTHERS[name], ""] if len(OTHERS[name]) == 1 else OTHERS[name]
    assert_one_line(["run", *SHORT, *words], name, "(test_policies.py:", tmp_path)


@pytest.mark.parametrize("name", HANGING)
def test_a_call_that_never_returns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsim.settings.limits.POLICY_CALL_S", 0.3)
    flag = HANGING[name][0]
    words = [flag, "cost.model="] if flag == "--set" else [flag, ""]
    words = ["--replicas", "2", *words] if flag == "--router" else words
    told = "a call has not returned within 0.3 s; --limits 10 waits ten times as long (test_polic"
    before = signal.getsignal(signal.SIGALRM)
    assert_one_line(["run", *SHORT, "--out", "run", *words], name, told, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


class Slow(VllmV1Async):
    """Takes its time, but returns."""

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        time.sleep(0.001)
        return super().compose(batch, now_ns)


def test_many_calls_may_take_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the module that runs the policy is its own."""
    monkeypatch.setattr("kvsim.settings.limits.POLICY_CALL_S", 0.2)
    settings = {**SETTINGS, "num_prompts": 3, "engine": f"{__name__}:Slow"}
    result = simulate("chat", settings)
    assert result.summary["steps"] * 0.001 > 0.4
    assert result.meta["outcome"]["kind"] == "finished"


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("name", ["Raises", "Loops", "Absent"])
def test_a_sweep_whose_policy_fails(
    name: str, jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran is kept, and only that; the same command goes on."""
    policy = tmp_path / "policy_of_a_sweep.py"
    policy.write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("KVSIM_LIMITS", "0.02")
    words = ["sweep", *SHORT, "--jobs", jobs, "--out", str(tmp_path / "out")]
    points = tmp_path / "out" / "points"
    first = run_here([*words, "--grid", "engine=vllm-v1"], tmp_path)
    assert first.returncode == 0, first.stderr
    kept = sorted(path.name for path in points.iterdir())
    done = run_here([*words, "--grid", f"engine=vllm-v1,{policy.stem}:{name}"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("kvsim: engine: ") and policy.stem in line and name in line
    assert sorted(path.name for path in points.iterdir()) == kept


POLICY = """
from kvsim.engines import VllmV1Async

class Raises(VllmV1Async):
    def compose(self, batch, now_ns):
        raise KeyError("boom")

class Loops(VllmV1Async):
    def compose(self, batch, now_ns):
        while True:
            pass
"""


def test_python_shows_what_was_raised() -> None:
    with pytest.raises(PolicyError) as caught:
        simulate("chat", {**SETTINGS, "engine": f"{__name__}:Raises"})
    assert isinstance(caught.value.__cause__, KeyError)


def test_without_a_policy_every_exception_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmV1Async, "remarks", raising(KeyError("ours")))
    with pytest.raises(KeyError, match="ours"):
        simulate("chat", SETTINGS)
