"""`compare --seeds` and `diff` as a user runs them."""

import json
from pathlib import Path

import pytest
from marks import long
from places import ROOT

from kvsim.cli import main
from kvsim.results.numerals import SPACE

CHAT = str(ROOT / "traces" / "chat.jsonl")
SHORT = ["--trace", CHAT, "--num-prompts", "60", "--num-gpu-blocks-override", "600"]
ROOFLINE = ["--cost-model", "roofline"]


def kvsim(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == code, captured.err
    return captured.err if code else captured.out


def test_seeds_give_figures_verdicts_and_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["compare", "naive", "prefix-caching", *SHORT, "--seeds", "4"]
    shown = kvsim(capsys, *arguments, "--jobs", "1", "--out", str(tmp_path))
    assert "4 seeds, the same for every run" in shown.replace(SPACE, " ")
    assert "Why, on seed 0" in shown
    assert "prefix-caching against naive" in shown
    record = json.loads((tmp_path / "comparison.json").read_text())
    assert record["seeds"] == [0, 1, 2, 3]
    [found] = record["figures"]["prefix_cache_hit_tokens"]["differences"]
    assert (
        0 <= found["low"] < found["difference"] < found["high"]
        or found["finding"] == "insignificant"
    )
    assert found["difference"] > 0
    assert (tmp_path / "naive" / "summary.json").is_file()
    assert "<h2>Certainty</h2>" in (tmp_path / "comparison.html").read_text()
    again = json.loads(kvsim(capsys, *arguments, "--jobs", "2", "--json"))
    assert again == record


def test_a_configuration_against_itself_stops_at_the_first_look(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["compare", "naive", "naive", *SHORT, "--seeds", "12", "--jobs", "1", "--json"]
    record = json.loads(kvsim(capsys, *arguments))
    assert (len(record["seeds"]), record["planned_seeds"], record["settled"]) == (6, 12, True)
    findings = {d["words"] for f in record["figures"].values() for d in f["differences"]}
    assert findings == {"no difference"}


@long
def test_equal_configurations_are_named_before_anything_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two files of the old engine become one configuration under the defaults of another."""
    arguments = ["compare", "naive", "prefix-caching", *SHORT, "--max-model-len", "2K"]
    for further in ([], ["--seeds", "4", "--jobs", "1"]):
        shown = kvsim(capsys, *arguments, "--engine", "vllm-v1", *further)
        said = " ".join(shown.split())
        assert said.startswith("naive and prefix-caching are the same configuration, so all their")
        assert "prefix-caching sets enable_prefix_caching to True, which is also the def" in said
        assert "TTFT" not in said
    shown = kvsim(capsys, *arguments)
    assert "same configuration" not in shown


def test_a_recorded_trace_is_replayed_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = Path(CHAT).read_text().splitlines()
    trace = tmp_path / "recorded.jsonl"
    trace.write_text("\n".join(['{"kvsim_trace":1}', *lines[1:61]]) + "\n")
    arguments = ["compare", "naive", "prefix-caching", "--trace", str(trace), "--seeds", "4"]
    shown = kvsim(capsys, *arguments, "--num-gpu-blocks-override", "600", "--jobs", "1")
    assert "Nothing in these runs is random" in " ".join(shown.split())


def test_two_runs_are_set_against_each_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = [str(tmp_path / name) for name in ("small", "large")]
    for folder, blocks in zip(folders, ("600", "900"), strict=True):
        run = ["run", *SHORT[:-1], blocks, "--out", folder, "--no-report"]
        kvsim(capsys, *run)
    shown = kvsim(capsys, "diff", *folders, "--out", str(tmp_path / "diff"))
    assert "num_gpu_blocks_override: 600 → 900" in shown
    assert "First divergent decision" in shown
    assert "waiting for free blocks" in shown
    record = json.loads((tmp_path / "diff" / "diff.json").read_text())
    assert record == json.loads(kvsim(capsys, "diff", *folders, "--json"))
    assert (tmp_path / "diff" / "diff.html").stat().st_size > 100_000
    same = kvsim(capsys, "diff", folders[0], folders[0])
    assert "Every request took the same time in" in same


def test_runs_of_different_traces_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = [str(tmp_path / name) for name in ("chat", "api")]
    for folder in folders:
        trace = str(ROOT / "traces" / Path(folder).with_suffix(".jsonl").name)
        kvsim(capsys, "run", "--trace", trace, "--num-prompts", "20", "--out", folder)
    for further in ([], ["--json"], ["--out", str(tmp_path / "diff")]):
        said = kvsim(capsys, "diff", *folders, *further, code=2)
        assert said.count("\n") == 1
        assert f"{folders[1]}: api and chat had different requests" in said
        assert "Give two runs of the same trace." in said
    assert not (tmp_path / "diff").exists()


def test_a_trace_of_other_content_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Though its requests have the same names and lengths."""
    trace = (ROOT / "traces" / "chat.jsonl").read_text()
    (tmp_path / "other.jsonl").write_text(trace.replace('"assistant"', '"secretary"', 1))
    for name, path in (("a", CHAT), ("b", str(tmp_path / "other.jsonl"))):
        kvsim(capsys, "run", path, "--num-prompts", "20", "--out", str(tmp_path / name))
    said = kvsim(capsys, "diff", str(tmp_path / "a"), str(tmp_path / "b"), code=2)
    assert said.count("\n") == 1 and "has not the content of" in said


def test_single_runs_are_compared_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = ["compare", "naive", "swap", *SHORT, "--out", str(tmp_path)]
    record = json.loads(kvsim(capsys, *runs, "--json"))
    assert record == json.loads((tmp_path / "comparison.json").read_text())
    assert record["runs"] == ["naive", "swap"]
    summary = json.loads((tmp_path / "swap" / "summary.json").read_text())
    figure = record["figures"]["p99_ttft_ms"]
    assert figure["runs"]["swap"] == summary["p99_ttft_ms"]
    [difference] = figure["differences"]
    assert difference["finding"] in ("same", "better", "worse")


def test_the_trace_may_stand_among_the_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    place = SHORT.index("--trace")
    rest = [*SHORT[:place], *SHORT[place + 2 :], "--json"]
    assert kvsim(capsys, "compare", "naive", "swap", SHORT[place + 1], *rest) == kvsim(
        capsys, "compare", "naive", "swap", *SHORT, "--json"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "naive", *SHORT, "--seeds", "4"], ["two configurations"]),
        (["compare", "naive", "swap", *SHORT, "--seeds", "1"], ["--seeds", "2"]),
        (["compare", "naive", "swap", *SHORT, "--seeds", "some"], ["--seeds", "int"]),
        (["compare", "naive", "swap", *SHORT, "--margin", "0.05"], ["--margin", "--seeds N"]),
        (["compare", "naive", "swap", "--seeds", "4"], ["--trace FILE", "--workload"]),
        (["compare", "naive", "watermark-off", "--seeds", "4"], ["workload: naive None"]),
        (
            ["compare", "naive", "swap", *SHORT, "--seeds", "4", "--cost-uncertainty", *ROOFLINE],
            ["--cost-uncertainty", "roofline", "--cost-model table"],
        ),
        (["compare", "naive", "swap", "--workload", "watermarks"], ["watermarks", "watermark"]),
        (["diff", "nowhere", "elsewhere"], ["nowhere", "no such folder", "kvsim run --out"]),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = kvsim(capsys, *arguments, code=2)
    assert said.count("\n") == 1
    for word in words:
        assert word in said, said
