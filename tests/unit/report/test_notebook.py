"""Results in a notebook: short, true, drawn by plotly, compared."""

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise

import pytest
from marks import long
from places import ROOT

import kvsim
from kvsim.errors import ConfigError
from kvsim.results.numerals import SPACE, show

LOAD = {"num_prompts": 60, "max_model_len": 8192}


@pytest.fixture(scope="module")
def results():
    return [
        kvsim.simulate("chat", {**LOAD, "num_gpu_blocks_override": blocks}) for blocks in (600, 900)
    ]


def test_tab_shows_the_public_names():
    assert dir(kvsim) == ["Result", "RunConfig", "__version__", "open_trace", "simulate"]
    assert all(getattr(kvsim, name) is not None for name in dir(kvsim))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        kvsim.simulat  # noqa: B018


def test_a_result_is_a_line_and_a_small_table(results):
    small, _ = results
    line = repr(small)
    assert len(line) < 300
    assert "60 requests completed" in line
    assert show(small.summary["p99_ttft_ms"], "ms").replace(SPACE, " ") in line
    html = small._repr_html_()
    assert len(html) < 4000
    for statistic in ("mean", "p50", "p90", "p99"):
        assert f">{show(small.summary[f'{statistic}_ttft_ms'], 'ms')}<" in html


def test_two_results_are_compared(results):
    both = results[0].compare(results[1], ("small", "<large>"))
    assert "num_gpu_blocks_override: 600 → 900" in repr(both)
    frame = both.frame()
    for name, result in zip(("small", "<large>"), results, strict=True):
        assert frame.loc["p99_ttft_ms", name] == result.summary["p99_ttft_ms"]
    row = frame.loc["p99_ttft_ms"]
    assert row["difference"] == row["<large>"] - row["small"]
    assert both.why[0] in repr(both).replace("\n", " ")
    assert "&lt;large&gt;" in both._repr_html_()
    assert "same configuration" in repr(results[0].compare(results[0]))


def test_charts_are_those_of_the_report(results):
    pytest.importorskip("plotly", reason="plotly is not installed")
    drawn = results[0].plot()
    titles = [note.text for note in drawn.layout.annotations]
    assert titles[:3] == ["Offered and served", "Tokens", "TTFT"]
    axes = [axis.domain for axis in drawn.select_yaxes()]
    assert all(above[0] >= below[1] for above, below in pairwise(axes))
    assert axes[-1][0] >= 0
    text = drawn.to_json()
    assert "var(" not in text
    one = results[0].plot("dist-ttft")
    assert [note.text for note in one.layout.annotations] == ["TTFT"]
    with pytest.raises(ConfigError, match="did you mean 'queues'"):
        results[0].plot("queue")


def test_without_plotly_it_says_what_to_install(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvsim\[notebook\]'"):
        results[0].plot()


def test_importing_kvsim_imports_nothing_heavy():
    code = (
        "import sys, kvsim; dir(kvsim);"
        "heavy = {'numpy', 'pandas', 'plotly', 'msgspec', 'kvsim.run.simulation'};"
        "heavy &= sys.modules.keys();"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_simulate_imports_what_runs_need_when_one_begins():
    code = (
        "import sys, kvsim; kvsim.simulate;"
        "late = {'numpy', 'simpy', 'email', 'kvsim.run.attempt', 'kvsim.run.serving'};"
        "assert not late & sys.modules.keys(), late & sys.modules.keys();"
        "done = kvsim.simulate('chat', {'num_prompts': 3}); done.summary;"
        "assert late < sys.modules.keys();"
        "never = {'pandas', 'plotly', 'pyarrow', 'rich', 'torch', 'typer'};"
        "rooms = ('kvsim.cli', 'kvsim.against', 'kvsim.fleet', 'kvsim.report.pages');"
        "found = [each for each in sys.modules if each in never];"
        "found += [each for each in sys.modules if each.startswith(rooms)];"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@long
def test_the_notebook_runs_and_prints_what_it_promises(capsys):
    cells = json.loads((ROOT / "docs/examples/notebook.ipynb").read_text())["cells"]
    drawn, names = find_spec("plotly") is not None, {}
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and (drawn or ".plot(" not in text):
            exec(compile(text, cell["id"], "exec"), names)
            assert cell["outputs"] == [], "without outputs, which would grow stale"
    shown = capsys.readouterr().out
    assert "large avoided" in shown
    assert names["slowest"]["id"].iloc[0] in shown
