"""Pages in a real browser: whole, quiet, and alone."""

import re

import pytest
from browsers import eventually
from runs import real_run
from small_engines import engine, make_trace
from tiny import no_run, tiny_run

import kvsim
from kvsim.blockmap.watch import BlockMapWatcher
from kvsim.config import make_config
from kvsim.cost.crossover import crossings
from kvsim.cost.profile import load_profile
from kvsim.hardware import load_hardware
from kvsim.models import load_model
from kvsim.pages.compare import build_comparison
from kvsim.pages.crossover import build_crossover
from kvsim.pages.diff import build_diff
from kvsim.pages.profile import build_profile
from kvsim.pages.run import build_page
from kvsim.report.replayed import compare_replay
from kvsim.report.summary import summarise


@pytest.fixture(scope="module")
def show(opened):
    """Open one of `PAGES`, once."""
    pages = {}

    def open_page(name):
        if name not in pages:
            pages[name] = opened(name, PAGES[name](), drawn=name != "empty")
        return pages[name]

    return open_page


def report(run):
    steps, requests, gaps, meta = run
    return build_page(summarise(steps, requests, gaps, meta), requests, steps)


def comparison(*runs):
    return build_comparison([named(f"run {i}", run) for i, run in enumerate(runs)])


def difference(*runs):
    return build_diff(*(named(f"run {i}", run) for i, run in enumerate(runs)))


def certain_comparison(*runs):
    """With the intervals of one replay."""
    made = [named(f"run {i}", run) for i, run in enumerate(runs)]
    comparison = compare_replay([run[:3] for run in made], level=0.05, margin=0.01)
    return build_comparison(made, comparison)


def named(name, run):
    steps, requests, gaps, meta = run
    return name, summarise(steps, requests, gaps, meta), requests, steps


def ledger():
    """A run with every kind of wait, preemptions and a prefix cache."""
    result = kvsim.simulate(
        make_trace([(5, 5 + i % 30, 3 + i % 12, i % 4) for i in range(60)]),
        engine("0.6.3 prefixes"),
    )
    return report((result.steps, result.requests, result.token_gaps_ns, result.meta))


def mapped():
    """A run of which it is known who held which block, on the GPU and swapped out."""
    watcher = BlockMapWatcher()
    result = kvsim.simulate(
        make_trace([(5, 5 + i % 30, 3 + i % 12, i % 4) for i in range(60)]),
        engine("0.6.3 swap"),
        watcher=watcher,
    )
    return build_page(result.summary, result.requests, result.steps, watcher.block_map())


def crossover():
    found = crossings(
        load_model("llama-3-8b"), load_hardware("h200-sxm"), make_config({}), [64, 8192], ["layer"]
    )
    return build_crossover([found], "h200-sxm", [512, 8192])


PAGES = {
    "profile": lambda: build_profile(load_profile("h200-sxm-llama-3-8b-public")),
    "crossover": crossover,
    "mapped": mapped,
    "ledger": ledger,
    "report": lambda: report(real_run(rate=8, swap=True)),
    "tiny": lambda: report(tiny_run()),
    "empty": lambda: report(no_run()),
    "comparison": lambda: comparison(real_run(rate=8), real_run(rate=8, blocks=960)),
    "same": lambda: comparison(tiny_run(), tiny_run()),
    "certain": lambda: certain_comparison(
        *(real_run(400, rate=2, blocks=blocks) for blocks in (480, 440, 480))
    ),
    "difference": lambda: difference(real_run(rate=8), real_run(rate=8, blocks=960)),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_draws_every_figure_without_a_word_or_a_request(show, name):
    page = show(name)
    drawn = page.evaluate(
        "[...document.querySelectorAll('.plot')].map(plot => !!plot.querySelector('svg .xtick'))"
    )
    assert all(drawn)
    assert (len(drawn) == 0) == (name == "empty")
    assert page.locator("h1").is_visible()
    assert all(heading.is_visible() for heading in page.locator("h2").all())
    assert page.noise == []


@pytest.mark.parametrize("name", ["report", "mapped", "comparison", "certain", "difference"])
def test_a_page_fits_the_width_of_the_window(show, name):
    page = show(name)
    for width in (360, 768, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        eventually(page, f"document.documentElement.scrollWidth <= {width}")
        narrow = "Math.max(...[...document.querySelectorAll('.plot svg')].map(e => e.clientWidth))"
        eventually(page, f"{narrow} < {width}")
    assert page.noise == []


def test_a_zoom_of_one_time_figure_is_a_zoom_of_all(show):
    page = show("report")
    ranges = """[...document.querySelectorAll('#over-time .plot')]
        .map(plot => JSON.stringify(plot.layout.xaxis.range))"""
    [whole] = set(page.evaluate(ranges))
    plot = page.locator("#queues")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 70, steps=4)
    page.mouse.up()
    eventually(page, f"new Set({ranges}).size === 1 && !{ranges}.includes('{whole}')")
    page.wait_for_timeout(400)  # two clicks in quick succession would be one gesture
    page.mouse.dblclick(box["x"] + 400, box["y"] + 60)
    eventually(page, f"new Set({ranges}).size === 1 && {ranges}.includes('{whole}')")


def test_a_legend_hides_and_shows_its_line(show):
    page = show("report")
    button = page.locator("#over-time .legend button").first
    visible = "document.getElementById('gpu-blocks').data[0].visible"
    button.click()
    eventually(page, f"{visible} === false")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    eventually(page, f"{visible} === true")


def test_the_block_map_tells_whose_blocks_are_under_the_pointer(show):
    page = show("mapped")
    plot = page.locator("#block-owners")
    page.locator("#block-owners[data-painted=light]").wait_for()
    images = "document.getElementById('block-owners').layout.images.map(each => each.source)"
    whole = page.evaluate(images)
    assert len(whole) == 2 and all(source.startswith("data:image/png") for source in whole)
    plot.scroll_into_view_if_needed()
    box = plot.locator(".nsewdrag").first.bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    told = page.locator(".told")
    told.wait_for()
    assert re.fullmatch(r"request r\d+\nGPU block 10 at [\d.]+ m?s", told.inner_text())
    [owner] = re.findall(r"r\d+", told.inner_text())
    page.mouse.click(*middle)
    page.locator(f"#block-owners[data-painted='light {owner}']").wait_for()
    alone = page.evaluate(images)
    assert alone[0] != whole[0]
    page.wait_for_timeout(400)  # two clicks in quick succession would be one gesture
    page.mouse.click(*middle)
    page.locator("#block-owners[data-painted=light]").wait_for()
    assert page.evaluate(images) == whole
    page.emulate_media(color_scheme="dark")
    page.locator("#block-owners[data-painted=dark]").wait_for()
    assert page.evaluate(images) != whole
    page.mouse.move(0, 0)
    told.wait_for(state="hidden")
    assert page.noise == []


def test_colours_follow_the_readers_scheme(show):
    page = show("tiny")
    fill = "document.getElementById('gpu-blocks').data[0].fillcolor"
    light = page.evaluate(fill)
    assert light.startswith("#")
    page.emulate_media(color_scheme="dark")
    eventually(page, f"{fill} !== '{light}' && {fill}.startsWith('#')")
    assert page.noise == []


def test_a_browser_that_cannot_unpack_the_charts_says_which_one_can(browser, tmp_path):
    page = browser.new_page()
    page.add_init_script("delete globalThis.DecompressionStream")
    path = tmp_path / "page.html"
    path.write_text(PAGES["tiny"](), encoding="utf-8")
    page.goto(path.as_uri())
    page.locator("#gpu-blocks", has_text="need a browser of 2023 or later").wait_for()
    page.close()


def test_charts_are_printed(show):
    page = show("tiny")
    page.emulate_media(media="print")
    assert page.locator("#gpu-blocks svg.main-svg").first.is_visible()
    assert len(page.pdf()) > 20_000
    page.emulate_media(media="screen")
