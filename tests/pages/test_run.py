"""The report of a run: what it says and draws is what the run's tables hold."""

import json
import re
import subprocess
import sys
import zlib
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marks import long
from places import ROOT
from runs import result
from worlds import MS, config, trace

import kvsim
from kvsim.report.pages import run as run_page
from kvsim.report.pages.latencies import turns_of
from kvsim.report.pages.over_time import passages
from kvsim.report.pages.run import build_page
from kvsim.results.numerals import SPACE
from kvsim.run.result import Result
from kvsim.workload import open_trace

CHAT = str(ROOT / "traces" / "chat.jsonl")
FEATURES: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "l40s",
    "num_prompts": 60,
    "request_rate": 20,
    "max_model_len": 8192,
    "num_gpu_blocks_override": 800,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "acceptance_rate": 0.5}


def page_of(run: Result) -> str:
    return build_page(run.summary, run.requests, run.steps)


def embedded(page: str, id: str) -> Any:
    [data] = re.findall(rf'<script type="application/json" id="{id}">(.*?)</script>', page)
    return json.loads(data)


def figures_in(page: str) -> dict[str, Any]:
    if 'id="figures"' not in page:
        return {}
    return {figure["id"]: figure for figure in embedded(page, "figures")}


def rows_in(page: str) -> dict[str, Any]:
    """The columns that the table of requests is made from."""
    packed = b64decode(embedded(page, "requests-data")["packed"])
    found: dict[str, Any] = json.loads(zlib.decompress(packed))
    return found


def text_of(page: str) -> str:
    body = page[page.index("<body>") : page.index("</main>")]
    body = re.sub(r"<script.*?</script>", " ", body, flags=re.DOTALL)
    return re.sub(r"<[^>]*>", " ", body).replace(SPACE, " ")


@pytest.fixture(scope="module")
def small() -> Result:
    """r1 loses its blocks at 26, gets them back at 56 and ends at 95; r2 is too long."""
    settings = config(num_gpu_blocks_override=5, max_model_len=20, watermark=0.2)
    return kvsim.simulate(trace((0, 8, 4), (0, 8, 4), (1, 30, 1)), settings)


@pytest.fixture(scope="module")
def busy() -> Result:
    return result(rate=8)


def test_every_section_has_a_heading_and_a_link_to_it(busy: Result) -> None:
    page = page_of(busy)
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        *("Key figures", "Latency", "Where time went", "Over time", "Steps", "Lengths"),
        *("Requests", "Prefix cache", "Memory", "Provenance"),
    ]
    for anchor in re.findall(r'href="#(.*?)"', page):
        assert f'<section id="{anchor}">' in page


def test_the_head_says_what_happened(small: Result) -> None:
    head = text_of(page_of(small)).partition("Key figures")[0]
    assert "3 requests in 95.0 ms: 2 completed, 1 rejected (too-long)." in head
    assert "1 preemption, in 33.3 % of the requests: 1 by recompute" in head
    assert "ESTIMATED step times" in head


def test_all_that_is_needed_to_repeat_a_run_is_there(busy: Result) -> None:
    text = text_of(page_of(busy))
    for fact in (busy.meta["trace"]["sha256"], busy.meta["kvsim_version"]):
        assert fact in text
    assert "num_gpu_blocks_override = 480" in text and "[cost]" in text
    assert "480, room for 7,680 tokens" in text


def test_only_figures_with_something_to_show_are_drawn() -> None:
    quiet = result(4, rate=0.1, caching=False, goodput=False)
    always = {"rates", "tokens", "ttft", "itl", "gpu-blocks", "queues", "batch", "fragmentation"}
    always |= {"tpot", "e2el", "waits", "step-time", "kernels", "step-tokens", "ttft-tokens"}
    always |= {"dist-ttft", "dist-tpot", "dist-e2el", "lengths-number", "lengths-e2el"}
    assert figures_in(page_of(quiet)).keys() == always
    busy = figures_in(page_of(result(rate=8, swap=True))).keys()
    assert busy == always | {"blocked", "preemptions", "swaps", "cpu-blocks", "goodput-limits"}
    assert "hit-rate" in figures_in(page_of(result(rate=8)))


def test_few_states_are_drawn_exactly(small: Result) -> None:
    used, *others = figures_in(page_of(small))["gpu-blocks"]["data"]
    steps = small.steps
    instants = {0, *steps["start_ns"].tolist(), *steps["end_ns"].tolist()}
    assert used["x"] == sorted(ns / MS for ns in instants)
    heights = dict(zip(used["x"], used["y"], strict=True))
    for start, blocks in zip(steps["start_ns"], steps["used_blocks"], strict=True):
        assert heights[start / MS] == blocks
    sums = np.sum([used["y"], *(trace["y"] for trace in others)], axis=0)
    assert set(sums.tolist()) == {5}


def test_the_watermark_line_is_where_admission_ends(small: Result) -> None:
    [line] = figures_in(page_of(small))["gpu-blocks"]["layout"]["shapes"]
    assert line["y0"] == line["y1"] == 5 - small.meta["watermark_blocks"] == 4


def test_preemptions_are_drawn_where_they_happened(small: Result) -> None:
    [bars] = figures_in(page_of(small))["preemptions"]["data"]
    there = [x for x, y in zip(bars["x"], bars["y"], strict=True) if y]
    assert there == [pytest.approx(26, abs=1)]
    assert sum(bars["y"]) == 1


def test_the_curve_of_a_latency_reaches_every_completed_request(small: Result) -> None:
    curve = figures_in(page_of(small))["dist-e2el"]["data"][0]
    assert curve["x"] == [56, 95]
    assert curve["y"] == [50, 100]


def test_rates_add_up_to_the_requests_and_tokens_to_those_computed(busy: Result) -> None:
    figures = figures_in(page_of(busy))

    def whole(id: str, i: int) -> float:
        line = figures[id]["data"][i]
        return float(np.sum(np.diff(line["x"]) * line["y"][:-1]))

    summary = busy.summary
    good = round(summary["request_goodput"] * summary["duration"])
    assert 0 < good < summary["completed"]
    assert [round(whole("rates", i)) for i in range(3)] == [
        *(int(np.sum(busy.requests["arrival_ns"] >= 0)), summary["completed"], good)
    ]
    for i, column in enumerate(("prefill_tokens", "decode_seqs")):
        assert whole("tokens", i) == pytest.approx(busy.steps[column].sum(), rel=1e-3)


def test_latencies_over_time_are_those_of_the_requests(busy: Result) -> None:
    figures = figures_in(page_of(busy))
    dots, p50, p99 = figures["ttft"]["data"]
    requests = busy.requests
    for index, x, y in list(zip(dots["customdata"], dots["x"], dots["y"], strict=True))[::7]:
        assert x == pytest.approx(requests["arrival_ns"][index] / 1e9, rel=1e-6)
        ttft = requests["first_token_ns"][index] - requests["arrival_ns"][index]
        assert y == pytest.approx(ttft / 1e9, rel=1e-4)
    known = [(a, b) for a, b in zip(p50["y"], p99["y"], strict=True) if a is not None]
    assert known and all(a <= b for a, b in known)
    longest = max(y for y in figures["itl"]["data"][1]["y"] if y is not None)
    gaps = np.diff(busy.steps["end_ns"])[busy.steps["decode_seqs"][1:] > 0]
    assert longest == pytest.approx(gaps.max() / 1e6, rel=1e-3)


def test_the_ledger_over_time_adds_up_to_the_latencies(busy: Result) -> None:
    figures, requests = figures_in(page_of(busy)), busy.requests
    parts = figures["waits"]["data"]
    height = np.sum([[y or 0 for y in part["y"][:-1]] for part in parts], axis=0)
    edges = np.array(parts[0]["x"]) * 1e9
    done = np.array(requests["status"]) == "completed"
    arrived, _ = np.histogram(requests["arrival_ns"][done], edges)
    # Parts below a thousandth of the whole are not drawn.
    assert (height * arrived).sum() == pytest.approx(
        ((requests["finish_ns"] - requests["arrival_ns"])[done] / 1e9).sum(), rel=0.01
    )


def test_kernels_over_time_fill_the_busy_time(busy: Result) -> None:
    parts, steps = figures_in(page_of(busy))["kernels"]["data"], busy.steps
    shares, edges = np.sum([part["y"][:-1] for part in parts], axis=0), np.array(parts[0]["x"])
    busy_s = (steps["end_ns"] - steps["start_ns"]).sum() / 1e9
    assert shares.max() <= 100.1
    # A step is drawn where it begins, so a full bin may be cut at 100 %.
    assert 0.95 * busy_s <= (shares / 100 * np.diff(edges)).sum() <= 1.001 * busy_s


def test_goodput_at_the_limits_is_that_of_the_run(busy: Result) -> None:
    [curve] = figures_in(page_of(busy))["goodput-limits"]["data"]
    share = busy.summary["request_goodput"] / busy.summary["request_throughput"]
    assert curve["y"][curve["x"].index(1)] == pytest.approx(100 * share, rel=1e-3)
    assert curve["y"] == sorted(curve["y"])


def test_turns_are_counted_within_sessions() -> None:
    assert turns_of(["a", "", "b", "a", "a", "b"]).tolist() == [1, 0, 1, 2, 3, 2]


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({"speculative_config": DRAFTS}, {"drafts"}),
        ({"pipeline_parallel_size": 4}, {"bubbles", "lanes"}),
        ({"kv_offloading_size": 16}, {"prompt-tiers"}),
    ],
)
def test_a_feature_shows_itself(settings: dict[str, Any], drawn: set[str]) -> None:
    run = kvsim.simulate(CHAT, {**FEATURES, **settings})
    plain = figures_in(page_of(kvsim.simulate(CHAT, FEATURES))).keys()
    figures = figures_in(page_of(run))
    assert drawn <= figures.keys() and not drawn & plain
    for figure in figures.values():
        axes = {trace.get("yaxis", "y") for trace in figure["data"]}
        assert {f"yaxis{axis[1:]}" for axis in axes} <= figure["layout"].keys()
    assert "utilisation" in plain
    for line in figures["utilisation"]["data"]:
        assert all(0 <= y <= 100 for y in line["y"])
    if drawn == {"drafts"}:
        accepted, rejected, _ = figures["drafts"]["data"]
        assert sum(accepted["y"]) == run.steps["accepted_tokens"].sum() > 0
        assert sum(accepted["y"] + rejected["y"]) == run.steps["draft_tokens"].sum()


def test_a_run_that_is_sent_at_once_shows_what_it_uses_of_the_gpu() -> None:
    run = kvsim.simulate(CHAT, {**FEATURES, "request_rate": float("inf")})
    assert "utilisation" in figures_in(page_of(run))


def test_adapters_show_who_waits_for_them() -> None:
    """The shipped chat trace, its sessions dealt out to four adapters of which two run at once."""
    opened = open_trace(CHAT)
    for row in opened.rows:
        row.lora = f"adapter-{int(row.session[1:]) % 4}" if row.index % 9 else None
    settings = {**FEATURES, "num_gpu_blocks_override": 4000, "enable_lora": True, "max_loras": 2}
    run = kvsim.simulate(opened, settings)
    figures = figures_in(page_of(run))
    queue, dots = figures["adapters"]["data"], figures["ttft-adapter"]["data"][-2:]
    assert {part["name"] for part in queue} == {*(f"adapter-{i}" for i in range(4)), "base model"}
    waited_s = [
        sum(y * w for y, w in zip(part["y"], np.diff(part["x"]), strict=False)) for part in queue
    ]
    requests, name = run.requests, queue[0]["name"]
    assert waited_s == sorted(waited_s, reverse=True)
    of = np.array(requests["lora"]) == name
    waits = (requests["first_scheduled_ns"] - requests["arrival_ns"])[of] / 1e9
    assert waited_s[0] == pytest.approx(waits.sum(), rel=1e-3)
    assert all(a <= b for a, b in zip(dots[0]["x"], dots[1]["x"], strict=True))
    assert dots[1]["x"] == sorted(dots[1]["x"], reverse=True)  # the slowest on top
    assert len(figures["ttft-adapter"]["layout"]["yaxis"]["ticktext"]) == 5
    plain = figures_in(page_of(kvsim.simulate(opened, {**settings, "enable_lora": False})))
    assert not {"adapters", "ttft-adapter"} & plain.keys()


def test_lanes_of_a_pipeline_never_overlap() -> None:
    run = kvsim.simulate(CHAT, {**FEATURES, "pipeline_parallel_size": 4})
    layers, steps = run.meta["cost"]["stages"]["layers"], run.steps
    names = ("start_ns", "end_ns", "host_ns", "head_ns", "send_ns", "stage_wait_ns")
    begin, took = passages({name: steps[name].astype(np.int64) for name in names}, layers)
    assert len(begin) > 100 and (took > 0).all()
    assert (begin[1:] >= begin[:-1] + took[:-1]).all()  # on each stage, one step after another
    assert (begin[:, 1:] >= begin[:, :-1] + took[:, :-1]).all()  # from stage to stage
    assert (begin[:, -1] + took[:, -1] == steps["end_ns"] - steps["start_ns"][0]).all()


def test_limits_are_lines_in_the_charts_of_their_latencies(busy: Result) -> None:
    figures = figures_in(page_of(busy))
    limits = {"ttft": ("y0", 2), "itl": ("y0", 60), "dist-tpot": ("x0", 60)}
    for id, (key, value) in limits.items():
        [line] = figures[id]["layout"]["shapes"]
        assert line[key] == value
    assert figures["dist-e2el"]["layout"]["shapes"] == []


def test_only_the_last_of_the_time_charts_names_the_axis(busy: Result) -> None:
    timed = [figure for figure in figures_in(page_of(busy)).values() if figure["time"]]
    titles = [figure["layout"]["xaxis"]["title"]["text"] for figure in timed]
    assert titles == [*[""] * (len(timed) - 1), "simulated time (s)"]
    assert len({json.dumps(figure["layout"]["xaxis"]["range"]) for figure in timed}) == 1
    assert len({figure["layout"]["margin"]["l"] for figure in timed}) == 1


def test_maps_of_lengths_count_every_completed_request(busy: Result) -> None:
    [number] = figures_in(page_of(busy))["lengths-number"]["data"]
    assert sum(z for row in number["z"] for z in row if z) == busy.summary["completed"]
    assert "prompt 512 to 1,023 tokens" in json.dumps(number["text"])


def test_the_table_of_requests_has_what_the_run_has(busy: Result) -> None:
    rows, requests = rows_in(page_of(busy)), busy.requests
    assert sorted(rows["index"]) == list(range(len(requests["id"])))
    e2el = [f - a for f, a in zip(rows["finish"], rows["arrival"], strict=True)]
    done = [status == "completed" for status in rows["status"]]
    assert e2el[sum(not each for each in done)] == max(
        e for e, each in zip(e2el, done, strict=True) if each
    )
    for place, index in enumerate(rows["index"]):
        assert rows["id"][place] == requests["id"][index]
        assert rows["num_preemptions"][place] == requests["num_preemptions"][index]
        parts = sum(values[place] for values in rows["parts"].values())
        if done[place]:
            assert parts == pytest.approx(e2el[place], abs=len(rows["parts"]) + 1)
    assert sum(rows["good"]) == round(busy.summary["request_goodput"] * busy.summary["duration"])


def test_of_too_many_requests_the_slowest_stay(
    busy: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows_in(page_of(busy))["index"]
    monkeypatch.setattr(run_page, "MOST_BYTES", 4000)
    page = page_of(busy)
    kept = rows_in(page)["index"]
    assert 0 < len(kept) < len(whole) and kept == whole[: len(kept)]
    assert f"The {len(kept)} slowest requests of {len(whole)}." in text_of(page)
    monkeypatch.setattr(run_page, "_MOST", 3)
    assert rows_in(page_of(busy))["index"] == whole[:3]


def test_hostile_names_stay_text(small: Result) -> None:
    hostile = '</script><script>alert(1)</script>"><img src=x onerror=alert(2)>'
    requests = {**small.requests, "id": [f"{hostile}{i}" for i in range(3)]}
    requests["reason"] = [hostile] * 3
    meta = {**small.meta, "trace": {"path": f"/x/{hostile}", "notes": [hostile]}}
    meta |= {"command": hostile, "cost": {"kind": hostile, "source": hostile}}
    meta["config"] = {"engine": hostile, hostile: {"model": hostile}}
    summary = {**small.summary, "meta": meta, "rejected_by_reason": {hostile: 1}}
    page = build_page(summary, requests, small.steps)
    assert "<script>alert" not in page
    assert "<img" not in page[: page.index('id="figures"')]
    assert page.count("</script>") == page_of(small).count("</script>")


def test_a_page_names_nothing_that_it_would_have_to_fetch(busy: Result) -> None:
    page = page_of(busy)
    shell = page[: page.index('<script type="application/json"')]
    assert re.findall(r'(?:src|href)="(?!#|data:,)', shell) == []
    assert "default-src 'none'" in shell.replace("&#x27;", "'")
    assert "url(" not in shell


@pytest.mark.parametrize("number", [0, 1, 3])
def test_runs_with_next_to_nothing_have_a_page(number: int) -> None:
    run = kvsim.simulate(trace(*[(0, 90, 1)] * number), config())  # none fits
    page = page_of(run)
    assert "NaN" not in text_of(page)
    assert "dist-ttft" not in figures_in(page)


def test_the_engine_that_stopped_is_explained(small: Result) -> None:
    outcome = {"kind": "deadlock", "explanation": "nobody moves", "remedy": "more blocks"}
    stopped = replace(small, meta={**small.meta, "outcome": outcome})
    text = text_of(page_of(stopped))
    for words in ("Deadlock", "Nobody moves.", "Remedy: more blocks."):
        assert words in text


def test_long_runs_are_thinned_out(busy: Result) -> None:
    count, times, shift = len(busy.steps["start_ns"]), 30, int(busy.steps["end_ns"][-1])
    long = {name: np.tile(column, times) for name, column in busy.steps.items()}
    for name in ("start_ns", "end_ns"):
        long[name] += np.repeat(np.arange(times) * shift, count)
    page = build_page(busy.summary, busy.requests, long)
    assert len(page) < 1_700_000
    for figure in figures_in(page).values():
        assert all(len(trace["x"]) <= 1501 for trace in figure["data"])


PROGRAM = """
import hashlib, sys
sys.path[:0] = {tests!r}
from runs import result
from kvsim.report.pages.latencies import turns_of
from kvsim.report.pages.run import build_page
from kvsim.report.pages.over_time import passages
run = result(30)
page = build_page(run.summary, run.requests, run.steps)
print(hashlib.sha256(page.encode()).hexdigest())
"""


@long
def test_equal_runs_give_equal_bytes_in_any_process() -> None:
    program = PROGRAM.format(tests=[str(ROOT / "tests" / "support"), str(ROOT / "tests")])
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(("rows", "kind"), [(((0, 8, 4),) * 2, None), (None, "log")])
def test_latencies_that_differ_widely_get_a_logarithmic_axis_with_plain_numbers(
    rows: tuple[tuple[int, int, int], ...] | None, kind: str | None
) -> None:
    run = kvsim.simulate(trace(*rows), config()) if rows else result(rate=8)
    axis = figures_in(page_of(run))["dist-ttft"]["layout"]["xaxis"]
    assert axis.get("type") == kind
    if kind:
        assert [float(text.replace(",", "")) for text in axis["ticktext"]] == axis["tickvals"]
        assert len(axis["ticktext"]) <= 12 and not any("e" in text for text in axis["ticktext"])
