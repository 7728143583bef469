import math
import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

from kvsim.results.plain import flat, plain, to_toml
from kvsim.settings.config import RunConfig, make_config, to_table

scalars = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, width=32)
texts = st.sampled_from(["", "a b", '"quoted"', "back\\slash", "é\t😀", "[x]", "# no comment"])
keys = st.sampled_from(["model", "seed", "cost", "link", "args"])
leaves = scalars | texts | st.lists(scalars, max_size=3)
tables = st.dictionaries(
    keys,
    leaves | st.dictionaries(keys, leaves | st.dictionaries(keys, leaves, min_size=1), min_size=1),
)


@settings(max_examples=examples(50))
@given(tables)
def test_any_table_comes_back_from_its_toml(table):
    assert tomllib.loads(to_toml(plain(table))) == table


def test_the_configuration_shown_is_the_configuration_run():
    config = make_config(
        {"request_rate": math.inf, "cost": {"model": "constant", "link": {"latency_us": 5}}}
    )
    again = make_config(tomllib.loads(to_toml(plain(to_table(config)))))
    assert again == config
    assert isinstance(again, RunConfig)


def test_nested_tables_get_dotted_keys():
    assert flat({"a": 1, "b": {"c": {"d": 2}}}) == {"a": 1, "b.c.d": 2}
