"""What a start-up log says, in the formats of vLLM 0.6.3 to 0.33.0."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, long
from shared import SHARED, needs_shared
from startup_logs import v0_log, v1_log

from kvsim.errors import ConfigError
from kvsim.settings.server import ServerWord, server_settings
from kvsim.settings.server.log import blocks_of


def read(text: str, tmp_path: Path) -> ServerWord:
    path = tmp_path / "vllm.log"
    path.write_text(text)
    return server_settings(startup_log=str(path))


def test_v1(tmp_path: Path) -> None:
    """The blocks are those of the published run with 2,588 blocks, the null block among them."""
    word = read(v1_log(), tmp_path)
    assert word.settings == {
        "engine": "vllm-v1",
        "vllm_version": "0.19.0",
        "model": "meta-llama/Llama-3.1-8B",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "max_model_len": 32768,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 2588,
        "block_size": 16,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "async_scheduling": True,
        "enforce_eager": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
    }
    at = str(tmp_path / "vllm.log")
    assert word.sources["model"] == f"{at}:2"
    assert word.sources["max_num_batched_tokens"] == f"{at}:4"
    assert word.sources["dtype"] == f"{at}:6"
    assert word.sources["num_gpu_blocks_override"] == f"{at}:8"
    assert word.sources["max_model_len"] == f"{at}:9"
    assert word.notes[0].startswith(
        f"from {at}: model meta-llama/Llama-3.1-8B, vLLM 0.19.0, 2,588 blocks of 16 (line 8)"
        " in 5.05 GiB of each GPU (line 7), "
    )
    assert word.notes[1:] == [f"from {at}, of no effect on the engine: --port"]


def test_v0(tmp_path: Path) -> None:
    word = read(v0_log(), tmp_path)
    said = word.settings
    assert said["engine"] == "vllm-0.6.3"
    assert said["vllm_version"] == "0.6.3"
    assert said["num_gpu_blocks_override"] == 27000
    assert said["num_cpu_blocks_override"] == 2048
    assert said["max_num_seqs"] == 128
    assert said["enable_prefix_caching"] is False
    assert said["disable_async_output_proc"] is False
    assert said["swap_space"] == 4
    assert word.sources["num_gpu_blocks_override"].endswith(":4")
    assert len(word.notes) == 1  # not a list of all the arguments that nobody gave
    synchronous = v0_log("num_scheduler_steps=1, use_async_output_proc=False")
    assert read(synchronous, tmp_path).settings["disable_async_output_proc"] is True


@pytest.mark.parametrize(
    ("lines", "blocks"),
    [
        ("INFO 02-20 00:01:02 kv_cache_utils.py:522] # GPU blocks: 1381", 1381),  # V1 of 0.7.3
        ("INFO 02-20 00:01:02 executor_base.py:110] # cuda blocks: 1381, # CPU blocks: 9", 1381),
        ("INFO 03-20 11:59:59 [kv_cache_utils.py:537] GPU KV cache size: 22,096 tokens", 1381),
        (
            "(EngineCore_DP0 pid=7) INFO 11-22 [kv_cache_utils.py:1147] GPU KV cache size: 22,096"
            " tokens, Maximum concurrency for 2,048 tokens per request: 10.79x",  # 0.33.0
            1381,
        ),
        ("DEBUG [l.py:1] Engine 000: vllm cache_config_info with initialization after"
         " num_gpu_blocks is: 1381", 1381),
        ('{"message": "GPU KV cache size: 22,096 tokens", "level": "INFO"}', 1381),
        ("worker-0 | 2026-11-22T10:00:00Z \x1b[32mINFO\x1b[0m GPU KV cache size: 22,096 tokens",
         1381),
    ],
)  # fmt: skip
def test_every_way_of_printing_the_blocks(lines: str, blocks: int, tmp_path: Path) -> None:
    word = read(f"noise\n{lines}\nmore noise\n", tmp_path)
    assert word.settings["num_gpu_blocks_override"] == blocks
    assert word.sources["num_gpu_blocks_override"].endswith(":2")


def test_the_smallest_pool_of_several_ranks_counts(tmp_path: Path) -> None:
    """Up to 0.10 each worker prints its own size, and the engine takes the smallest."""
    workers = "".join(
        f"(VllmWorker rank={rank} pid=5) INFO 03-20 GPU KV cache size: {tokens} tokens\n"
        for rank, tokens in enumerate(("41,424", "41,392", "41,440"))
    )
    assert read(v1_log(further=workers), tmp_path).settings["num_gpu_blocks_override"] == 2587


def test_replicas_have_one_pool_each(tmp_path: Path) -> None:
    """`num_gpu_blocks is` sums over all engines (0.33.0 `v1/engine/core_client.py:874`)."""
    arguments = "'model': 'm', 'data_parallel_size': 2"
    first = v1_log(process="EngineCore_DP0 pid=90", arguments=arguments)
    second = "\n".join(v1_log(process="EngineCore_DP1 pid=91").splitlines()[5:])
    total = "INFO Engine 000: vllm cache_config_info with initialization after num_gpu_blocks is: "
    word = read(f"{first}{second}\n{total}5176\n", tmp_path)
    assert word.settings["num_gpu_blocks_override"] == 2588
    assert word.settings["data_parallel_size"] == 2
    assert not any("starts" in note for note in word.notes)


def test_a_block_size_that_an_argument_says(tmp_path: Path) -> None:
    text = v1_log(arguments="'model': 'm', 'block_size': 32")
    word = read(text, tmp_path)
    assert (word.settings["num_gpu_blocks_override"], word.settings["block_size"]) == (1294, 32)


def test_a_block_size_that_the_engine_chose(tmp_path: Path) -> None:
    line = (
        "INFO 11-22 [interface.py:777] Setting kv cache block size to 64 for FLASHMLA backend(s).\n"
    )
    word = read(line + v1_log(), tmp_path)
    assert (word.settings["num_gpu_blocks_override"], word.settings["block_size"]) == (647, 64)
    assert word.sources["block_size"].endswith(":1")


def test_a_block_size_that_follows_from_blocks_and_tokens(tmp_path: Path) -> None:
    text = "INFO GPU KV cache size: 41,408 tokens\nINFO after num_gpu_blocks is: 647\n"
    word = read(text, tmp_path)
    assert (word.settings["num_gpu_blocks_override"], word.settings["block_size"]) == (647, 64)


def test_layers_of_several_kinds(tmp_path: Path) -> None:
    """The blocks that the groups of layers share count; each has tokens for its part of them."""
    text = v1_log(
        arguments="'model': 'm', 'block_size': 16", further="after num_gpu_blocks is: 5176\n"
    )
    assert read(text, tmp_path).settings["num_gpu_blocks_override"] == 5176
    unsaid = "INFO GPU KV cache size: 41,408 tokens\nINFO after num_gpu_blocks is: 5176\n"
    word = read(unsaid, tmp_path)
    assert (word.settings["num_gpu_blocks_override"], word.settings["block_size"]) == (5176, 16)


def test_the_last_start_that_has_its_blocks_counts(tmp_path: Path) -> None:
    crashed = "\n".join(v1_log(tokens="999").splitlines()[:6]) + "\nValueError: out of memory\n"
    word = read(v1_log(tokens="16,000") + v1_log(tokens="32,000") + crashed, tmp_path)
    assert word.settings["num_gpu_blocks_override"] == 2000
    assert any("3 starts" in note for note in word.notes)


def test_a_start_in_one_process_after_another(tmp_path: Path) -> None:
    """A script that makes several engines prints no server's version."""
    engine = "\n".join(v1_log(tokens="16,000").splitlines()[5:])
    other = "\n".join(v1_log(tokens="32,000").splitlines()[5:])
    word = read(f"{engine}\n{other}\n", tmp_path)
    assert word.settings["num_gpu_blocks_override"] == 2000
    assert any("2 starts" in note for note in word.notes)


def test_gzipped_and_coloured(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log.gz"
    coloured = (
        v1_log()
        .replace("█▄█▀", "\x1b[93m█\x1b[0m\x1b[94m▄█▀\x1b[0m")
        .replace("version 0", "version \x1b[1m0")
    )
    path.write_bytes(gzip.compress(coloured.encode()))
    assert server_settings(startup_log=str(path)).settings["vllm_version"] == "0.19.0"


def test_speculative_decoding_is_taken_over(tmp_path: Path) -> None:
    said = "SpeculativeConfig(method='eagle3', model='a/b', num_spec_tokens=3)"
    text = v1_log().replace("speculative_config=None", f"speculative_config={said}")
    expected = {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}
    assert read(text, tmp_path).settings["speculative_config"] == expected


def test_arguments_that_nobody_knows_are_noted(tmp_path: Path) -> None:
    word = read(v1_log(arguments="'model': 'm', 'brand_new': <Enum.A: 1>"), tmp_path)
    assert any("not known here: --brand-new" in note for note in word.notes)


def test_a_model_in_a_folder_of_the_server_keeps_its_name(tmp_path: Path) -> None:
    text = v1_log(arguments="'model': '/data/models/Llama-3.1-8B-Instruct/'")
    assert read(text, tmp_path).settings["model"] == "Llama-3.1-8B-Instruct"
    cached = "\n".join(v1_log().splitlines()[5:])
    assert read(cached, tmp_path).settings["model"] == "meta-llama/Llama-3.1-8B"


@given(
    blocks=st.integers(1, 10**7),
    block_size=st.sampled_from((8, 16, 32, 64, 128, 528)),
    max_model_len=st.integers(1, 2 * 10**6),
)
def test_blocks_follow_from_tokens(blocks: int, block_size: int, max_model_len: int) -> None:
    """Both rules of vLLM, forwards: 0.20.0 and 0.21.0 `v1/core/kv_cache_utils.py`."""
    assert blocks_of(blocks * block_size, block_size, max_model_len, "0.20.2") == blocks
    requests = blocks / -(-max_model_len // block_size)
    tokens = int(requests * max_model_len)
    assert blocks_of(tokens, block_size, max_model_len, "0.33.0") == blocks


@pytest.mark.parametrize("columns", [80, 136, 200])
def test_lines_that_a_terminal_has_wrapped_are_joined(columns: int, tmp_path: Path) -> None:
    whole = v1_log()
    pieces = (
        line[begin : begin + columns]
        for line in whole.splitlines()
        for begin in range(0, max(len(line), 1), columns)
    )
    wrapped, word = read("\n".join(pieces), tmp_path), read(whole, tmp_path)
    assert wrapped.settings == word.settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ("hello\nworld\n", ["no line of a vLLM or SGLang start"]),
        ("\n".join(v1_log().splitlines()[:6]), ["line 1", "how many KV blocks"]),
        (v1_log().replace("'max_model_len'", "\nINFO"), [":2", "cut off"]),
        (v1_log().replace(" tensor_parallel", "\n[1] tensor_parallel"), [":6", "cut off"]),
        ("INFO GPU KV cache size: 0 tokens\n", [":1", "no KV blocks"]),
        ("a\0b", ["not a text"]),
        (v1_log(arguments="'model': 'm', 'block_size': 0"), ["block_size 0"]),
        (
            v1_log(arguments="'model': 'm', 'max_num_seqs': 'many'"),
            [":2", "--max-num-seqs", "many"],
        ),
    ],
)
def test_bad_logs(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, tmp_path)
    assert "\n" not in str(caught.value)
    for word in ["vllm.log", *words]:
        assert word in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        server_settings(startup_log=str(tmp_path / "none.log"))
    with pytest.raises(ConfigError, match="cannot be read"):
        server_settings(startup_log=str(tmp_path))
    packed = gzip.compress(v1_log().encode() * 100)
    for broken in (packed[: len(packed) // 2], packed[:12] + bytes(20) + packed[32:]):
        (tmp_path / "cut.gz").write_bytes(broken)
        with pytest.raises(ConfigError, match="gzip"):
            server_settings(startup_log=str(tmp_path / "cut.gz"))


def test_very_long_lines(tmp_path: Path) -> None:
    """Of a line of 10 MB, the beginning is read; what comes after it is not lost."""
    path = tmp_path / "vllm.log"
    path.write_text(f"{'version ' * 1_300_000}\n{v1_log()}")
    word = server_settings(startup_log=str(path))
    assert word.sources["num_gpu_blocks_override"].endswith(":9")


@given(st.text() | st.lists(st.sampled_from([*v1_log().split(" "), *"'\"{}()=,\n"])).map(" ".join))
def test_nothing_but_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.log"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        server_settings(startup_log=str(path))
    except ConfigError as error:
        assert "\n" not in str(error)


@given(cut=st.integers(0, 3000), at=st.integers(0, 3000), junk=st.binary(max_size=20))
def test_damaged_logs(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, junk: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.log"
    whole = (v1_log() + v0_log()).encode()
    path.write_bytes(whole[:at] + junk + whole[at + cut :])
    try:
        server_settings(startup_log=str(path))
    except ConfigError as error:
        assert "\n" not in str(error)


@long
@given(st.integers(0, 3 * 2**20), st.integers(1, 2**20))
@settings(max_examples=examples(20))
def test_lines_keep_their_numbers_in_long_logs(
    tmp_path_factory: pytest.TempPathFactory, size: int, width: int
) -> None:
    """Logs are read in chunks, whose borders may be anywhere."""
    before = [f"{'version' if width > 9 else ''}{'.' * width}\n"] * (size // width)
    path = tmp_path_factory.getbasetemp() / "long.log"
    path.write_text("".join([*before, v1_log()]))
    word = server_settings(startup_log=str(path))
    assert word.sources["num_gpu_blocks_override"] == f"{path}:{len(before) + 8}"
    assert word.settings["max_num_batched_tokens"] == 2048


def test_the_engine_follows_from_how_it_prints_its_blocks(tmp_path: Path) -> None:
    """A part of a log may lack the line of the engine: only V0 has CPU blocks."""
    old = "INFO gpu_executor.py:122] # GPU blocks: 700, # CPU blocks: 20\n"
    assert read(old, tmp_path).settings["engine"] == "vllm-0.6.3"
    assert read("INFO GPU KV cache size: 160 tokens\n", tmp_path).settings["engine"] == "vllm-v1"


@needs_shared("formats/vllm.log")
def test_the_public_sample() -> None:
    word = server_settings(startup_log=str(SHARED / "formats" / "vllm.log"))
    assert word.settings["num_gpu_blocks_override"] == 447_008 // 16
