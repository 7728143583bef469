"""Pages in a real browser: whole, quiet, and alone."""

import re

import pytest
from browsers import eventually
from marks import long
from runs import result
from small_engines import engine, make_trace
from worlds import config, trace

import kvsim
from kvsim.cost.crossover import crossings
from kvsim.cost.profile import load_profile
from kvsim.explain.differences import compare_replay
from kvsim.machine import load_hardware, load_model
from kvsim.report.pages.compare import build_comparison, build_diff
from kvsim.report.pages.cost import build_crossover, build_profile
from kvsim.report.pages.run import build_page
from kvsim.results.blockmap import BlockMapWatcher
from kvsim.settings.config import make_config


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
    return build_page(run.summary, run.requests, run.steps)


def named(*runs):
    return [(f"run {i}", run) for i, run in enumerate(runs)]


def certain_comparison(*runs):
    """With the intervals of one replay."""
    made = named(*runs)
    comparison = compare_replay(
        [(name, run.summary, run.requests) for name, run in made], level=0.05, margin=0.01
    )
    return build_comparison(made, comparison)


def ledger():
    """A run with every kind of wait, preemptions and a prefix cache."""
    made = make_trace([(5, 5 + i % 30, 3 + i % 12, i % 4) for i in range(60)])
    return report(kvsim.simulate(made, engine("0.6.3 prefixes")))


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
    "report": lambda: report(result(rate=8, swap=True)),
    "small": lambda: report(kvsim.simulate(trace((0, 8, 4), (0, 8, 4)), config())),
    "empty": lambda: report(kvsim.simulate(trace(), config())),
    "comparison": lambda: build_comparison(named(result(rate=8), result(rate=8, blocks=960))),
    "same": lambda: build_comparison(named(result(4), result(4))),
    "certain": lambda: certain_comparison(*(result(400, blocks=n) for n in (480, 440, 480))),
    "difference": lambda: build_diff(*named(result(rate=8), result(rate=8, blocks=960))),
}


SELDOM = ("profile", "same", "certain", "empty")
"""Pages that few people see, and variants of others."""


def each(*names):
    return [pytest.param(name, marks=long) if name in SELDOM else name for name in names]


@pytest.mark.parametrize("name", each(*PAGES))
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


@pytest.mark.parametrize("name", each("report", "mapped", "comparison", "certain", "difference"))
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
    visible = "document.getElementById('rates').data[0].visible"
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
    page = show("small")
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
    path.write_text(PAGES["small"](), encoding="utf-8")
    page.goto(path.as_uri())
    page.locator("#gpu-blocks", has_text="need a browser of 2023 or later").wait_for()
    page.close()


READ = """[...document.querySelectorAll('#over-time .plot')].filter((plot) => {
    const { top, bottom } = plot.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
}).map((plot) => plot.querySelector('.hoverlayer .legend')?.textContent ?? '')"""
"""What each time chart in the window says under the crosshair."""


def test_one_crosshair_reads_every_time_chart_in_the_window(show):
    page = show("report")
    plot = page.locator("#queues")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 70)
    eventually(page, f"{READ}.length > 1 && {READ}.every((text) => text !== '')")
    instants = [float(re.match(r"[\d.]+", text)[0]) for text in page.evaluate(READ)]
    assert max(instants) - min(instants) < 0.6  # seconds: the widest bins
    page.mouse.move(2, 2)
    eventually(page, f"{READ}.every((text) => text === '')")
    assert page.noise == []


def test_a_request_is_found_opened_and_told(show):
    page = show("report")
    rows = page.locator("#explorer tr[data-row]")
    page.locator("#explorer[data-ready=true]").wait_for()
    assert rows.count() == 25
    number = "document.querySelectorAll('#explorer tr[data-row]').length"
    page.locator("#explorer input").fill("r7")
    eventually(page, f"{number} === 11")
    page.locator("#explorer select").select_option("preempted")
    eventually(page, f"{number} < 11")
    page.locator("#explorer select").select_option("")
    page.locator("#explorer input").fill("r71")
    eventually(page, f"{number} === 1")
    rows.first.click()
    told = page.locator(".story").inner_text()
    assert "kvsim why DIR --request r71" in told and "first token" in told and "own decode" in told
    rows.first.click()
    eventually(page, "document.querySelector('.story') === null")
    page.locator("#explorer input").fill("")
    page.locator("#explorer button[data-sort=prompt]").click()
    cells = "[...document.querySelectorAll('#explorer tr[data-row] td:nth-child(6)')]"
    prompts = page.evaluate(f"{cells}.map((cell) => Number(cell.textContent.replace(',', '')))")
    assert prompts == sorted(prompts, reverse=True) and len(prompts) == 25
    assert page.noise == []


def test_a_click_on_a_dot_opens_the_story_of_its_request(show):
    page = show("report")
    page.locator("#ttft").scroll_into_view_if_needed()
    x, y, index = page.evaluate("""() => {
      const plot = document.getElementById("ttft");
      const { left, top } = plot.getBoundingClientRect();
      const { xaxis, yaxis } = plot._fullLayout;
      const { x, y, customdata } = plot.data[0];
      const i = y.indexOf(Math.max(...y));
      return [left + xaxis._offset + xaxis.d2p(x[i]), top + yaxis._offset + yaxis.d2p(y[i]),
        customdata[i]];
    }""")
    page.mouse.click(x, y)
    page.locator(".story").wait_for()
    assert f"--request r{index}" in page.locator(".story").inner_text()
    assert page.noise == []


def test_nothing_covers_a_chart(show):
    page = show("report")
    page.locator("#gpu-blocks").hover()
    assert page.locator(".modebar").count() == 0
    covered = """[...document.querySelectorAll('figure')].some((figure) => {
      const button = figure.querySelector('figcaption button').getBoundingClientRect();
      return button.bottom > figure.querySelector('.plot').getBoundingClientRect().top;
    })"""
    assert not page.evaluate(covered)


@pytest.mark.parametrize("name", each("report", "crossover", "profile"))
def test_names_of_ticks_do_not_overlap(show, name):
    page = show(name)
    for width in (800, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(400)
        overlapping = """[...document.querySelectorAll('.plot')].filter((plot) => {
          const boxes = [...plot.querySelectorAll('.xaxislayer-above text')]
            .map((text) => text.getBoundingClientRect()).sort((a, b) => a.left - b.left);
          return boxes.some((box, i) => i && box.left < boxes[i - 1].right - 1);
        }).map((plot) => plot.id)"""
        assert page.evaluate(overlapping) == []


@long
def test_a_dark_page_is_printed_light(show):
    page = show("same")
    page.emulate_media(color_scheme="dark")
    line = "document.querySelector('#dist-e2el').data[0].line.color"
    eventually(page, f"{line} === '#98a4b2'")
    page.emulate_media(media="print", color_scheme="dark")
    ground = "getComputedStyle(document.documentElement).getPropertyValue('--card').trim()"
    assert page.evaluate(ground) == "#ffffff"
    eventually(page, f"{line} === '#6b7785'")
    page.emulate_media(media="screen", color_scheme="light")


@long
def test_charts_are_printed(show):
    page = show("small")
    page.emulate_media(media="print")
    assert page.locator("#gpu-blocks svg.main-svg").first.is_visible()
    assert len(page.pdf()) > 20_000
    page.emulate_media(media="screen")
