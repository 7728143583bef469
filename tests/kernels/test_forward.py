"""The forward pass over the paged pool against a decoder without pages, and against itself."""

import pytest
from batches import DEVICE, torch
from kvsim_kernels import checks, dense
from kvsim_kernels.forward import Chunk, Decoder, Geometry, Step
from marks import long

GEOMETRY = Geometry(
    "toy", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=64, ffn=96, vocab=997,
    dtype="float32", kv_dtype="float32", block_size=16, num_blocks=24,
)  # fmt: skip
PROMPT = [7 * i % 997 for i in range(45)]


def make(layout: str = "cross", **settings: object) -> Decoder:
    given = {"device": DEVICE, "max_tokens": 128, "max_seqs": 8, "max_seq_len": 128}
    return Decoder(GEOMETRY.sized(layout=layout), **{**given, **settings})


def run(decoder: Decoder, *chunks: Chunk, **decodes: object) -> list[int]:
    return decoder.forward(Step(chunks=chunks, **decodes)).tolist()


def without_pages(decoder: Decoder, tokens: list[int]) -> int:
    """The next token by whole-sequence attention: no pool, no tables, no slots."""
    ids = torch.tensor(tokens, device=DEVICE)
    positions = torch.arange(len(tokens), device=DEVICE)
    rope = dense.rope_table(len(tokens), GEOMETRY.head_dim, device=DEVICE)
    sizes = decoder._sizes
    x, residual = decoder._embedding[ids], None
    for weights in decoder._weights:
        x, residual = dense.rms_norm(x, weights.input_norm, residual)
        rotated, value = dense.project_qkv(x, weights.qkv, sizes)
        rotated = dense.apply_rope(rotated, positions, rope)
        query, key = rotated[:, : GEOMETRY.heads], rotated[:, GEOMETRY.heads :]
        heads = []
        for head in range(GEOMETRY.heads):
            shared = head // (GEOMETRY.heads // GEOMETRY.kv_heads)
            scores = query[:, head] @ key[:, shared].T / GEOMETRY.head_dim**0.5
            future = positions[None, :] > positions[:, None]
            weight = scores.masked_fill(future, float("-inf")).softmax(-1)
            heads.append(weight @ value[:, shared])
        attended = torch.stack(heads, dim=1)
        x, residual = dense.rms_norm(
            dense.project_o(attended, weights.o), weights.post_norm, residual
        )
        x = dense.mlp(x, weights.gate_up, weights.down)
    last, _ = dense.rms_norm(x[-1:], decoder._norm, residual[-1:])
    return int(dense.greedy(dense.lm_head(last, decoder._head))[0])


@pytest.fixture(params=["torch", "triton"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return make(triton=request.param == "triton")


@pytest.mark.parametrize("kernel", [pytest.param("v1", marks=long), "v2"])
def test_a_sequence_goes_on_as_it_would_without_pages(decoder: Decoder, kernel: str) -> None:
    decoder.decode_kernel = kernel
    table, known = [5, 9, 3, 7], list(PROMPT)
    known += run(decoder, Chunk(table, 0, PROMPT))
    for _ in range(3):
        known += run(decoder, tables=[table], lengths=[len(known)], tokens=known[-1:])
    for length in range(len(PROMPT), len(known)):
        assert known[length] == without_pages(decoder, known[:length])
    assert len(set(known[len(PROMPT) :])) > 1


@pytest.mark.parametrize("layout", ["layer", "cross"])
@pytest.mark.parametrize("cut", [1, 16, 30, 44])
def test_chunks_make_the_same_token_as_the_whole(layout: str, cut: int) -> None:
    decoder, table = make(layout), [20, 1, 11]
    assert run(decoder, Chunk(table, 0, PROMPT[:cut], samples=False)) == []
    assert run(decoder, Chunk(table, cut, PROMPT[cut:])) == [without_pages(decoder, PROMPT)]


@long
def test_a_mixed_step_makes_the_tokens_of_its_parts(decoder: Decoder) -> None:
    prompts = {(0, 1, 2): PROMPT, (3, 4): PROMPT[5:30], (6,): PROMPT[:9]}
    expected = [without_pages(decoder, tokens) for tokens in prompts.values()]
    for table, tokens in prompts.items():
        run(decoder, Chunk(table, 0, tokens[:-1], samples=False))
    (long, a), (short, b), (new, c) = prompts.items()
    found = run(
        decoder,
        Chunk(new, 0, c),
        Chunk((8, 9), 0, PROMPT[:20], samples=False),
        tables=[long, short],
        lengths=[len(a), len(b)],
        tokens=[a[-1], b[-1]],
    )
    assert found == expected


@long
def test_attention_and_head_can_be_left_out(decoder: Decoder) -> None:
    step = Step(chunks=[Chunk([0, 1, 2], 0, PROMPT)])
    whole = decoder.forward(step).tolist()
    assert decoder.forward(step, attention=False).tolist() != whole
    assert decoder.forward(step, head=False).tolist() == []
    assert decoder.forward(step).tolist() == whole


def test_copied_and_swapped_blocks_carry_the_sequence(decoder: Decoder) -> None:
    decoder = make(triton=decoder.triton, host_blocks=4)
    run(decoder, Chunk([0, 1, 2], 0, PROMPT[:-1], samples=False))
    decode = {"lengths": [len(PROMPT)], "tokens": PROMPT[-1:]}
    expected = [without_pages(decoder, PROMPT)]
    moves = {"copies": [(0, 10), (1, 11), (2, 12)]}
    assert run(decoder, tables=[[10, 11, 12]], **decode, **moves) == expected
    decoder.move(Step(swaps_out=[(0, 3), (1, 1), (2, 0)]))
    decoder.pool.data.zero_()
    back = {"swaps_in": [(3, 20), (1, 21), (0, 22)]}
    assert run(decoder, tables=[[20, 21, 22]], **decode, **back) == expected


def test_a_step_without_sequences_runs_nothing() -> None:
    decoder = make()
    before = decoder.pool.data.clone()
    assert decoder.forward(Step()).tolist() == []
    assert torch.equal(decoder.pool.data, before)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step(chunks=[Chunk(range(9), 0, [1] * 129)]), "longer than max_seq_len 128"),
        (Step(tables=[[0]] * 9, lengths=[1] * 9, tokens=[1] * 9), "9 sequences exceeds"),
        (Step(chunks=[Chunk(range(5), 0, [1] * 70)] * 2), "140 tokens and 2 sequences exceeds"),
        (Step(swaps_out=[(0, 0)]), "no host_blocks"),
    ],
)
def test_what_does_not_fit_is_refused(step: Step, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make().forward(step)


def test_the_checks_before_a_calibration_pass(decoder: Decoder) -> None:
    found = checks.check(decoder)
    assert set(found) == {"decode_v1", "decode_v2", "prefill", "copy_blocks", "swap_blocks"}
    assert all(error < 1e-5 for error in found.values())


def test_the_checks_notice_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks.torch_impl.decode
    monkeypatch.setattr(
        checks.torch_impl, "decode", lambda query, pages: 1.001 * right(query, pages)
    )
    said = r"decode_v[12] differs from its reference by 0\.001"
    with pytest.raises(checks.CheckError, match=said):
        checks.check(make(triton=False))


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a GPU")
@pytest.mark.parametrize("kernel", ["v1", "v2"])
def test_a_replayed_graph_makes_the_tokens_of_an_eager_step(kernel: str) -> None:
    eager, graphs = (make(capture_sizes=sizes, decode_kernel=kernel) for sizes in ((), (1, 2, 4)))
    for tokens in (PROMPT, PROMPT[3:]):
        step = Step(
            tables=[[0, 1, 2], [3, 4, 5], [6, 7, 8]], lengths=[40, 17, 3], tokens=tokens[:3]
        )
        assert graphs.forward(step).tolist() == eager.forward(step).tolist()
