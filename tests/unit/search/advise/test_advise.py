"""Advice: a planted fault is found, nothing where nothing matters, and the line can be pasted."""

import json
import re
from dataclasses import replace
from html import escape
from typing import NamedTuple

import pytest
from marks import long
from startup_logs import v1_log

from kvsim.cli import main
from kvsim.engines import ENGINES
from kvsim.errors import ConfigError
from kvsim.machine import model_of
from kvsim.results.numerals import SPACE
from kvsim.run.simulation import simulate
from kvsim.search.advice import build_page, not_tried, present, record, rows, sentences
from kvsim.search.advise import Tried, advise, changed, changes_of, trials_on
from kvsim.search.compare import How, Load, load_of
from kvsim.search.slo import parse_slo
from kvsim.settings.config import RunConfig, make_config
from kvsim.settings.server.arguments import VLLM, Used
from kvsim.settings.server.command import (
    arguments,
    flags,
    given_settings,
    serve_line,
    settings_of_command,
)
from kvsim.workload.native import write
from kvsim.workload.spec import Workload, make_trace

SLO = "p99_ttft<300ms,p99_tpot<50ms"
ROOFLINE = {"cost": {"model": "roofline"}, "max_model_len": 1024}
FEW_SLOTS = {**ROOFLINE, "request_rate": 40.0, "max_num_seqs": 3, "num_gpu_blocks_override": 400}


def advised(load, config, slo, seeds=2):
    return advise(load, config, parse_slo(slo), changes_of(config), seeds=seeds, how=How(jobs=1))


class Asked(NamedTuple):
    """A load, settings and the advice on them."""

    load: Load
    config: RunConfig
    advice: object


@pytest.fixture(scope="module")
def trace():
    return make_trace(
        Workload("random", requests=40, input_len=60, output_len=40, range_ratio=0.4), 3
    )


@pytest.fixture(scope="module")
def few_slots(trace):
    """The planted fault: three slots for 40 requests a second."""
    config = make_config(FEW_SLOTS)
    load = load_of(trace, [("", config)])
    return Asked(load, config, advised(load, config, SLO, seeds=4))


@long
def test_a_planted_fault_is_found_and_mended(few_slots):
    advice = few_slots.advice
    assert advice.base.met == 0
    assert advice.best.settings["max_num_seqs"] >= 16
    assert advice.best.met == 4
    assert advice.best.verdict.high < 0
    now, change, _ = sentences(advice)
    assert now.replace(SPACE, " ").startswith("The present settings miss TTFT p99 < 300 ms: it is ")
    assert "max_num_seqs" in change
    assert "which meets all objectives" in change


def test_values_are_those_of_the_runs_on_the_same_seeds(few_slots):
    """Common random numbers: each value is that of a run of this seed, base and change alike."""
    advice, load = few_slots.advice, few_slots.load
    for tried in (advice.base, advice.best):
        for seed, value in enumerate(tried.values(advice.decides)[:2]):
            config = make_config({**_table(tried.config), "seed": seed})
            assert simulate(load.of(seed), config).summary["p99_ttft_ms"] == value


def test_what_makes_no_difference_is_said_and_stops_early(few_slots):
    advice = few_slots.advice
    same = [each for each in advice.singles if each.verdict.finding == "same"]
    assert {each.changes[0].key for each in same} >= {"enable_prefix_caching", "watermark"}
    looked = {len(each.runs) for each in same}
    assert looked == {4}, "a settled change is not run on further seeds"
    listed = [name.strip() for name, change, _ in rows(advice) if change == "no difference"]
    assert "off" in listed
    assert "watermark" in sentences(advice)[2]


@pytest.mark.parametrize(("bound", "tone"), [(">=", "better"), (">", "worse"), ("<", "worse")])
def test_a_figure_at_its_limit_is_shown_as_its_objective_takes_it(few_slots, bound, tone):
    advice, trace = few_slots.advice, few_slots.load.trace
    slo = parse_slo(f"completed{bound}{len(trace.rows)}")
    base = replace(advice.base, objectives=slo)
    judged = advice._replace(decides=slo.each[0], base=base, best=base, singles=[], untried=[])
    page = build_page(judged, trace, present(judged), [], "")
    assert re.search(f'<dd class="value {tone}">{len(trace.rows)}<', page)


def only(monkeypatch, *keys):
    """Try these settings of vLLM V1 alone."""
    few = tuple(trial for trial in trials_on("vllm-v1") if trial.key in keys)
    monkeypatch.setattr("kvsim.search.advise.TRIALS", few)


def test_a_change_that_alters_answers_is_shown_but_not_part_of_the_line(trace, monkeypatch):
    """A pool that is too small: fp8 halves the bytes, but a simulation cannot see its quality."""
    only(monkeypatch, "kv_cache_dtype", "gpu_memory_utilization", "watermark")
    config = make_config({**FEW_SLOTS, "max_num_seqs": 64, "num_gpu_blocks_override": 64})
    load = load_of(trace, [("", config)])
    advice = advised(load, config, "p99_ttft<1ms", seeds=4)
    [small] = [each for each in advice.singles if each.changes[0].key == "kv_cache_dtype"]
    assert small.config.num_gpu_blocks_override == 128, "the same bytes"
    assert advice.helps(small)
    assert "kv_cache_dtype" not in advice.best.settings
    assert "Left out: kv_cache_dtype fp8" in sentences(advice)[2]
    assert any("gpu_memory_utilization 0.95" in line for line in not_tried(advice))


def test_an_exact_replay_is_run_once_and_keeps_good_settings(trace):
    """Recorded arrivals far apart: no setting of the scheduler can matter."""
    spread = [replace(row, arrival_ns=i * 10**9) for i, row in enumerate(trace.rows[:12])]
    slow = replace(trace, rows=spread, source={})
    config = make_config({**ROOFLINE, "engine": "vllm-0.3.3"})
    advice = advise(
        load_of(slow, [("", config)]), config, parse_slo(SLO), changes_of(config), how=How(jobs=1)
    )
    assert not advice.redrawn
    assert {len(each.runs) for each in advice.singles} == {1}
    assert advice.best is advice.base
    kept = sentences(advice)[1]
    assert kept.startswith("No tested change helps: of ") and "kvsim size" not in kept
    base = replace(advice.base, objectives=parse_slo("p99_ttft<0.000001s"))
    missed = advice._replace(base=base, best=base)
    assert sentences(missed)[1].endswith("the replicas or the rate that would do.")


@pytest.mark.parametrize("engine", ENGINES)
def test_only_settings_that_the_engine_has_are_tried(engine):
    base = make_config({"engine": engine, "max_model_len": 4096})
    changes = changes_of(base)[0]
    assert len({change.key for change in changes}) >= 3
    own = {trial.key for trial in trials_on(engine)}
    assert {change.key for change in changes} <= own
    flagged = {f.effect.key for f in VLLM.flags.values() if isinstance(f.effect, Used)}
    assert own <= flagged


def test_releases_are_asked_only_what_they_know():
    """Facts of `engine/arg_utils.py`: 0.12.0 has no watermark and no reservation, 0.24.0 has."""

    def keys(version):
        base = make_config({"vllm_version": version, "max_model_len": 4096})
        return {change.key for change in changes_of(base)[0]}

    newer = {"watermark", "scheduler_reserve_full_isl"}
    assert not newer & keys("0.12.0")
    assert keys("0.19.0") & newer == {"scheduler_reserve_full_isl"}
    assert newer <= keys("0.33.0")
    assert "async_scheduling" not in keys("0.9.2")


def test_a_changed_block_keeps_the_bytes_of_the_pool():
    base = make_config({"num_gpu_blocks_override": 999, "block_size": 16, "max_model_len": 2048})
    assert changed(base, {"block_size": 64}).num_gpu_blocks_override == 249
    assert changed(base, {"max_num_seqs": 7}).num_gpu_blocks_override == 999
    with pytest.raises(ConfigError, match="num_gpu_blocks_override decides"):
        changed(base, {"gpu_memory_utilization": 0.95})


GIVEN = "vllm serve Qwen/Qwen3-8B -tp 2 --port 80 --max-num-seqs=256 --served-model-name 'a b' c"


def test_the_line_says_what_is_advised_and_keeps_the_rest():
    changes = {"max_num_seqs": 64, "enable_prefix_caching": False, "watermark": 0.01}
    line = serve_line(arguments(GIVEN, None), changes)
    assert line.startswith("vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 --port 80")
    assert "--served-model-name 'a b' c" in line
    assert line.count("--max-num-seqs") == 1
    before, after = (settings_of_command(text)[0].settings for text in (GIVEN, line))
    assert after == {**before, **changes}


def test_a_line_made_of_settings_means_these_settings():
    table = {"max_num_batched_tokens": 4096, "kv_cache_dtype": "fp8", "async_scheduling": False}
    config = make_config({**table, "model": "llama-3-8b"})
    line = serve_line([], given_settings(config, model_of(config).source))
    assert "meta-llama/Meta-Llama-3-8B" in line
    assert settings_of_command(line)[0].settings.items() >= table.items()
    assert flags({"a_b": True, "c": False}) == ["--a-b", "--no-c"]


def test_the_record_holds_everything(few_slots):
    made = record(few_slots.advice, "the line")
    assert json.loads(json.dumps(made)) == made
    assert len(made["tried"]) == len(few_slots.advice.singles)
    assert made["advice"]["seeds_met"] == 4
    assert all(each["why"] for each in made["tried"])


@pytest.mark.parametrize(
    ("further", "word"),
    [
        (["--slo", "p99_tfft<2s"], "p99_ttft"),
        (["--slo", SLO, "--max-model-len", "64"], "rejected<="),
        (["--slo", "goodput>3"], "no such figure"),
        (["--slo", SLO, "--num-gpu-blocks-override", "3"], "--num-gpu-blocks-override"),
        (["--slo", SLO, "--seeds", "1"], "--seeds"),
        ([], "--slo"),
    ],
)
def test_bad_input_is_one_line(trace, tmp_path, capsys, further, word):
    write(trace, str(tmp_path / "load.jsonl"))
    with pytest.raises(SystemExit) as stop:
        main(["advise", str(tmp_path / "load.jsonl"), "--jobs", "1", *further])
    shown = capsys.readouterr()
    assert stop.value.code == 2
    [line] = [line for line in shown.err.splitlines() if not line.startswith("note:")]
    assert line.startswith("kvsim: ")
    assert word in line


def test_the_command_prints_three_sentences_a_table_and_the_line(
    trace, tmp_path, capsys, monkeypatch
):
    """The story of somebody who pastes a command and gets one back."""
    only(monkeypatch, "max_num_seqs", "watermark")
    write(trace, str(tmp_path / "load.jsonl"))
    command = "vllm serve meta-llama/Llama-3.1-8B --port 8000 --max-num-seqs 2 --max-model-len 1K"
    asked = [
        *["advise", str(tmp_path / "load.jsonl"), "--slo", SLO, "--vllm", command],
        *["--request-rate", "40", "--cost-model", "roofline", "--num-prompts", "20"],
        *["--seeds", "2", "--jobs", "1"],
    ]
    printed = []
    for further in (["--out", str(tmp_path / "out")], ["--json"]):
        with pytest.raises(SystemExit) as stop:
            main([*asked, *further])
        assert stop.value.code == 0
        printed.append(capsys.readouterr().out)
    made = json.loads(printed[1])
    assert made["command"] in printed[0].splitlines()
    assert json.loads((tmp_path / "out" / "advice.json").read_text()) == made
    page = (tmp_path / "out" / "advice.html").read_text()
    advised = made["advice"]["settings"].items()
    title = f"Set {', '.join(f'{k} {v}' for k, v in advised)}" if advised else "No tested change"
    assert f"<h1>{title}" in page
    for sentence in (*made["diagnosis"][:-1], *made["sentences"]):
        assert escape(sentence) in page
    assert escape(made["command"]) in page
    assert made["command"].startswith("vllm serve meta-llama/Llama-3.1-8B --port 8000 --max-")
    text = " ".join(printed[0].split())
    for sentence in made["sentences"]:
        assert " ".join(sentence.split()) in text
    assert "watermark" in text


@pytest.mark.parametrize(("further", "overridden"), [([], False), (["4000"], True)])
def test_blocks_that_a_log_counted_are_no_argument_of_the_server(
    further, overridden, trace, tmp_path, capsys, monkeypatch
):
    """Of several groups of layers, too, whose tokens are those of one group."""
    only(monkeypatch, "max_num_seqs")
    write(trace, str(tmp_path / "load.jsonl"))
    log = tmp_path / "vllm.log"
    log.write_text(v1_log(arguments="'model': 'gpt-oss-20b'").replace("1.26x", "2.37x"))
    asked = ["advise", str(tmp_path / "load.jsonl"), "--slo", SLO, "--startup-log", str(log)]
    asked += ["--num-prompts", "20", "--seeds", "2", "--jobs", "1", "--json"]
    with pytest.raises(SystemExit) as stop:
        main([*asked, *(word for n in further for word in ("--num-gpu-blocks-override", n))])
    shown = capsys.readouterr()
    assert stop.value.code == 0
    assert ("5,176 blocks, not 2,588" in shown.err) is not overridden
    assert ("--num-gpu-blocks-override" in json.loads(shown.out)["command"]) is overridden


def _table(config):
    return {key: getattr(config, key) for key in RunConfig.__struct_fields__}


def test_a_change_that_ends_the_run_is_no_advice(few_slots):
    best = few_slots.advice.best
    broken = Tried(best.changes, few_slots.config, best.objectives)
    broken.runs = [{**run, "outcome": {"kind": "deadlock"}} for run in best.runs]
    assert broken.mean(few_slots.advice.decides) is None
    assert not few_slots.advice.helps(broken)
