"""No policy can reach how long an output becomes: not from anything that it is given."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
from fuzz import outsiders
from worlds import config, trace

from kvsim.run.simulation import simulate

_MOST = 2_000
"""Objects that one walk looks at, at most."""
_PLAIN = (int, float, str, bytes, bool, type(None), type, range)
found: set[str] = set()
"""Attributes that give the future away, as paths from what the policy was given."""
asked: set[str] = set()
"""Methods that were called."""


def secrets(name: str, thing: object) -> Iterator[str]:
    """Paths of public attributes that tell of the output, breadth first from `thing`."""
    queue, seen = deque([(name, thing)]), {id(thing)}
    while queue and len(seen) < _MOST:
        path, each = queue.popleft()
        for key, value in _parts(each):
            if "output_length" in key:
                yield f"{path}{key}"
            elif id(value) not in seen and not isinstance(value, _PLAIN):
                seen.add(id(value))
                queue.append((f"{path}{key}", value))


def _parts(each: object) -> Iterable[tuple[str, Any]]:
    if isinstance(each, Mapping):
        return [("[]", part) for pair in list(each.items())[:20] for part in pair]
    if isinstance(each, list | tuple | set | frozenset | deque):
        return [("[]", part) for part in list(each)[:20]]
    public = [key for key in dir(each) if not key.startswith("_")]
    return [(f".{key}", value) for key in public if not callable(value := getattr(each, key, None))]


def curious_victim(candidates: Any, blocks: Any) -> Any:
    asked.add("victim")
    for name, thing in (("candidates", candidates), ("blocks", blocks)):
        found.update(secrets(name, thing))
    return candidates[-1]


def curious_scheduler(base: type) -> type:
    """A subclass that searches whatever its methods are called with."""

    class Curious(base):  # type: ignore[misc]
        def compose(self, batch: Any, now_ns: int) -> Any:
            asked.add("compose")
            found.update(secrets("batch", batch))
            return super().compose(batch, now_ns)

        def settle(self, batch: Any, plan: Any, now_ns: int) -> None:
            asked.add("settle")
            found.update(secrets("plan", plan))
            super().settle(batch, plan, now_ns)

    return Curious


SMALL = {"num_gpu_blocks_override": 9, "max_model_len": 32}
LOAD = trace((0, 8, 9), (0, 8, 12), (5, 8, 7))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    found.clear()
    asked.clear()


@pytest.mark.parametrize("engine", ["vllm-0.6.3", "vllm-v1", "vllm-0.3.3", "nano-vllm"])
def test_a_victim_policy_cannot_see_the_future(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outsiders, "curious_victim", curious_victim, raising=False)
    settings = _settings(engine) | {"victim": "fuzz.outsiders:curious_victim"}
    simulate(LOAD, settings)
    assert asked == {"victim"}
    assert not found


@pytest.mark.parametrize("base", outsiders.SCHEDULERS, ids=lambda base: base.__name__)
def test_a_scheduler_cannot_see_the_future(base: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outsiders, "Curious", curious_scheduler(base), raising=False)
    settings = _settings(outsiders.SCHEDULERS[base]) | {"engine": "fuzz.outsiders:Curious"}
    for key in ("disable_async_output_proc", "async_scheduling"):
        settings.pop(key, None)
    result = simulate(LOAD, settings)
    assert result.requests["status"] == ["completed"] * 3
    assert asked == {"compose", "settle"}
    assert not found


def _settings(engine: str) -> dict[str, Any]:
    settings = config(**SMALL, engine=engine)
    if engine != "vllm-0.6.3":
        del settings["disable_async_output_proc"]
    if engine.startswith(("nano", "sglang")):
        del settings["watermark"]
    return settings
