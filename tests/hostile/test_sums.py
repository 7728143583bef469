"""No result depends on how Python's `sum` rounds: from 3.12 on it compensates for lost digits."""

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command import run_here
from marks import long

CHAT = ["--trace", "chat", "--num-prompts", "40"]
COMMANDS: dict[str, list[str]] = {
    "profile": ["run", *CHAT],
    "roofline": ["run", *CHAT, "--cost-model", "roofline", "--model", "gpt-oss-20b"],
    "fleet": ["run", *CHAT, "--replicas", "4", "--out", "fleet"],
    "split": ["run", *CHAT, "--prefill-replicas", "2", "--decode-replicas", "2"],
    "seeds": ["compare", "naive", "swap", *CHAT, "--request-rate", "9", "--seeds", "4"],
    "check": ["check", "measured.jsonl", "--max-model-len", "4096"],
    "synth": ["trace", "synth", "api", "--requests", "9", "--out", "made.jsonl"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=long if name == "check" else ()) for name in COMMANDS]
)
def test_no_floats_are_added_by_sum(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = {"kvsim_trace": 1}
    rows = [
        {"arrival_s": i / 3, "input_length": 99 + i, "output_length": 30}
        | {"observed": {"ttft_s": 0.07 + i / 900, "e2e_s": 0.6 + i / 70}}
        for i in range(12)
    ]
    lines = [json.dumps(row) + "\n" for row in (header, *rows)]
    (tmp_path / "measured.jsonl").write_text("".join(lines))
    plain, found = sum, set[str]()

    def watched(values: Any, /, start: Any = 0) -> Any:
        frame = sys._getframe(1)
        if str(frame.f_globals.get("__name__")).startswith("kvsim."):
            values = list(values)
            fractions = [each for each in values if type(each) is float and each != int(each)]
            if len(values) > 2 and fractions:
                found.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return plain(values, start)

    monkeypatch.setattr(builtins, "sum", watched)
    jobs = ["--jobs", "1"] if name == "seeds" else []
    done = run_here([*COMMANDS[name], *jobs], tmp_path)
    assert done.returncode == 0, done.stderr
    assert not found, "use kvsim.core.vectors.added or statistics.fmean"
