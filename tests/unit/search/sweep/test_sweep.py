"""Whole sweeps: equal bytes however they are run, nothing lost or repeated, clear refusals."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from marks import WHOLE, long
from msgspec import structs

from kvsim.run.simulation import simulate
from kvsim.search.grid import expand, parse_space
from kvsim.search.runner import Task, figures_of, run_missing, run_point
from kvsim.search.store import Store, address
from kvsim.search.sweep import figure_kinds, gather, make_plan, read_plan, sweep_table, write_plan
from kvsim.settings.config import load_config, to_table
from kvsim.workload import HashContent, ParentContent, Row, SegmentContent, TokenContent, Trace
from kvsim.workload.keys import keyed, streams

SPACE = [
    *["--trace", "load.jsonl", "--base", "base.toml", "--seeds", "2"],
    *["--grid", "watermark=0,0.1", "--grid", "num_gpu_blocks_override=10,40,60"],
    *["--slo", "p99_ttft<300ms"],
]
RESULTS = ("sweep.json", "sweep.parquet", "sweep.html")
KILLS = 20 if WHOLE else 3

COUNTING_COST = """
import os, time
from kvsim.cost.formulas import ConstantCost

class Cost(ConstantCost):
    \"\"\"Says when a run begins, and takes its time.\"\"\"

    def __init__(self, step_us: float = 6000):
        super().__init__(step_us)
        with open(os.environ["KVSIM_TEST_LOG"], "a") as log:
            log.write(f"{step_us:g}\\n")
        time.sleep(0.1)
"""

DYING_COST = """
import os
from pathlib import Path
from kvsim.cost.formulas import ConstantCost

class Cost(ConstantCost):
    \"\"\"Ends its process when that writes the result.\"\"\"

    def __init__(self, step_us: float = 6000):
        super().__init__(step_us)
        Path.write_bytes = lambda path, content: os._exit(1)
"""


def results(folder):
    return {name: (folder / name).read_bytes() for name in RESULTS}


@pytest.fixture(scope="module")
def swept(load, tmp_path_factory):
    """A sweep run in this process: its folder, plan and records."""
    folder = tmp_path_factory.mktemp("swept")
    base = to_table(load_config(None, {"request_rate": 50.0, "max_model_len": 256}))
    grid = ["watermark=0,0.1", "num_gpu_blocks_override=10,40,60"]
    points = expand(parse_space(grid, seeds=2), base)
    write_plan(folder, make_plan(load, base, points, "p99_ttft<300ms"))
    plan = read_plan(folder)
    store = Store(folder)
    configs = {p.key: point.config for p, point in zip(plan.points, points, strict=True)}
    assert run_missing(store, load, configs, jobs=1) == len(points)
    assert run_missing(store, load, configs, jobs=1) == 0
    return folder, plan, gather(store, plan, folder), points


def test_rows_are_what_the_runs_say(swept, load):
    _, plan, records, points = swept
    table = sweep_table(plan, records).to_pylist()
    assert len(table) == 12
    for row, point in zip(table, points, strict=True):
        assert {key: row[key] for key in plan.axes} == point.settings
        assert row["seed"] == point.config.seed
        if row["outcome"] == "refused":
            assert row["num_gpu_blocks_override"] == 10
            assert "max_model_len" in row["reason"]
            assert row["p99_ttft_ms"] is None
            assert not row["meets_slo"]
            continue
        result = simulate(load, point.config)
        assert row["engine.num_gpu_blocks"] == result.meta["num_gpu_blocks"]
        figures = figures_of(result.figures)
        assert set(figure_kinds()) <= set(figures)
        for key, value in figures.items():
            assert row[key] == value, key
            assert value is None or isinstance(value, int) == figure_kinds().get(key, False), key
        assert row["meets_slo"] == (result.summary["p99_ttft_ms"] < 300)
    assert {row["outcome"] for row in table} == {"finished", "refused"}
    assert {row["meets_slo"] for row in table} == {True, False}


def test_the_ledger_is_worked_out_only_if_asked_for(load, monkeypatch):
    """Its figures are the only difference, and the bubbles of a pipeline are known without."""
    base = to_table(load_config(None, {"request_rate": 50.0, "num_gpu_blocks_override": 60}))
    settings = ["max_model_len=256", "pipeline_parallel_size=1,2", "enable_prefix_caching=true"]
    for point in expand(parse_space(settings), base):
        asked, unasked = (run_point(Task("k", point.config, ledger), load) for ledger in (1, 0))
        more = asked["figures"].keys() - unasked["figures"].keys()
        assert {key: asked["figures"][key] for key in unasked["figures"]} == unasked["figures"]
        assert {key.partition(".")[0] for key in more} == {
            *(f"time_ledger_{name}" for name in ("total_s", "mean_ms", "p50_ms", "p99_ms")),
            *("step_time_s", "prompt_ledger_tokens"),
        }
        assert figure_kinds(ledger=True).keys() - figure_kinds().keys() <= more
        assert len({address(point.config, load, ledger=ledger) for ledger in (True, False)}) == 2
        assert ("pipeline_bubble_share" in unasked["figures"]) == (
            point.config.pipeline_parallel_size > 1
        )

    def worked_out(*_):
        raise AssertionError

    monkeypatch.setattr("kvsim.run.serving.account_times", worked_out)
    config = expand(parse_space(settings[::2]), base)[0].config
    assert run_point(Task("k", config), load)["figures"]["completed"] == 20
    with pytest.raises(AssertionError):
        run_point(Task("k", config, ledger=True), load)


def test_runs_that_share_their_keys_do_not_notice():
    """Whatever was run before on the same trace, with real tokens, parents, segments and ids."""
    generator = random.Random(5)
    rows = []
    for index in range(24):
        length = generator.randint(20, 90)
        tokens = tuple(
            token % 3 if place < 40 else index for place, token in enumerate(range(length))
        )
        content = (
            TokenContent(tokens, None),
            HashContent(((generator.choice((0, 40)), -(-length // 16)),)),
            SegmentContent((("head", 16), (f"{index % 2}", length - 16))),
            ParentContent(max(index - 4, 0), 16),
        )[index % 4]
        rows.append(Row(index, str(index), index, index * 20_000_000, length, 30, content))
    trace = Trace("made", "native", "0" * 64, rows, 16, "prefix", True)
    base = {"max_model_len": 256, "cost": {"model": "constant"}, "enable_prefix_caching": True}
    grid = ["engine=vllm-v1,nano-vllm", "block_size=16,32", "num_gpu_blocks_override=20,60"]
    points = expand(parse_space([*grid, "max_num_batched_tokens=256"]), base)
    shared = keyed(trace)
    for point in [*points, *reversed(points)]:
        apart, together = (
            run_point(Task("k", point.config, True), each) for each in (trace, shared)
        )
        assert apart["outcome"]["kind"] == "finished", apart["outcome"]
        assert together == apart, point.settings
    assert shared.streams is streams(shared)
    assert replace(shared, rows=rows[:4]).streams is not shared.streams, "those of other rows"


def test_columns_do_not_depend_on_what_happened(swept):
    _, plan, records, _ = swept
    runs = zip(plan.points, records, strict=True)
    refused = [(p, each) for p, each in runs if each["outcome"]["kind"] == "refused"]
    few = structs.replace(plan, points=[point for point, _ in refused])
    assert (
        sweep_table(few, [each for _, each in refused]).schema == sweep_table(plan, records).schema
    )


def test_larger_blocks_cost_the_same_bytes_and_fp8_is_no_saving(load):
    """Fewer blocks are no merit: blocks of 64 tokens are as many bytes, so goodput decides."""
    base = to_table(load_config(None, {"request_rate": 50.0, "max_model_len": 256}))
    points = expand(parse_space(["block_size=16,64", "kv_cache_dtype=auto,fp8"]), base)
    engines = [run_point(Task("k", point.config), load)["engine"] for point in points]
    blocks = [engine["num_gpu_blocks"] for engine in engines]
    assert blocks[0] > 3.9 * blocks[2]
    sizes = [engine["kv_cache_bytes"] for engine in engines]
    assert max(sizes) < 1.001 * min(sizes)
    two = expand(parse_space(["tensor_parallel_size=2"]), base)
    engine = run_point(Task("k", two[0].config), load)["engine"]
    assert engine["kv_cache_bytes"] > 2 * sizes[0], "bytes of both GPUs"


def test_an_engine_that_stops_is_a_row_with_its_reason(load):
    config = load_config(
        None,
        {
            "engine": "vllm-0.6.3",
            "request_rate": float("inf"),
            "max_model_len": 256,
            "num_gpu_blocks_override": 16,
            "preemption_mode": "swap",
            "num_cpu_blocks_override": 0,
        },
    )
    record = run_point(Task("k", config), load)
    assert record["outcome"]["kind"] not in ("finished", "refused")
    assert record["outcome"]["explanation"]
    assert record["outcome"]["remedy"]


def test_equal_bytes_for_any_number_of_processes_and_any_parts(kvsim, folder):
    kvsim("sweep", *SPACE, "--out", "one", "--jobs", "1")
    kvsim(
        "sweep", *SPACE, "--out", str(folder / "two"), "--jobs", "2"
    )  # workers stay where they are
    for part in ("1/3", "2/3", "3/3"):
        kvsim("sweep", *SPACE, "--out", f"part{part[0]}", "--shard", part, "--jobs", "1")
        assert not (folder / f"part{part[0]}" / "sweep.parquet").exists()
    incomplete = kvsim("sweep", "--merge", "part1", "part3", "--out", "some", check=False)
    assert incomplete.returncode == 2
    assert "4 of 12 runs are missing" in incomplete.stderr
    kvsim("sweep", "--merge", "part1", "part2", "part3", "--out", "all")
    whole = results(folder / "one")
    assert results(folder / "two") == whole
    assert results(folder / "all") == whole
    again = kvsim("sweep", *SPACE, "--out", "one")
    assert "0 runs made, 12 already there" in again.stderr
    assert results(folder / "one") == whole
    described = json.loads(pq.read_schema(folder / "one" / "sweep.parquet").metadata[b"kvsim"])
    assert described["trace"]["name"] == "load.jsonl"


def test_a_sweep_with_the_ledger_has_its_columns_and_no_others(kvsim, folder):
    space = [*SPACE[:4], "--grid", "num_gpu_blocks_override=10,60", "--jobs", "1", "--out"]
    found = {}
    for out, ledger in (("without", []), ("with", ["--ledger"])):
        kvsim("sweep", *space, out, *ledger)
        found[out] = pq.read_table(folder / out / "sweep.parquet").to_pylist()
    more = found["with"][0].keys() - found["without"][0].keys()
    assert more == figure_kinds(ledger=True).keys() - figure_kinds().keys()
    for one, other in zip(found["with"], found["without"], strict=True):
        differ = {key for key in other if one[key] != other[key]}
        assert differ == {"key"}
    assert found["with"][1]["step_time_s.dense"] > 0
    assert "0 runs made, 2 already there" in kvsim("sweep", *space, "with", "--ledger").stderr
    assert "2 runs made, 0 already there" in kvsim("sweep", *space, "with").stderr


@long
def test_killed_at_any_moment_nothing_is_lost_or_repeated(folder, environment):
    """A run that was killed begins again; one that ended never does."""
    (folder / "counting.py").write_text(COUNTING_COST)
    log = folder / "log"
    log.write_text("")
    number = 12 + 7 * KILLS
    command = [
        *[sys.executable, "-m", "kvsim", "sweep", "--trace", "load.jsonl", "--base", "base.toml"],
        *["--set", "cost.model=counting:Cost", "--grid", f"cost.step_us=lin(1,{number},{number})"],
        *["--jobs", "2", "--out", "killed"],
    ]
    setting = {**environment, "KVSIM_TEST_LOG": str(log)}
    moments = random.Random(0)
    points = folder / "killed" / "points"

    def ended():
        records = [json.loads(path.read_bytes()) for path in points.glob("*.json")]
        return {f"{record['config']['cost']['step_us']:g}" for record in records}

    def started():
        return log.read_text().split()

    for _ in range(KILLS):
        before, begun = ended(), len(started())
        driver = subprocess.Popen(
            command, cwd=folder, env=setting, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while driver.poll() is None and len(started()) == begun:
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 0.5))
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        assert before <= ended(), "a result was lost"
        assert not before & set(started()[begun:]), "a result was made again"
    log_before, stored = len(started()), ended()
    assert len(stored) < number, "the sweep ended before it was killed"
    final = subprocess.run(command, cwd=folder, env=setting, capture_output=True, check=True)
    assert b"runs made" in final.stderr
    assert not stored & set(started()[log_before:])
    assert len(ended()) == number
    assert len(started()) <= number + 2 * KILLS, "only what was running when killed begins again"
    whole = [*command[:-1], "whole"]
    subprocess.run(whole, cwd=folder, env=setting, capture_output=True, check=True)
    assert results(folder / "killed") == results(folder / "whole")


def test_merging_different_sweeps_is_refused(kvsim, folder):
    for out, values in (("a", "0,0.1"), ("b", "0,0.2")):
        grid = f"watermark={values}"
        space = ["--trace", "load.jsonl", "--base", "base.toml", "--grid", grid]
        kvsim("sweep", *space, "--out", out, "--jobs", "1")
    result = kvsim("sweep", "--merge", "a", "b", "--out", "c", check=False)
    assert result.returncode == 2
    assert "another sweep" in result.stderr
    slo = ["--slo", "p99_ttft<2s"]
    kvsim("sweep", *space, *slo, "--out", "judged", "--jobs", "1")
    result = kvsim("sweep", "--merge", "b", "judged", "--out", "c", check=False)
    assert result.returncode == 2
    assert "judged: its --slo is p99_ttft<2s, that of b None" in result.stderr
    assert not (folder / "c").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grid", "watermrk=0,1"], ["watermrk", "'watermark'"]),
        (["--grid", "watermark="], ["no values"]),
        (["--grid", "watermark=0,1.5"], ["watermark", "1.5"]),
        (["--grid", "watermark=log(0,1,3)"], ["begin above 0"]),
        (["--grid", "watermark=0,0.1", "--grid", "watermark=0.2"], ["watermark", "twice"]),
        (["--seeds", "0"], ["--seeds"]),
        (["--seeds", "2", "--slo", "p99_tfft<2s"], ["p99_ttft"]),
        (["--seeds", "2", "--shard", "5/4"], ["--shard", "1/4"]),
        (["--seeds", "2", "--backend", "slurm"], ["slurm", "local, ray"]),
        (["--seeds", "2", "--ray-address", "x:1"], ["--backend ray"]),
        (["--seeds", "2", "--base", "nowhere.toml"], ["nowhere.toml"]),
        (["--seeds", "2", "folder"], ["folder", "--merge"]),
        ([], ["nothing to sweep"]),
    ],
    ids=lambda x: " ".join(x)[-30:],
)
def test_bad_input_is_one_line_and_leaves_nothing(kvsim, folder, arguments, words):
    before = set(folder.iterdir())
    result = kvsim("sweep", "--trace", "load.jsonl", *arguments, "--out", "out", check=False)
    assert result.returncode == 2, result
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--merge"], "no folders"),
        (["--merge", "nowhere"], "nowhere/sweep.json"),
        (["--merge", "a", "--grid", "n=1,2"], "leave out --trace"),
        (["--merge", "a", "--slo", "p99_ttft<2s"], "and --slo"),
        (["--seeds", "2"], "--trace"),
    ],
)
def test_bad_merges(kvsim, arguments, word):
    result = kvsim("sweep", *arguments, "--out", "out", check=False)
    assert result.returncode == 2
    assert word in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_worker_that_ends_while_it_writes_leaves_nothing(folder, environment):
    (folder / "dying.py").write_text(DYING_COST)
    command = [
        *[sys.executable, "-m", "kvsim", "sweep", "--trace", "load.jsonl", "--base", "base.toml"],
        *["--set", "cost.model=dying:Cost", "--seeds", "2", "--jobs", "2", "--out", "left"],
    ]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode, ended.stdout
    assert not list(folder.rglob(".kvsim-*"))
    assert not list(folder.glob("left/points/*.json"))


def test_results_of_another_plan_leave_links_and_pipes(swept, tmp_path):
    _, plan, _, _ = swept
    (tmp_path / "page").write_text("old")
    (tmp_path / "sweep.html").symlink_to("page")
    os.mkfifo(tmp_path / "sweep.parquet")
    for each in (plan, structs.replace(plan, slo="p99_ttft<1s")):
        write_plan(tmp_path, each, *RESULTS[1:])
        assert (tmp_path / "page").exists() == (each is plan)
    assert (tmp_path / "sweep.html").is_symlink() and (tmp_path / "sweep.parquet").is_fifo()
