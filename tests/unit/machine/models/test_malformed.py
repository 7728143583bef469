"""Broken `config.json`s: one line that names the file and the key, exit code 2, no traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from kvsim.cli import main

PLAIN = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
DEEP = "[" * 100_000 + "]" * 100_000


def text(**changes: Any) -> str:
    return json.dumps({**PLAIN, **changes})


CASES: dict[str, tuple[str, str]] = {
    # case: (file, words that the line must hold)
    "zero heads": (text(num_attention_heads=0), "num_attention_heads: expected `int` >= 1"),
    "zero KV heads": (text(num_key_value_heads=0), "num_key_value_heads"),
    "negative size": (text(hidden_size=-64), "hidden_size: expected `int` >= 1"),
    "a string": (text(hidden_size="64"), "hidden_size: expected `int`, got `str`"),
    "a fraction": (text(hidden_size=64.5), "hidden_size"),
    "a truth value": (text(hidden_size=True), "hidden_size"),
    "null": (text(hidden_size=None), "hidden_size: missing"),
    "a list": (text(intermediate_size=[128, 128]), "intermediate_size"),
    "a thousand million layers": (text(num_hidden_layers=10**9), "num_hidden_layers"),
    "many heads": (text(num_attention_heads=10**12), "num_attention_heads"),
    "400 digits": (text(vocab_size=10**400), "too many digits"),
    "5,000 digits": ('{"hidden_size": ' + "9" * 5000 + "}", "too many digits"),
    "NaN": (text().replace("64", "NaN"), "NaN is not a number of JSON"),
    "infinity": (text().replace("64", "-Infinity"), "got `float`"),
    "overflow": (text().replace("64", "1e999"), "too large"),
    "null text_config": (json.dumps({"text_config": None}), "num_hidden_layers: missing"),
    "list text_config": (json.dumps({"text_config": [PLAIN]}), "text_config: expected `object"),
    "text text_config": (json.dumps({"text_config": "llama"}), "text_config"),
    "nested text_config": (json.dumps({"text_config": {"text_config": PLAIN}}), "missing"),
    "layer_types int": (text(layer_types=2), "layer_types: expected `array"),
    "layer_types nested": (text(layer_types=[["full_attention"]]), "layer_types[0]"),
    "layer_types of ints": (text(layer_types=[1, 2]), "layer_types[0]"),
    "too many layer_types": (
        text(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8),
        "layer_types: 4 entries for 2 layers",
    ),
    "no size of linear layers": (
        text(layer_types=["linear_attention", "full_attention"]),
        "linear_num_key_heads: missing",
    ),
    "deep list": (DEEP, "nested too deeply"),
    "deep value": ('{"text_config": {"a": ' + DEEP + "}}", "nested too deeply"),
    "a list of files": ("[]", "expected a table of keys"),
    "empty": ("", "not JSON"),
    "no keys": ("{}", "num_hidden_layers: missing"),
    "a number as model_type": (text(model_type=7), "model_type: expected `str`"),
    "a list as name": (text(_name_or_path=["a"]), "_name_or_path"),
    "unknown dtype": (text(torch_dtype="int3"), "torch_dtype: invalid enum value 'int3'"),
    "negative experts": (text(num_experts=-1), "num_experts"),
    "experts without a number each": (text(num_experts=8), "num_experts_per_tok: missing"),
    "more experts each than there are": (
        text(num_experts=4, num_experts_per_tok=8),
        "num_experts_per_tok: 8 is more than the 4 experts",
    ),
    "every zeroth layer": (
        text(num_experts=4, num_experts_per_tok=2, decoder_sparse_step=0),
        "decoder_sparse_step",
    ),
    "half of latent attention": (text(kv_lora_rank=512), "qk_nope_head_dim: missing"),
    "quantization_config list": (text(quantization_config=[]), "quantization_config"),
    "bits as text": (
        text(quantization_config={"quant_method": "gptq", "bits": "4"}),
        "quantization_config.bits",
    ),
    "empty blocks": (
        text(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 0]}),
        "weight_block_size[0]",
    ),
    "vision_config list": (text(vision_config=[]), "vision_config"),
    "negative window": (text(sliding_window=-5), "sliding_window"),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_broken_config_is_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, words = CASES[case]
    path = tmp_path / "config.json"
    path.write_text(content)
    trace = str(ROOT / "traces" / "chat.jsonl")
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--trace", trace, "--model", str(path)])
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"kvsim: {path}: ")
    assert words in line
    assert line.count("\n") == 1
    assert len(line) < 400
