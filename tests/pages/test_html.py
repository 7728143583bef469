import json
import re
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.report.pages.figures import chart, compact, line
from kvsim.report.pages.html import Html, document, element, facts, join, placed, table


def test_text_is_escaped_and_html_is_not():
    assert element("b", "<i>", Html("<i>"), None, 3) == "<b>&lt;i&gt;<i>3</b>"
    assert join(["&", Html("&amp;")]) == "&amp;&amp;"


def test_attributes_are_escaped_renamed_and_left_out_where_none():
    made = element("a", class_="x", data_id='"', title=None)
    assert made == '<a class="x" data-id="&quot;"></a>'


def test_elements_without_content_are_not_closed():
    assert element("br") == "<br>"


def test_columns_of_a_table_are_numbers_after_the_first():
    made = table(["name", "value"], [["<a>", 1]])
    assert '<td>&lt;a&gt;</td><td class="number">1</td>' in made


def test_figures_go_where_their_places_go():
    figures = [chart(id, id, "", [line([0], [0], "ink")], {}, {}) for id in "abcd"]
    whole = join((placed(figures[1:2]), "text", element("p", placed(figures[:1]), None)))
    assert [figure.id for figure in whole.figures] == ["b", "a"]
    assert not placed([])
    rows = [re.search('class="(.+?)"', placed(figures[:n], "trio"))[1] for n in (2, 3, 4)]
    assert rows == ["duo", "trio", "duo"]


def test_traces_of_a_group_have_one_entry_in_the_legend():
    data = [line([0], [0], "ink"), *(line([0], [0], "used", n, legendgroup="g") for n in "ab")]
    [entry] = chart("id", "", "", data, {}, {}).legend
    assert (entry.label, entry.colour, entry.traces, entry.kind) == ("g", "used", (1, 2), "line")


def test_facts_are_written_in_the_unit_of_their_names():
    assert "<dd>2.50\u00a0s</dd><dd>yes</dd>" in re.sub(
        "<dt>.*?</dt>", "", facts({"priced_ns": 2_500_000_000, "eager": True, "none": None})
    )


@pytest.mark.parametrize(
    "x",
    [
        *([0.5, None, -3, 1e-5, 1e16, 12_345.678], ["é", "<b>", "\udcff"], [np.float64(0.1), 2]),
        *([], [1e-7, 99_999.0], [True, False]),
    ],
)
def test_the_page_holds_coordinates_as_json_writes_them(x):
    page = document("kvsim", "t", {"f": placed([chart("f", "f", "", [line(x, x, "ink")], {}, {})])})
    held = re.search('id="figures">(.*?)</script>', page)[1]
    assert json.loads(held)[0]["data"][0]["x"] == x
    written = json.dumps(x, separators=(",", ":")).replace("<", "\\u003c")
    assert f'"x":{written},"y":{written},' in held


@given(
    st.lists(st.floats() | st.integers(-(10**9), 10**9).map(lambda n: n / 2**4)),
    st.sampled_from([3, 5, 8]),
)
def test_short_numbers_are_those_of_python(values, digits):
    written = [None if v != v else float(f"{v:.{digits}g}") for v in values]
    assert list(map(repr, compact(np.array(values, float), digits))) == list(map(repr, written))


def test_ties_and_ends_of_the_scale_are_rounded_as_python_does():
    values = [0.0, -0.0, 1.00005, 1.00015, 99_999.5, 999_995, 2.5e-300, 5e-324, 1e300, inf, -inf]
    assert compact([*values, nan]) == [*(float(f"{v:.5g}") for v in values), None]
