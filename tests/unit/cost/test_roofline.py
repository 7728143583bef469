"""The roofline against a twin that counts layer by layer, and against public measurements."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from plans import decode, plan, plans

from kvsim.core.plan import Plan
from kvsim.cost import RooflineCost
from kvsim.machine import Hardware, Model, load_hardware, load_model
from kvsim.settings.config import make_config


def roofline(model: str, hardware: str, **keys: Any) -> RooflineCost:
    return RooflineCost(load_model(model), load_hardware(hardware), make_config(keys))


def twin_ns(model: Model, hardware: Hardware, tp: int, step: Plan) -> float:
    """Each matrix and each token of a float16 model in turn."""
    flops = hardware.tflop_s["float16"] * 1e3 * hardware.compute_efficiency  # per ns
    speed = hardware.memory_bandwidth_gb_s * hardware.bandwidth_efficiency  # bytes per ns
    heads = model.num_attention_heads // tp
    kv_heads = max(1, model.num_key_value_heads // tp)
    columns = model.intermediate_size // tp
    tokens = step.decode_seqs + sum(new for new, _ in step.chunks)
    total = hardware.step_overhead_us * 1e3
    shapes = [
        (model.hidden_size, (heads + 2 * kv_heads) * model.head_dim),
        (heads * model.head_dim, model.hidden_size),
        (model.hidden_size, 2 * columns),
        (columns, model.hidden_size),
    ]
    for _ in range(model.num_hidden_layers):
        if tokens:
            total += hardware.layer_overhead_us * 1e3
            total += max(
                sum(2 * tokens * a * b for a, b in shapes) / flops,
                sum(2 * a * b for a, b in shapes) / speed,
            )
            if tp > 1:
                reduce = hardware.all_reduce
                sent = 2 * (tp - 1) / tp * tokens * model.hidden_size * 2
                total += 2 * (reduce.latency_us * 1e3 + sent / reduce.bandwidth_gb_s)
        seen = sum(context + i for new, context in step.chunks for i in range(1, new + 1))
        kept = sum(context + new for new, context in step.chunks)
        total += max(
            4 * heads * model.head_dim * seen / flops, 4 * kv_heads * model.head_dim * kept / speed
        )
        total += max(
            4 * heads * model.head_dim * step.context_tokens / flops,
            4 * kv_heads * model.head_dim * step.context_tokens / speed,
        )
        total += step.copied_blocks * 2 * 16 * 4 * kv_heads * model.head_dim / speed
    if step.samples:
        table = -(-model.vocab_size // tp) * model.hidden_size
        total += max(2 * step.samples * table / flops, 2 * table / speed)
    return total


@settings(max_examples=examples(60))
@given(plans(), st.sampled_from([1, 2]), st.sampled_from(["h100-sxm", "rtx-4090"]))
def test_equals_its_twin(step: Plan, tp: int, hardware: str) -> None:
    cost = roofline("tiny", hardware, tensor_parallel_size=tp)
    expected = twin_ns(load_model("tiny"), load_hardware(hardware), tp, step)
    assert cost.step_ns(step) == pytest.approx(expected, abs=1, rel=1e-9)


@given(plans(), st.integers(1, 2000))
def test_more_work_takes_no_less_time(step: Plan, more: int) -> None:
    cost = roofline("llama-3-8b", "h100-sxm")
    before = cost.step_ns(step)
    assert before >= 300_000
    for grow in (
        lambda: step.chunks.append((more, 0)),
        lambda: setattr(step, "context_tokens", step.context_tokens + more),
        lambda: setattr(step, "decode_seqs", step.decode_seqs + 1),
        lambda: setattr(step, "samples", step.samples + 1),
        lambda: step.copies.append((0, 1)),
    ):
        grow()
        after = cost.step_ns(step)
        assert after >= before
        before = after


PUBLIC = {
    # Llama-3-8B steps without logits, composed from measured kernels of
    # github.com/ai-dynamo/aiconfigurator at 095f58a, 12 us per layer and 300 us per step assumed.
    "h200-sxm": ([5.1, 6.5, 9.4, 13.6], [20.3, 18.6, 22.1]),
    "h100-sxm": ([6.2, 8.3, 12.2, 17.7], [20.2, 18.7, 22.5]),
    "a100-sxm-80gb": ([11.5, 14.9, 22.1, 33.2], [63.6, 58.1, 65.9]),
}


@pytest.mark.parametrize("hardware", PUBLIC)
def test_against_public_kernel_measurements(hardware: str) -> None:
    cost = roofline("llama-3-8b", hardware)
    decode_ms, prefill_token_us = PUBLIC[hardware]
    for (seqs, context), ms in zip(
        ((1, 1000), (32, 1000), (64, 2000), (128, 2000)), decode_ms, strict=True
    ):
        assert cost.step_ns(decode(seqs, context)) / 1e6 == pytest.approx(ms, rel=0.08)
    for tokens, us in zip((512, 2048, 8192), prefill_token_us, strict=True):
        spent = cost.step_ns(plan(chunks=[(tokens, 0)]))
        assert spent / 1e3 / tokens == pytest.approx(us, rel=0.10)


def test_an_empty_step_takes_host_time_only() -> None:
    assert roofline("llama-3-8b", "h100-sxm").step_ns(plan()) == 300_000


def test_a_context_is_read_though_its_tokens_are_not_computed() -> None:
    cost = roofline("llama-3-8b", "h100-sxm")
    computed = cost.step_ns(plan(chunks=[(4096, 0)]))
    cached = cost.step_ns(plan(chunks=[(16, 4080)]))
    fresh = cost.step_ns(plan(chunks=[(16, 0)]))
    assert fresh < cached < computed


def test_two_gpus_are_faster_but_not_twice_as_fast() -> None:
    step = decode(64, 2000)
    alone = roofline("llama-3-8b", "h100-sxm").step_ns(step)
    shared = roofline("llama-3-8b", "h100-sxm", tensor_parallel_size=2).step_ns(step)
    assert alone / 2 < shared < alone


def test_fp8_kv_halves_what_a_decode_reads() -> None:
    def kv_ns(**keys: Any) -> int:
        cost = roofline("llama-3-8b", "h100-sxm", **keys)
        return cost.step_ns(decode(64, 2000)) - cost.step_ns(decode(64, 0))

    assert kv_ns(kv_cache_dtype="fp8") == pytest.approx(kv_ns() / 2, abs=1)


def test_settings_replace_those_of_the_hardware_and_label_the_result() -> None:
    model, hardware, config = load_model("tiny"), load_hardware("h100-sxm"), make_config({})
    cost = RooflineCost(model, hardware, config, compute_efficiency=0.5, step_overhead_us=1)
    assert cost.source == (
        "roofline: h100-sxm data sheet x tiny, efficiencies 0.50/0.85 (estimated)"
    )
    assert cost.kind == "roofline"
    assert cost.step_ns(plan()) == 1000
    described = cost.describe()
    assert (described["compute_efficiency"], described["bandwidth_efficiency"]) == (0.5, 0.85)
    assert described["sources"]["step_overhead_us"] == "assumption"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compute_efficiency", 0.0),
        ("bandwidth_efficiency", 1.01),
        ("layer_overhead_us", -1.0),
        ("step_overhead_us", float("nan")),
    ],
)
def test_settings_out_of_range_are_named(key: str, value: float) -> None:
    arguments: dict[str, Any] = {key: value}
    with pytest.raises(ValueError, match=key):
        RooflineCost(load_model("tiny"), load_hardware("h100-sxm"), make_config({}), **arguments)
