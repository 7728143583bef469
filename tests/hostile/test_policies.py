"""A policy of a user's own that misbehaves ends a command in one line that names it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command import run_here

from kvsim.engine.batch import Batch
from kvsim.engine.order import Order
from kvsim.engine.plan import Plan
from kvsim.engines import VllmV1Async
from kvsim.engines.vllm_v1_blocks import VllmV1PrefixTables
from kvsim.errors import PolicyError
from kvsim.routers.router import Choice, Router
from kvsim.run import simulate

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


class Lists(VllmV1Async):
    def compose(self, batch: Batch, now_ns: int) -> Plan:
        batch.waiting = list(batch.waiting)  # type: ignore[assignment]
        return super().compose(batch, now_ns)


ENGINES = {
    "Raises": (engine(raising(KeyError("boom"))), "KeyError: 'boom' (test_policies.py:"),
    "Exits": (engine(raising(SystemExit(7))), "SystemExit: 7"),
    "Overflows": (engine(raising(OverflowError("mine"))), "OverflowError: mine"),
    "Opens": (engine(raising(FileNotFoundError(2, "none", "f"))), "FileNotFoundError"),
    "Odd": (engine(raising(Error())), "exception str() failed"),
    "Nothing": (engine(returning(None)), "may have broken a rule of kvsim: AttributeError"),
    "Gauges": (type("G", (VllmV1Async,), {"gauged": ("none",)}), "may have broken a rule"),
    "Remarks": (type("R", (VllmV1Async,), {"remarks": returning(None)}), "may have broken"),
    "Lists": (Lists, "'list' object has no attribute 'popleft' (test_policies.py:"),
}
globals().update({name: kind for name, (kind, _) in ENGINES.items()})


def cost(step_ns: Callable[..., Any], **more: Any) -> type:
    figures = {"kind": "constant", "source": "mine", "describe": returning({})}
    return type("Cost", (), {**figures, "step_ns": step_ns, "__module__": __name__, **more})


def sums(prices: Callable[..., Any]) -> type:
    return cost(returning(10**7), decode_ns=returning(10**7), decode_run_ns=prices)


class Many:
    """Prices more steps than asked for."""

    def __call__(self, sequences: int, context_tokens: int, steps: int, *more: Any) -> list[int]:
        return [10**7] * (steps + 1)


COSTS = {
    **{
        name: (cost(returning(ns)), f"priced a step at {ns!r}; return whole nanoseconds")
        for name, ns in (("Below", -5), ("Half", 0.5), ("Never", float("nan")), ("No", None))
    },
    "Fails": (cost(raising(KeyError("x"))), "KeyError: 'x' (test_policies.py:"),
    "Silent": (cost(returning(5), describe=returning(None)), "may have broken a rule"),
    "Strange": (cost(returning(5), describe=returning({"x": object()})), "not JSON serializable"),
    "ManyRuns": (sums(Many()), "steps where"),
    "BelowRuns": (sums(returning([-1])), "priced a step at -1"),
    "FloatRuns": (sums(returning([1e6])), "priced a step at 1000000.0"),
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


class Frees(VllmV1PrefixTables):
    free = raising(KeyError("f"))


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


@pytest.mark.parametrize("name", COSTS)
def test_a_cost_model(name: str, tmp_path: Path) -> None:
    words = ["run", *SHORT, "--set", "cost.model="]
    assert_one_line(words, name, COSTS[name][1], tmp_path)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router(name: str, tmp_path: Path) -> None:
    words = ["run", *SHORT, "--replicas", "2", "--router", ""]
    assert_one_line(words, name, ROUTERS[name][1], tmp_path)


@pytest.mark.parametrize("name", OTHERS)
def test_another_rule(name: str, tmp_path: Path) -> None:
    words = [*OTHERS[name], ""] if len(OTHERS[name]) == 1 else OTHERS[name]
    assert_one_line(["run", *SHORT, *words], name, "(test_policies.py:", tmp_path)


def test_python_shows_what_was_raised() -> None:
    with pytest.raises(PolicyError) as caught:
        simulate("chat", {**SETTINGS, "engine": f"{__name__}:Raises"})
    assert isinstance(caught.value.__cause__, KeyError)


def test_without_a_policy_every_exception_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmV1Async, "remarks", raising(KeyError("ours")))
    with pytest.raises(KeyError, match="ours"):
        simulate("chat", SETTINGS)
