"""Numbers with a suffix, as vLLM reads them, in flags, in files and in `--set`."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cli.settings import typed_settings
from kvsim.errors import ConfigError
from kvsim.settings.config import load_config, make_config
from kvsim.settings.parsing import human_readable_int


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32768", 32_768),
        ("1k", 1_000),
        ("1K", 1_024),
        ("25.6k", 25_600),
        ("32K", 32_768),
        ("1M", 1_048_576),
        ("1m", 1_000_000),
        ("10G", 10 * 2**30),
        ("10GiB", 10 * 2**30),
        ("10g", 10**10),
        ("2.5g", 2_500_000_000),
        ("1T", 2**40),
        (" 8K ", 8_192),
    ],
)
def test_values(text: str, expected: int) -> None:
    """The first four are the examples in vLLM's `human_readable_int`."""
    assert human_readable_int(text) == expected


@pytest.mark.parametrize("text", ["", "K", "1.5K", "1.5", "32 K", "32kb", "10GB", "1e3", "-5", "∞"])
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no|has decimals"):
        human_readable_int(text)


@given(st.integers(0, 10**6), st.sampled_from("kmgtKMGT"))
def test_upper_case_is_more(number: int, suffix: str) -> None:
    assert human_readable_int(str(number)) == number
    lower = human_readable_int(f"{number}{suffix.lower()}")
    assert lower <= human_readable_int(f"{number}{suffix.upper()}") <= 1.1 * lower


KEYS = ["max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"]


@pytest.mark.parametrize("key", KEYS)
def test_flags_files_and_assignments_agree(key: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'{key} = "32K"')
    for config in (
        load_config(str(file)),
        load_config(flags=typed_settings({key: "32K"})),
        load_config(assignments=[f"{key}=32K"]),
        make_config({key: 32_768}),
    ):
        assert getattr(config, key) == 32_768


@pytest.mark.parametrize("value", [-1, "-1", "auto", "AUTO"])
def test_the_longest_that_fits(value: int | str) -> None:
    assert make_config({"max_model_len": value}).max_model_len == "auto"
    assert typed_settings({"max_model_len": str(value)}) == {"max_model_len": "auto"}


@pytest.mark.parametrize("value", ["1.5K", "many", 0, "0", -2, 1.5, True])
@pytest.mark.parametrize("key", KEYS)
def test_bad_numbers_name_file_and_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^here.toml: {key}: ") as caught:
        make_config({key: value}, "here.toml")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=f"^--{key.replace('_', '-')}: "):
        typed_settings({key: str(value)})


def test_only_max_model_len_may_be_automatic() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        make_config({"max_num_batched_tokens": "auto"})
