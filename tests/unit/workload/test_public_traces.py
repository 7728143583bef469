"""Counts of the public traces, as other programs found them (shared/traces/README.md)."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import pytest
from made import without_lines
from marks import long
from shared import SHARED, needs_shared

from kvsim.explain.info import trace_info
from kvsim.workload import Trace, open_trace
from kvsim.workload.formats import mooncake
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, ceiling_tokens, find_reuse
from kvsim.workload.streams import Stream

CONVERSATION = "traces/mooncake/conversation_trace.jsonl.gz"
SYNTHETIC = "traces/mooncake/synthetic_trace.jsonl.gz"
WEKA = "traces/native-samples/weka_100_sessions.jsonl.gz"
CODE = "traces/azure/AzureLLMInferenceTrace_code.csv.gz"
CHAT = "traces/azure/AzureLLMInferenceTrace_conv.csv.gz"


@cache
def opened(relative: str) -> tuple[Trace, list[Stream]]:
    trace = open_trace(str(SHARED / relative))
    return trace, streams(trace)


HITS = {
    CONVERSATION: [
        (100, 53_794_500, 1_441_992, 904_045),
        (512, 54_063_104, 276_491, 170_899),
        (768, 49_188_096, 182_926, 118_879),
    ],
    SYNTHETIC: [
        (16, 39_850_800, 3_822_794, 1_332_108),
        (100, 39_770_000, 610_091, 212_386),
        (512, 39_802_880, 117_888, 40_148),
        (768, 39_357_696, 78_091, 26_844),
    ],
}
"""Block size, hit tokens, blocks and distinct blocks."""
QUICK = SYNTHETIC, 512
"""The shorter trace, and the block size that the traces have themselves."""


@pytest.mark.parametrize(
    ("relative", "block_size", "hit_tokens", "blocks", "distinct"),
    [
        pytest.param(
            relative,
            *counts,
            marks=[needs_shared(relative)] + [long] * ((relative, counts[0]) != QUICK),
            id=f"{relative.split('/')[-1][:5]}-{counts[0]}",
        )
        for relative, rows in HITS.items()
        for counts in rows
    ],
)
def test_hits_of_a_cache_without_limit(
    relative: str, block_size: int, hit_tokens: int, blocks: int, distinct: int
) -> None:
    trace, identities = opened(relative)
    assert ceiling_tokens(trace.rows, identities, block_size) == hit_tokens
    reuse = find_reuse(trace.rows, identities, Counting(block_size))
    assert (reuse.blocks, reuse.distinct) == (blocks, distinct)


@long
@needs_shared(WEKA)
def test_hits_of_agent_sessions() -> None:
    trace, identities = opened(WEKA)
    assert ceiling_tokens(trace.rows, identities, 64, outputs=True) == 681_017_792
    reuse = find_reuse(trace.rows, identities, Counting(64))
    assert reuse.distinct == 412_535


@long
@needs_shared(CONVERSATION)
def test_figures_of_the_conversation_trace() -> None:
    trace, _ = opened(CONVERSATION)
    info = trace_info(trace, 512)
    assert info["sha256"] == "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
    assert info["requests"] == 12_031
    assert info["input_tokens"]["total"] == 144_793_823
    assert info["output_tokens"]["total"] == 4_122_048
    arrivals = info["arrivals"]
    assert arrivals["distinct_times"] == 1180
    assert round(arrivals["gap_cv"], 2) == 3.03
    assert [round(rate, 1) for rate in arrivals["peak_rate"].values()] == [28, 6.7, 4.1]
    assert [round(100 * share, 1) for share in info["too_long"].values()] == [46.3, 7.0, 0]
    ceiling = info["prefix"]["ceiling"]
    assert round(ceiling[512] * 144_793_823) == 54_063_104
    assert round(ceiling[16] * 144_793_823) == 54_097_440
    ids = info["prefix"]["ids"]
    assert (ids["total"], ids["distinct"], ids["in_every_request"]) == (288_500, 182_790, 1)
    assert any("90.2 % of the gaps" in note for note in info["notes"])


@pytest.mark.parametrize(
    ("relative", "sha256", "native"),
    [
        (
            CODE,
            "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
            "azure2023_code",
        ),
        (
            CHAT,
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
            "azure2023_conv",
        ),
        (
            SYNTHETIC,
            "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
            "mooncake_synthetic",
        ),
    ],
)
@needs_shared("traces/native-samples")
def test_a_source_and_its_native_form_have_the_same_rows(
    relative: str, sha256: str, native: str
) -> None:
    trace, _ = opened(relative)
    other = open_trace(str(SHARED / f"traces/native-samples/{native}.jsonl.gz"))
    assert trace.sha256 == sha256
    assert without_lines(trace) == without_lines(other)


@needs_shared(SYNTHETIC)
def test_a_mooncake_trace_exports_to_itself(tmp_path: Path) -> None:
    trace, _ = opened(SYNTHETIC)
    mooncake.write(trace, str(tmp_path / "again.jsonl"))
    written = (tmp_path / "again.jsonl").read_bytes()
    assert hashlib.sha256(written).hexdigest() == trace.sha256
