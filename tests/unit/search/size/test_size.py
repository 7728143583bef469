"""The command: the cliff of a burst, an assumed hit rate, the page, and clear refusals."""

import json

import pytest
from command import run_here
from marks import long
from places import ROOT

from kvsim.workload.native import write
from kvsim.workload.spec import Workload, make_trace


@pytest.fixture
def kvsim(tmp_path):
    """Run the command line in a folder with a small load."""
    load = make_trace(
        Workload("random", requests=24, input_len=100, output_len=60, range_ratio=0.5), 5
    )
    write(load, str(tmp_path / "load.jsonl"))

    def run(*arguments, code=0):
        result = run_here(["size", *arguments], tmp_path)
        assert result.returncode == code, result.stderr
        return result

    return run


LOAD = [
    *["--trace", "load.jsonl", "--request-rate", "400", "--max-model-len", "256"],
    *["--num-gpu-blocks-override", "240", "--seeds", "2", "--jobs", "1"],
]


@long
def test_the_cliff_of_a_burst(kvsim, tmp_path):
    """BLIS PR #298: a pool that is 4.5 % smaller gives several times the p99 TTFT."""
    result = kvsim(
        *["--trace", str(ROOT / "traces" / "burst.jsonl")],
        *["--base", str(ROOT / "configs" / "runs" / "capacity-cliff.toml")],
        *["--slo", "p99_ttft<300ms", "--find", "num_gpu_blocks", "--from", "5000"],
        *["--seeds", "3", "--jobs", "1", "--out", "cliff"],
    )
    assert "Cliff:" in result.stdout
    ttft = {}
    for path in (tmp_path / "cliff" / "points").glob("*.json"):
        record = json.loads(path.read_bytes())
        blocks = record["config"]["num_gpu_blocks_override"]
        ttft.setdefault(blocks, []).append(record["figures"]["p99_ttft_ms"])
    assert all(len(values) == 3 for values in ttft.values())
    least = min(blocks for blocks, values in ttft.items() if max(values) < 300)
    assert f"{least:,} blocks" in result.stdout
    smaller = [blocks for blocks in ttft if 0.955 * least <= blocks < least]
    assert smaller
    for blocks in smaller:
        assert sum(ttft[blocks]) > 4 * sum(ttft[least])


def test_the_same_search_again_runs_nothing_and_writes_the_same_page(kvsim, tmp_path):
    search = [*LOAD, "--slo", "p99_ttft<150ms", "--find", "num_gpu_blocks"]
    search += ["--from", "60", "--out", "out"]
    first = kvsim(*search)
    page = (tmp_path / "out" / "size.html").read_bytes()
    record = (tmp_path / "out" / "size.json").read_bytes()
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "points").glob("*.json")}
    assert len(files) > 20
    assert kvsim(*search).stdout == first.stdout
    assert (tmp_path / "out" / "size.html").read_bytes() == page
    assert (tmp_path / "out" / "size.json").read_bytes() == record
    (found,) = json.loads(record)["searches"]
    kept = [each["value"] for each in found["tried"] if each["seeds_met"] == 2]
    assert found["meets"] and found["value"] in kept
    assert f"{found['value']:,} blocks" in found["verdict"][0]
    assert len(found["tried"]) * 2 == len(files)
    assert files == {path: path.stat().st_mtime_ns for path in files}
    for words in (b"The least num_gpu_blocks_override", b"near the answer", b"2 of 2"):
        assert words in page


@long
def test_an_assumed_hit_rate(kvsim):
    result = kvsim(
        *LOAD,
        *["--hit-rate", "0.4", "--prefixes", "3"],
        *["--slo", "p99_ttft<1s,hit_rate>20%", "--find", "num_gpu_blocks"],
    )
    assert "note: assumed: " in result.stderr
    assert "of 3 shared beginnings" in result.stderr
    assert "Hit rate" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--find", "blocks"], ["--find", "'num_gpu_blocks'"]),
        (["--find", "watermark", "--slo", "p99_ttft<2"], ["--slo", "2ms or 2s"]),
        (["--find", "num_gpu_blocks", "--from", "9", "--to", "3"], ["nothing between"]),
        (["--find", "gpu_memory_utilization"], ["num_gpu_blocks_override"]),
        (["--find", "watermark", "--hit-rate", "1.5"], ["--hit-rate", "between 0 and 1"]),
        (["--find", "watermark", "--hit-rate", "0.99"], ["at most", "--prefixes"]),
        (
            ["--find", "watermark", "--hit-rate", "0.5", "--no-enable-prefix-caching"],
            ["--hit-rate", "prefix caching is off"],
        ),
        (["--find", "watermark", "--max-model-len", "9999"], ["max_model_len", "9999"]),
        (["--find", "watermark", "--backend", "slurm"], ["local, ray"]),
    ],
    ids=lambda x: " ".join(x)[-30:],
)
def test_bad_input_is_one_line(kvsim, arguments, words):
    slo = [] if "--slo" in arguments else ["--slo", "p99_ttft<1s"]
    result = kvsim(*LOAD, *slo, *arguments, code=2)
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr
    assert result.stdout == ""


DRAFTS = ["--model", "qwen2.5-0.5b", "--hardware", "h100", "--max-model-len", "256", "--jobs", "1"]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("find", "further", "answer"),
    [
        *(
            pytest.param(*case, marks=long)
            for case in (
                ("num_gpu_blocks", ["--num-gpu-blocks-override", "120"], "The least num_gpu"),
                ("request_rate", ["--from", "100", "--to", "130"], "The highest request_rate"),
                ("replicas", ["--request-rate", "400", "--to", "2"], "The least number of"),
            )
        ),
        ("max_num_seqs", ["--from", "6", "--to", "9"], "Farthest from the limits"),
    ],
)
def test_what_is_enough_with_drafts(kvsim, tmp_path, find, further, answer):
    """Each seed draws which drafts are accepted, whatever else it draws."""
    drafts = json.dumps({**SPECULATIVE, "acceptance_rate": 0.6})
    search = ["--find", find, "--slo", "p99_e2el<5s", "--seeds", "2", *further]
    given = ["--trace", "load.jsonl", *DRAFTS, "--speculative-config", drafts]
    found = kvsim(*given, *search, "--out", "out").stdout
    assert answer in found and "which drafts are accepted" in " ".join(found.split())
    points = [json.loads(path.read_bytes()) for path in (tmp_path / "out/points").glob("*.json")]
    lengths = {each["figures"]["spec_decode_acceptance_length"] for each in points}
    assert len(lengths) > 1 and all(1.5 < length < 3 for length in lengths)


def test_recorded_acceptance_is_the_same_for_all_seeds(kvsim, tmp_path):
    """One run is enough for a trace that says when requests come and what is accepted."""
    head, *rows = map(json.loads, (tmp_path / "load.jsonl").read_text().splitlines())
    known = [head, *({**row, "accepted_drafts": [1, 2]} for row in rows)]
    (tmp_path / "known.jsonl").write_text("\n".join(map(json.dumps, known)))
    given = ["--trace", "known.jsonl", *DRAFTS, "--speculative-config", json.dumps(SPECULATIVE)]
    search = ["--find", "max_num_seqs", "--from", "6", "--to", "9", "--slo", "p99_e2el<5s"]
    assert "nothing is drawn at random" in kvsim(*given, *search).stdout
