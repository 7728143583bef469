import io

import pytest
from runs import real_run
from tiny import no_run, tiny_run

from kvsim.report import make_console, make_table, render
from kvsim.results.numerals import SPACE
from kvsim.results.summary import summarise


def printed(run, width=110):
    console = make_console(io.StringIO(), width=width)
    render(summarise(*run), console)
    return console.file.getvalue().replace(SPACE, " ")


def test_latencies_and_key_figures_are_shown():
    text = printed(tiny_run())
    [ttft] = [line for line in text.splitlines() if line.strip().startswith("TTFT")]
    assert ttft.split("  ")[-1].strip() == "78.8 ms"  # p99 of 10, 20, 80
    assert "24.0 tok/s output" in text
    assert "21.1 % of prompt tokens hit" in text
    assert "ESTIMATED" in text


def test_rejections_and_preemptions_cannot_be_overlooked():
    text = printed(tiny_run())
    assert "1 rejected (too long)" in text
    assert "1 preemption" in text


def test_reasons_with_brackets_are_not_taken_for_markup():
    steps, requests, gaps, meta = tiny_run()
    requests["reason"][3] = "[bold]too long[/bold]"
    assert "[bold]too long[/bold]" in printed((steps, requests, gaps, meta))


@pytest.mark.parametrize("run", [no_run(), real_run(1), real_run(caching=False)])
def test_any_run_can_be_shown_on_a_narrow_terminal(run):
    assert all(len(line) <= 60 for line in printed(run, 60).splitlines())


def test_no_word_of_a_table_is_broken_as_long_as_there_is_room():
    head = ["replica", "sent", "prompt tokens", "hits", "preempted", "KV mean", "TTFT p99", "ended"]
    row = ["0 prefill", "93", "191,354", f"23.3{SPACE}%", "0", f"4.4{SPACE}%", f"599{SPACE}ms"]
    for width in range(76, 120):
        console = make_console(io.StringIO(), width=width)
        console.print(make_table(*head, rows=[[*row, "finished"]] * 2, pad_edge=False))
        text = console.file.getvalue()
        for cell in ("preempted", "replica", "prefill", *row[1:], "finished"):
            assert cell in text, (width, cell)
