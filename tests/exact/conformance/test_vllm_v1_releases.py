"""vLLM V1 decides what the real engine of each release decided: every field, tables included."""

import pytest
from exact.conformance.corpus import CORPUS, check, recorded_lines
from marks import long
from shared import needs_shared

FUZZ = CORPUS / "vllm-v1-releases" / "fuzz"
GROUPS = (
    ("0.8.5.post1",),
    ("0.9.0",),
    ("0.9.2",),
    ("0.10.0",),
    ("0.10.1.1",),
    ("0.11.0", "0.10.2"),
    ("0.11.2",),
    ("0.18.0", "0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0"),
    ("0.22.0", "0.19.0", "0.20.0"),
    ("0.23.0",),
    ("0.26.0", "0.24.0", "0.25.0"),
    ("0.27.0",),
    ("0.30.0", "0.28.0", "0.29.0"),
    ("0.32.0", "0.31.0"),
    ("0.33.0",),
)
"""Releases that were recorded; those of a group decide alike."""


@needs_shared("conformance/vllm-v1-releases")
@pytest.mark.parametrize("name", [group[0] for group in GROUPS])
def test_some_cases_of_each_group(name: str) -> None:
    for case in recorded_lines("vllm-v1", FUZZ / f"{name}.jsonl.gz", every=24):
        check("vllm-v1", case)


@long
@needs_shared("conformance/vllm-v1-releases")
@pytest.mark.parametrize("name", [name for group in GROUPS for name in group])
def test_all_cases_of_each_release(name: str) -> None:
    for case in recorded_lines("vllm-v1", FUZZ / f"{name}.jsonl.gz", every=1):
        check("vllm-v1", case)


@needs_shared("conformance/vllm-v1-releases")
def test_no_release_is_left_out() -> None:
    names = {path.name.removesuffix(".jsonl.gz") for path in FUZZ.iterdir()}
    assert names == {name for group in GROUPS for name in group}
