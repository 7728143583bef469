from kvsim.pages.html import Html, element, join, table


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
