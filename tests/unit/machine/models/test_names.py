"""Spellings of names: every one that people use leads to a shipped geometry, without a network."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import ConfigError
from kvsim.machine import load_model
from kvsim.machine.models import meaning, model_of
from kvsim.settings.config import make_config
from kvsim.settings.library import names


@pytest.mark.parametrize(
    ("spelling", "name", "method"),
    [
        ("llama-3.1-8b", "llama-3.1-8b", None),
        ("Llama-3.1-8B", "llama-3.1-8b", None),
        ("Llama3-8B", "llama-3-8b", None),
        ("Llama_3.1 8B", "llama-3.1-8b", None),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b", None),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b", None),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama-3.1-8b", "bitsandbytes"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b", "fp8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", "w4a16"),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "llama-3.1-70b", "awq"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b", None),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct", None),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b-instruct", "awq"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct-GPTQ-Int4", "qwen2.5-32b-instruct", "gptq"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "qwen2.5-72b-instruct", "gptq-int8"),
        ("Qwen/Qwen2.5-Coder-0.5B", "qwen2.5-0.5b", None),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b-2507", None),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507-FP8", "qwen3-30b-a3b-2507", "fp8"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b-2507", None),
        ("Qwen/Qwen3-30B-A3B-FP8", "qwen3-30b-a3b", "fp8"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b", None),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.2", None),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b", None),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-3.2-24b", None),
        ("google/gemma-3-27b-it", "gemma-3-27b", None),
        ("unsloth/gemma-3-4b-it-unsloth-bnb-4bit", "gemma-3-4b", "bitsandbytes"),
        ("openai/gpt-oss-20b", "gpt-oss-20b", None),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1", None),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "deepseek-r1-distill-qwen-14b", None),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini-4k", None),
        ("microsoft/phi-4", "phi-4", None),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b", None),
        ("Qwen/Qwen3.6-27B-FP8", "qwen3.5-27b", "fp8"),
        ("nvidia/Kimi-K2.6-NVFP4", "kimi-k2.5", "modelopt_fp4"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b", ""),
        ("amd/gpt-oss-120b-w-mxfp4-a-fp8", "gpt-oss-120b", "mxfp4"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2", None),
        ("MiniMaxAI/MiniMax-M3-MXFP8", "minimax-m3", "mxfp8"),
        ("LiquidAI/LFM2.5-1.2B-JP-202606", "lfm2.5-1.2b", None),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss-20b", ""),
        ("google/gemma-3-27b-it-qat-w4a16-unquantized", "gemma-3-27b", ""),
        ("qwen3.6-27b-autoround-int4", "qwen3.5-27b", "auto-round"),
        ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "deepseek-r1", "modelopt_fp4"),
        ("huihui-ai/Qwen2.5-72B-Instruct-abliterated", "qwen2.5-72b-instruct", None),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "llama-3.1-8b", None),
    ],
)
def test_spellings(spelling: str, name: str, method: str | None) -> None:
    assert meaning(spelling, names("models")) == (name, method)


@pytest.mark.parametrize(
    "spelling",
    [
        "meta-llama/Llama-3.1-9B",
        "Qwen/Qwen2.5-7B-Instruct-1M",  # another longest sequence
        "Qwen/Qwen3-VL-7B-Instruct",  # no such size
        "meta-llama/Llama-3.2-11B-Vision",
        "nvidia/Llama-3.1-Nemotron-51B-Instruct",
    ],
)
def test_others_are_not_taken_for_them(spelling: str) -> None:
    assert meaning(spelling, names("models")) is None


@given(st.sampled_from(names("models")), st.data())
def test_case_dashes_and_publishers_do_not_matter(name: str, data: st.DataObject) -> None:
    upper = data.draw(st.lists(st.booleans(), min_size=len(name), max_size=len(name)))
    spelt = "".join(c.upper() if u else c for c, u in zip(name, upper, strict=True))
    dash = data.draw(st.sampled_from("-_"))
    found = meaning(f"somebody/{spelt.replace('-', dash)}", names("models"))
    assert found == (name, None)


@pytest.mark.parametrize(
    ("spelling", "method", "stored"),
    [
        ("RedHatAI/Qwen3.6-35B-A3B-NVFP4", "compressed-tensors", "modelopt_fp4"),
        ("RedHatAI/Qwen3-32B-quantized.w4a16", "compressed-tensors", "w4a16"),
        ("nvidia/Qwen3.6-27B-NVFP4", "modelopt", "modelopt_fp4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "gptq_marlin", "gptq-int8"),
        ("Qwen/Qwen3-32B", "compressed-tensors", "compressed-tensors"),  # no name says better
        ("Qwen/Qwen3-32B-AWQ", "bitsandbytes", "bitsandbytes"),
    ],
)
def test_a_format_of_files_does_not_say_how_many_bits_a_weight_takes(
    spelling: str, method: str, stored: str
) -> None:
    """`quantization` in every start-up log of a quantised checkpoint, and in many commands."""
    model = model_of(make_config({"model": spelling, "quantization": method}))
    assert model.quantization is not None and model.quantization.method == stored


def test_a_run_can_say_what_a_name_was_taken_for() -> None:
    model = load_model("Qwen/Qwen2.5-7B-Instruct-AWQ")
    assert model.notes == (
        "Qwen/Qwen2.5-7B-Instruct-AWQ is read as the shipped qwen2.5-7b-instruct with awq weights,"
        " 32,768 tokens long",
    )
    assert model.source == (
        "config.json of Qwen/Qwen2.5-7B-Instruct; weights as awq at 4.156 bits, by the name"
    )
    assert load_model("QWEN3-8B").notes == ()


@pytest.mark.parametrize(
    ("spelling", "gib"),
    [
        ("openai/gpt-oss-20b", 13.7),
        ("unsloth/gpt-oss-20b-BF16", 39.0),
        ("deepseek-ai/DeepSeek-V4-Flash", 144.9),
        ("sgl-project/DeepSeek-V4-Flash-FP8", 265.9),
    ],
)
def test_a_name_says_how_weights_are_stored_that_ship_quantised(spelling: str, gib: float) -> None:
    """20.9 B parameters, of which 19.1 B are experts; 284.3 B, of which 277 B are experts: 4 bits
    in what their owners publish."""
    assert load_model(spelling).weight_bytes("bfloat16") / (1 << 30) == pytest.approx(gib, abs=0.1)


def test_every_source_resolves_to_its_own_file() -> None:
    for name in names("models"):
        published = load_model(name).source.removeprefix("config.json of ")
        if " " not in published:
            assert meaning(published, names("models")) == (name, None), published


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("llama-3-9b", r"no model named 'llama-3-9b'; did you mean .*'llama-3-8b'"),
        ("Qwen/Qwen2.5-9B", r"did you mean 'qwen[23]\.5-"),
        ("nowhere/at-all", r"give one of the \d+ names in configs/models, or the path"),
        ("folder/m.toml", r"folder/m\.toml: no such file"),
        ("", "no model named ''"),
        ("x" * 5000, "no model named"),
        ("\0", "no model named"),
    ],
)
def test_unknown_names_are_one_line(spelling: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(spelling)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_folder_without_a_config_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json in this folder"):
        load_model(str(tmp_path_factory.mktemp("empty")))
