"""Roofline of experts, windows, latent and linear attention, counted one by one."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from msgspec.structs import replace
from plans import decode, plan, plans

from kvsim.core.plan import Plan
from kvsim.cost import RooflineCost, TableCost, make_cost
from kvsim.cost.bounds import Attention
from kvsim.cost.explain import Work
from kvsim.cost.table import profile_for
from kvsim.errors import ConfigError
from kvsim.machine import Model, load_hardware, load_model
from kvsim.machine.models import Experts, Latent, Linear
from kvsim.settings.config import make_config

TINY = load_model("tiny")
H100 = load_hardware("h100-sxm")
WINDOW = replace(TINY, sliding_window=100, layer_types=("sliding_attention", "full_attention"))
LATENT = replace(
    TINY,
    latent=Latent(kv_lora_rank=64, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12),
    head_dim=24,
)
LINEAR = replace(
    TINY,
    layer_types=("linear_attention", "full_attention"),
    linear=Linear(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
    ),
)
SPARSE = replace(
    TINY, experts=Experts(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64)
)
SPECIAL = [WINDOW, LATENT, LINEAR, SPARSE]
IDS = ["window", "latent", "linear", "experts"]


def roofline(model: Model, **keys: Any) -> RooflineCost:
    return RooflineCost(model, H100, make_config(keys))


def attention_of(model: Model, flop_ns: float = 0.0, byte_ns: float = 0.0) -> Attention:
    return Attention(model.shard(1), "float16", flop_ns, byte_ns)


CHUNKS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=3)


@given(CHUNKS)
def test_prompts_in_a_window(chunks: list[tuple[int, int]]) -> None:
    """Token i of a chunk sees itself and those before it; in one layer of two, the last 100."""
    pairs = read = 0
    for new, context in chunks:
        for position in range(context, context + new):
            pairs += position + 1 + min(position + 1, 100)
        read += context + new + min(context, 100) + new
    heads = TINY.num_attention_heads * TINY.head_dim
    assert attention_of(WINDOW, flop_ns=1).prompts_ns(chunks) == pairs * 4 * heads
    kept = 2 * TINY.num_key_value_heads * TINY.head_dim
    assert attention_of(WINDOW, byte_ns=1).prompts_ns(chunks) == read * kept * 2


@given(st.integers(1, 50), st.integers(1, 500))
def test_decodes_of_one_length_in_a_window(sequences: int, length: int) -> None:
    kept = 2 * TINY.num_key_value_heads * TINY.head_dim * 2
    found = attention_of(WINDOW, byte_ns=1).decodes_ns(sequences, sequences * length)
    assert found == sequences * (length + min(length, 100)) * kept


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_a_window_of_unlike_lengths_is_an_upper_bound(lengths: list[int]) -> None:
    kept = 2 * TINY.num_key_value_heads * TINY.head_dim * 2
    exact = sum((length + min(length, 100)) * kept for length in lengths)
    assert attention_of(WINDOW, byte_ns=1).decodes_ns(len(lengths), sum(lengths)) >= exact


def test_latent_attention() -> None:
    """2 layers, 4 heads, a latent vector of 64 + 8 elements of 2 bytes."""
    reading = attention_of(LATENT, byte_ns=1)
    assert reading.decodes_ns(3, 1000) == 1000 * 2 * 72 * 2
    assert reading.prompts_ns([(10, 5)]) == 15 * 2 * 72 * 2
    computing = attention_of(LATENT, flop_ns=1)
    assert computing.decodes_ns(3, 1000) == 1000 * 2 * 4 * 2 * (72 + 64)  # absorbed
    pairs = sum(range(6, 16))
    assert computing.prompts_ns([(10, 5)]) == pairs * 2 * 4 * 2 * (24 + 12)


def test_linear_attention_does_not_grow_with_the_context() -> None:
    reading = attention_of(LINEAR, byte_ns=1)
    state = (3 * (2 * 32 + 32) + 32 * 16) * 2
    kept = 2 * TINY.num_key_value_heads * TINY.head_dim * 2
    assert reading.decodes_ns(3, 1000) == 1000 * kept + 3 * 2 * state
    assert reading.prompts_ns([(10, 5), (1, 0)]) == 16 * kept + 2 * 2 * state
    computing = attention_of(LINEAR, flop_ns=1)
    heads = TINY.num_attention_heads * TINY.head_dim
    assert computing.decodes_ns(3, 1000) == 1000 * 4 * heads + 3 * 6 * 32 * 16


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 40])
def test_experts_that_a_step_reads(tokens: int) -> None:
    """The mean over random draws of 2 of 16 experts a token is the formula."""
    draws, random = 1000, Random(tokens)
    touched = sum(
        len({e for _ in range(tokens) for e in random.sample(range(16), 2)}) for _ in range(draws)
    )
    byte_ns = 1 / (H100.memory_bandwidth_gb_s * H100.bandwidth_efficiency)
    one_expert = 2 * 3 * 64 * 64 * 2 * byte_ns  # layers x matrices x hidden x columns x bytes
    alike = roofline(replace(SPARSE, name="dense part"))._bounds
    whole = alike.others_ns(tokens, 0, tokens)
    alike.experts_read_ns = alike.experts_token_ns = 0.0
    found = (whole - alike.others_ns(tokens, 0, tokens)) / one_expert
    assert found == pytest.approx(touched / draws, rel=0.02)


def test_experts_cost_their_arithmetic_in_large_steps() -> None:
    """A prompt of 100,000 tokens: as a dense MLP as wide as the experts of one token, where nothing
    is known of kernels for experts."""
    prompt, unknown = plan(chunks=[(100_000, 0)]), replace(H100, expert_products={})
    wide = replace(TINY, intermediate_size=2 * 64)
    router = 2 * 2 * 64 * 16 * 100_000 * 1e9 / (H100.flop_s("float16") * H100.compute_efficiency)
    sparse = RooflineCost(SPARSE, unknown, make_config({}))
    assert sparse.step_ns(prompt) == pytest.approx(roofline(wide).step_ns(prompt) + router, abs=2)


@pytest.mark.parametrize("model", [SPARSE, SPARSE.quantized("fp8"), SPARSE.quantized("awq")])
def test_products_of_experts_reach_what_the_hardware_states(model: Model) -> None:
    """With rows that each expert has besides those of tokens."""
    unknown = replace(H100, expert_products={})
    weights, tokens = model.expert_weights, 100_000
    assert weights is not None
    reached = H100.expert_products[weights]
    source = RooflineCost(model, H100, make_config({})).source
    assert f"experts {reached.tflop_s:g} TFLOP/s (public kernels)" in source
    assert "TFLOP/s" not in roofline(TINY).source
    stated, plain = (
        RooflineCost(model, each, make_config({})).step_ns(plan(chunks=[(tokens, 0)]))
        for each in (H100, unknown)
    )
    peak = H100.flop_s("fp8" if weights == "fp8" else "bfloat16") * H100.compute_efficiency
    row = 2 * 3 * 64 * model.hidden_size * model.num_hidden_layers  # FLOPs
    wanted = row * (2 * tokens + 16 * reached.padding_rows) / reached.tflop_s / 1e3
    assert stated - plain == pytest.approx(wanted - row * 2 * tokens * 1e9 / peak, abs=2)


@pytest.mark.parametrize("model", SPECIAL, ids=IDS)
@settings(max_examples=examples(30))
@given(step=plans(), more=st.integers(1, 2000))
def test_more_work_takes_no_less_time(model: Model, step: Plan, more: int) -> None:
    cost = roofline(model)
    before = cost.step_ns(step)
    for grow in (
        lambda: step.add_chunk(0, more, 0, 0),
        lambda: setattr(step, "context_tokens", step.context_tokens + more),
        lambda: setattr(step, "decode_seqs", step.decode_seqs + 1),
        lambda: setattr(step, "samples", step.samples + 1),
    ):
        grow()
        after = cost.step_ns(step)
        assert after >= before
        before = after


@pytest.mark.parametrize("model", SPECIAL, ids=IDS)
def test_the_terms_of_a_step_add_up(model: Model) -> None:
    cost = roofline(model)
    seqs = np.array([1, 7, 200])
    context, none = seqs * 150, np.zeros(3, int)
    terms = cost.explain(Work(none, none, seqs, context, seqs, none))
    whole = sum(np.broadcast_to(each, 3) for key, each in terms.items() if key != "rest")
    wanted = [
        cost.step_ns(plan(decode_seqs=int(n), context_tokens=int(c), samples=int(n)))
        for n, c in zip(seqs, context, strict=True)
    ]
    assert whole == pytest.approx(wanted, abs=1)


@pytest.mark.parametrize(
    ("method", "fewer_bytes", "fewer_flops"),
    [("fp8", 2, 2), ("awq", 16 / 4.15625, 1), ("w8a8", 2, 1)],
)
def test_quantised_weights(method: str, fewer_bytes: float, fewer_flops: float) -> None:
    """Small steps read fewer bytes; large ones are faster only at a higher peak."""
    plain = roofline(load_model("llama-3-8b"))
    quantised = roofline(load_model("llama-3-8b").quantized(method))
    assert plain._bounds.weights_ns / quantised._bounds.weights_ns == pytest.approx(fewer_bytes)
    peaks = H100.tflop_s["fp8"] / H100.tflop_s["bfloat16"]
    wanted = peaks if fewer_flops > 1 else 1
    assert plain._bounds.token_ns / quantised._bounds.token_ns == pytest.approx(wanted)


def test_fp8_runs_at_16_bits_where_the_data_sheet_has_no_peak() -> None:
    a100, model = load_hardware("a100-sxm-80gb"), load_model("llama-3-8b")
    assert "fp8" not in a100.tflop_s
    plain = RooflineCost(model, a100, make_config({}))
    assert (
        RooflineCost(model.quantized("fp8"), a100, make_config({}))._bounds.token_ns
        == plain._bounds.token_ns
    )


def test_a_small_batch_of_a_sparse_model_is_faster_than_a_dense_one() -> None:
    sparse, dense = load_model("qwen3-30b-a3b"), load_model("qwen3-32b")
    step = decode(1, 1000)
    assert 3 * roofline(sparse).step_ns(step) < roofline(dense).step_ns(step)


@pytest.mark.parametrize(
    "name",
    ["qwen3-30b-a3b", "deepseek-r1", "gpt-oss-20b", "gemma-3-27b", "qwen3-next-80b-a3b",
     "meta-llama/Llama-3.1-8B-Instruct-FP8"],
)  # fmt: skip
def test_no_profile_stands_for_them(name: str) -> None:
    model, h200 = load_model(name), load_hardware("h200-sxm")
    config = make_config({"tensor_parallel_size": 2})
    assert profile_for(model, h200, config) is None
    cost = make_cost(config, model, h200)
    assert isinstance(cost, RooflineCost)
    assert f"({', '.join(model.special)}; no profile of it is shipped)" in cost.source
    assert "(estimated)" in cost.source
    if model.special != ("experts",):
        with pytest.raises(ConfigError, match=r"which the tables do not hold"):
            TableCost(model, h200, config, "h200-sxm-llama-3-8b-public")
    table = make_config({"tensor_parallel_size": 2, "cost": {"model": "table"}})
    with pytest.raises(ConfigError, match="use --cost-model roofline"):
        make_cost(table, model, h200)
