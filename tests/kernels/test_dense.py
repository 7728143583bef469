"""The dense part, in plain torch and in one launch each, against float64 numpy."""

from types import ModuleType

import numpy as np
import pytest
from batches import BOUNDS, DEVICE, DTYPES, torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsim_kernels import dense, triton_dense
from marks import examples

GEOMETRY = dense.Geometry(hidden=96, num_heads=6, num_kv_heads=2, head_size=32, ffn=160, vocab=101)
TOKENS = 11


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[dense, triton_dense], ids=["torch", "fused"])
def between(request: pytest.FixtureRequest) -> ModuleType:
    """What stands between the matrix products, in either form."""
    return request.param


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


def assert_near(out: torch.Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    error = np.linalg.norm(wide(out) - expected) / np.linalg.norm(expected)
    assert error <= BOUNDS[dtype]


def tokens(
    generator: torch.Generator, dtype: torch.dtype, width: int = GEOMETRY.hidden
) -> torch.Tensor:
    return torch.randn(TOKENS, width, generator=generator).to(dtype)


def test_qkv_projection(generator: torch.Generator, dtype: torch.dtype) -> None:
    weights = dense.LayerWeights.random(GEOMETRY, generator, dtype)
    x = tokens(generator, dtype)
    rotated, value = dense.project_qkv(x, weights.qkv, GEOMETRY)
    packed = (wide(x) @ wide(weights.qkv).T).reshape(TOKENS, 10, 32)
    assert_near(rotated, packed[:, :8], dtype)
    assert_near(value, packed[:, 8:], dtype)


def test_o_projection(generator: torch.Generator, dtype: torch.dtype) -> None:
    weights = dense.LayerWeights.random(GEOMETRY, generator, dtype)
    attended = torch.randn(TOKENS, 6, 32, generator=generator).to(dtype)
    expected = wide(attended).reshape(TOKENS, -1) @ wide(weights.o).T
    assert_near(dense.project_o(attended, weights.o), expected, dtype)


def test_mlp(generator: torch.Generator, dtype: torch.dtype) -> None:
    weights = dense.LayerWeights.random(GEOMETRY, generator, dtype)
    x = tokens(generator, dtype)
    gate, up = np.split(wide(x) @ wide(weights.gate_up).T, 2, axis=1)
    expected = (gate / (1 + np.exp(-gate)) * up) @ wide(weights.down).T
    assert_near(dense.mlp(x, weights.gate_up, weights.down), expected, dtype)


def test_lm_head_answers_in_float32(generator: torch.Generator, dtype: torch.dtype) -> None:
    x = tokens(generator, dtype)
    weight = torch.randn(GEOMETRY.vocab, GEOMETRY.hidden, generator=generator).to(dtype)
    logits = dense.lm_head(x, weight)
    expected = wide(x) @ wide(weight).T
    assert logits.dtype == torch.float32
    assert np.linalg.norm(wide(logits) - expected) <= BOUNDS[dtype] * np.linalg.norm(expected)


@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(
    between: ModuleType, generator: torch.Generator, dtype: torch.dtype, with_residual: bool
) -> None:
    x, residual = tokens(generator, dtype), tokens(generator, dtype)
    weight = torch.rand(GEOMETRY.hidden, generator=generator).to(dtype)
    given = (each.to(DEVICE) for each in (x, weight, residual)[: 2 + with_residual])
    out, stream = between.rms_norm(*given, eps=1e-5)
    summed = wide(x) + wide(residual) if with_residual else wide(x)
    expected = summed / np.sqrt((summed**2).mean(1, keepdims=True) + 1e-5) * wide(weight)
    assert_near(out, expected, dtype)
    assert_near(stream, summed, dtype)


def test_rope(between: ModuleType, generator: torch.Generator, dtype: torch.dtype) -> None:
    """As complex numbers: element i and element i + half turn by position x theta^(-2i / size)."""
    x = torch.randn(TOKENS, 8, 32, generator=generator).to(dtype)[:, :6]
    positions = torch.randint(0, 5000, (TOKENS,), generator=generator)
    table = dense.rope_table(5000, 32, theta=10_000.0)
    out = between.apply_rope(*(each.to(DEVICE) for each in (x, positions, table)))
    angle = positions.numpy()[:, None] * 10_000.0 ** (-np.arange(0, 32, 2) / 32)
    plane = wide(x)[..., :16] + 1j * wide(x)[..., 16:]
    turned = plane * np.exp(1j * angle)[:, None]
    assert_near(out, np.concatenate((turned.real, turned.imag), axis=-1), dtype)


def test_silu_mul(between: ModuleType, generator: torch.Generator, dtype: torch.dtype) -> None:
    x = tokens(generator, dtype, 2 * GEOMETRY.ffn)
    gate, up = np.split(wide(x), 2, axis=1)
    assert_near(between.silu_mul(x.to(DEVICE)), gate / (1 + np.exp(-gate)) * up, dtype)


def test_greedy_takes_the_highest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, 1.0, -1.0]])
    assert dense.greedy(logits).tolist() == [1, 0]


def dull_top_p(logits: np.ndarray, uniform: float, top_p: float, temperature: float) -> int:
    """Top-p sampling as a loop over the sorted tokens of one row."""
    weights = np.exp((logits - logits.max()) / temperature)
    probability = weights / weights.sum()
    kept, mass = [], 0.0
    for token in np.argsort(-probability, kind="stable"):
        if mass >= top_p:
            break
        kept.append(token)
        mass += probability[token]
    reached = 0.0
    for token in kept:
        reached += probability[token]
        if reached > uniform * mass:
            return int(token)
    return int(kept[-1])


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    top_p=st.sampled_from([0.05, 0.3, 0.9, 1.0]),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
)
def test_top_p_is_the_dull_loop(seed: int, top_p: float, temperature: float) -> None:
    random = np.random.default_rng(seed)
    logits, uniforms = random.normal(size=(4, 30)) * 2, random.random(4)
    chosen = dense.sample_top_p(
        torch.from_numpy(logits), torch.from_numpy(uniforms), top_p, temperature
    )
    assert chosen.tolist() == [
        dull_top_p(row, uniform, top_p, temperature)
        for row, uniform in zip(logits, uniforms, strict=True)
    ]


def test_a_tiny_top_p_is_greedy(generator: torch.Generator) -> None:
    logits = torch.randn(8, 50, generator=generator)
    uniforms = torch.rand(8, generator=generator)
    assert torch.equal(dense.sample_top_p(logits, uniforms, 1e-9), dense.greedy(logits))


@pytest.mark.parametrize(("top_p", "temperature"), [(0.0, 1.0), (1.1, 1.0), (0.9, 0.0)])
def test_sampling_refuses_senseless_settings(top_p: float, temperature: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        dense.sample_top_p(torch.zeros(1, 3), torch.zeros(1), top_p, temperature)
