"""`kvsim why` as a user runs it."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from command import run_here
from places import ROOT

from kvsim.explain.story import tail_words
from kvsim.report import read_results
from kvsim.results.statistics import durations_ns


def kvsim(*arguments: str) -> CompletedProcess[str]:
    return run_here(arguments, columns=150)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("why") / "run")
    trace = str(ROOT / "traces" / "chat.jsonl")
    short = ["--num-prompts", "120", "--num-gpu-blocks-override", "700", "--no-report"]
    done = kvsim("run", "--trace", trace, *short, "--engine", "vllm-v1", "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_story_is_told_in_words_and_written_as_a_page(run: str, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    told = kvsim("why", run, "--request", "57", "--html", str(page))
    assert told.returncode == 0, told.stderr
    for words in ("request 57: ", "arrived", "first step", "finished with", "own decode", "cold"):
        assert words in told.stdout
    meanwhile = told.stdout.partition("finished with")[2].split("were computed")[0]
    named = [int(word) for word in meanwhile.replace(",", "").split() if word.isdigit()][1:]
    assert "meanwhile, prompts of" in meanwhile and all(id > 57 for id in named[:5]) and named
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("latency", ["ttft", "tpot", "e2el", "queue"])
def test_a_tail_is_explained_by_what_its_requests_wait_for(
    run: str, latency: str, tmp_path: Path
) -> None:
    """120 requests: two are at p99 or above it, and no other request is slower."""
    told = kvsim("why", run, "--p99", latency, "--html", str(tmp_path / "why.html"))
    assert told.returncode == 0, told.stderr
    text = " ".join(told.stdout.replace("\u00a0", " ").split())
    assert f"{latency.upper() if latency != 'queue' else 'Queue'} p99: " in text
    assert "2 requests of 120 take that long; request " in text
    requests = read_results(run)[1]
    id, said = tail_words(requests, latency)
    page = (tmp_path / "why.html").read_text()
    assert f"Request {id}" in page and all(sentence in page for sentence in said)
    values = durations_ns(requests)[latency]
    assert (values > values[list(requests["id"]).index(id)]).sum() == 1
    assert ("waiting for free blocks" in text.partition("They arrived")[0]) == (latency != "tpot")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--request", "5777"], "no '5777' among 120"),
        ([], "give --request ID, or --p99 ttft"),
        (["--p99", "itl"], "ttft, tpot, e2el, queue"),
        (["--request", "57", "--html", "/proc/none/why.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_told_is_one_line(run: str, arguments: list[str], words: str) -> None:
    told = kvsim("why", run, *arguments)
    assert told.returncode == 2
    assert told.stderr.count("\n") == 1
    assert words in told.stderr.replace("\u00a0", " ")


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    told = kvsim("why", str(tmp_path), "--request", "1")
    assert told.returncode == 2
    assert "summary.json" in told.stderr
