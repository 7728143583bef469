"""Blocks of compressed attention, as public servers of DeepSeek-V4 had them."""

from __future__ import annotations

import pytest

from kvsim.errors import ConfigError
from kvsim.machine import load_model
from kvsim.machine.packed import packed_bytes, packed_groups, packed_request
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config

FLASH = load_model("deepseek-v4-flash")
GIB = 1 << 30


def held(longest: int, in_flight: int) -> list[int]:
    """Blocks of a request: of the last tokens, those of the steps in flight, too."""
    groups = packed_groups(FLASH, range(43), drafts=True)
    return [
        -(-longest // each.block_size)
        if each.window is None
        else -(-min(each.window - 1 + in_flight, longest) // each.block_size) + 1
        for each in groups
    ]


def test_layers_of_deepseek_v4_flash() -> None:
    """21 layers compress 4 tokens and have an indexer, 20 compress 128; all 43 keep a window."""
    groups = packed_groups(FLASH, range(43), drafts=False)
    sizes = [(each.block_size, each.window, [n for _, n in each.pages]) for each in groups]
    assert sizes == [
        (256, None, [21, 21, 20]),
        (64, 128, [22]),
        (64, 128, [21]),
        (4, 8, [21, 21]),
        (8, 128, [20]),
    ]
    # As logged: github.com/vllm-project/vllm/pull/52495.
    assert groups[0].used_bytes == packed_bytes(groups, (0, 33)) == 1_002_240
    assert sum(page for page, _ in groups[0].pages) == 47_808


@pytest.mark.parametrize(
    ("longest", "in_flight", "printed", "gib"),
    [(912_128, 8_192, 1_009_661, 7.01), (121_344, 16_384, 150_992, 7.71)],
)
def test_what_two_servers_printed(longest: int, in_flight: int, printed: int, gib: float) -> None:
    """vLLM 0.26 on two H20 with MTP: github.com/vllm-project/vllm/issues/51041."""
    groups = packed_groups(FLASH, range(43), drafts=True)
    request = packed_request(groups, held(longest, in_flight), (0, 26))
    blocks = -(-printed * request // longest)
    assert int(blocks / request * longest) == printed
    assert blocks * packed_bytes(groups, (0, 26)) / GIB == pytest.approx(gib, abs=0.005)


def test_a_newer_server_counts_whole_blocks() -> None:
    groups = packed_groups(FLASH, range(43), drafts=True)
    blocks = held(912_128, 8_192)
    assert blocks == [3563, 131, 131, 2051, 1041]
    assert packed_request(groups, blocks, (0, 27)) == sum(blocks)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
@pytest.mark.parametrize("stages", [1, 2])
def test_each_layer_has_its_pages(name: str, stages: int) -> None:
    model = load_model(name)
    for stage in model.stages(stages):
        groups = packed_groups(model, stage, drafts=False)
        windows = [each for each in groups if each.block_size == 64]
        assert sum(each.layers for each in windows) == len(stage)
        assert all(each.used_bytes <= packed_bytes(groups, (0, 33)) for each in groups)


def test_a_run_has_a_table_for_each_group() -> None:
    keys = {"model": "deepseek-v4-flash", "hardware": "h200", "tensor_parallel_size": 4}
    parts = assemble(make_config({**keys, "max_model_len": 131_072}))
    assert parts.config.block_size == 256
    assert [int(group.block_size) for group in parts.blocks.groups] == [256, 64, 64, 4, 8]
    assert parts.memory.block_bytes == 1_002_240
    with pytest.raises(
        ConfigError, match="block_size: the kernels of deepseek-v4-flash take blocks"
    ):
        assemble(make_config({**keys, "block_size": 64}))
