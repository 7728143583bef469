"""Real tokens tell whether block tables are right: under pressure they are those of a big pool."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from marks import long

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvsim_kernels.executor import Executor, make_decoder  # noqa: E402
from kvsim_kernels.forward import Decoder  # noqa: E402
from kvsim_kernels.texts import Texts  # noqa: E402
from worlds import batch_of  # noqa: E402

from kvsim.against.validate.measure import serve  # noqa: E402
from kvsim.against.validate.setup import build, build_scheduler  # noqa: E402
from kvsim.core.batch import Batch  # noqa: E402
from kvsim.core.plan import Plan  # noqa: E402
from kvsim.core.request import Request  # noqa: E402
from kvsim.workload import ParentContent, Row, SegmentContent, Trace  # noqa: E402
from kvsim.workload.clients import Clients, make_requests, release_times  # noqa: E402

BLOCK_SIZE = 4
MS = 1_000_000
POISON = 100.0
"""Finite, because the torch twins multiply masked values by zero."""

PROFILE: dict[str, Any] = {
    "model": {
        "name": "toy",
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 64,
        "vocab": 211,
        "dtype": "float32",
        "kv_dtype": "float32",
        "tp": 1,
    },
    "engine": {
        "block_size": BLOCK_SIZE,
        "kv_layout": "cross",
        "capture_sizes": [1, 2, 4],
        "decode_kernel": "decode_v2",
    },
}
LOAD = SimpleNamespace(
    request_rate=None, time_scale=1.0, spread_ties=False, seed=0, max_concurrency=None,
    sessions="auto", think_time_scale=1.0, max_think_time_s=None,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Toy products are not worth the hand-over between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class FixedClock:
    """Every call takes a millisecond, so that schedules do not depend on the machine."""

    def once(self, call: Callable[[], object]) -> float:
        call()
        return 1000.0


class Poisoning(Executor):
    """Fills every block that nobody owns, and nobody can hit, with nonsense before each step."""

    def __init__(self, decoder: Decoder, batch: Batch) -> None:
        super().__init__(decoder, FixedClock(), batch.blocks.cpu.first)
        self._batch = batch
        self.swapped = self.copied = self.cached = 0

    def step_ns(self, plan: Plan) -> int:
        for pool, owned in ((self._decoder.pool, self._batch.blocks.gpu),
                            (self._decoder.host_pool, self._batch.blocks.cpu)):  # fmt: skip
            kept = {*owned.references, *owned.cached_blocks()}
            first = 0 if pool is self._decoder.pool else owned.first
            alien = [i for i in range(pool.num_blocks) if i + first not in kept]
            pool.pieces()[:, alien] = POISON
        self.swapped += len(plan.swaps_in)
        self.copied += len(plan.copies)
        self.cached += sum(prefill.cached for prefill in plan.prefills)
        return super().step_ns(plan)


def chat(number: int = 10) -> Trace:
    """Sessions over two system prompts; every second turn continues the one before."""
    rows: list[Row] = []
    for i in range(number):
        if i % 3 == 2:
            before = rows[i - 1]
            keep = before.input_length + before.output_length
            content: Any = ParentContent(i - 1, keep)
            rows.append(Row(i, str(i), i + 2, i * MS, keep + 3 + i, 9, content, after=i - 1))
        else:
            content = SegmentContent(((f"system {i % 2}", 13),))
            rows.append(Row(i, str(i), i + 2, i * MS, 17 + 2 * i, 14 + i % 5, content))
    return Trace("in memory", "native", "0" * 64, rows)


def run(
    trace: Trace,
    scheduler: str,
    manager: str,
    blocks: int,
    *,
    n: int = 1,
    prefix: bool = False,
    executing: type[Poisoning] = Poisoning,
    **arguments: Any,
) -> tuple[list[list[int]], list[Request], Poisoning]:
    """What every request said, on a pool of so many blocks and as many on the host."""
    pools: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_gpu_blocks": blocks}
    common: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 8}
    if manager == V1_MANAGER:
        pools |= {"max_model_len": 96, "max_num_batched_tokens": 99}
        pools["enable_prefix_caching"] = prefix
    else:
        pools["num_cpu_blocks"] = blocks
    tables = build({"class": manager, "arguments": pools})
    if "vllm_063" in scheduler:
        common |= {"num_gpu_blocks": blocks, "block_size": BLOCK_SIZE}
        common["enable_prefix_caching"] = tables.needs_keys
    recipe = {"class": scheduler, "arguments": {**common, **arguments}}
    engine = build_scheduler(recipe, {"seed": 0, "max_model_len": 96}, tables)
    decoder = make_decoder(
        PROFILE, "cpu", num_blocks=blocks + 1, host_blocks=blocks,
        max_tokens=2048, max_seqs=24, max_seq_len=98,
    )  # fmt: skip
    batch = batch_of(tables, engine, [row.output_length for row in trace.rows])
    executor = executing(decoder, batch)
    requests = make_requests(trace, trace.rows, n=n)
    clients = Clients(requests, trace.rows, release_times(trace.rows, LOAD), LOAD)
    serve(engine, batch, executor, clients)
    return [executor.said(request) for request in requests], requests, executor


V063 = "kvsim.engines.vllm_063.scheduler:Vllm063"
ASYNC = "kvsim.engines.vllm_063.scheduler:Vllm063Async"
V1 = "kvsim.engines.vllm_v1.scheduler:VllmV1"
NAIVE, PREFIX = "kvsim.engines.vllm_063.blocks:Naive", "kvsim.engines.vllm_063.blocks:PrefixCaching"
V1_MANAGER = "kvsim.engines.vllm_v1.manager:full_attention"


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    """One request at a time, in a pool that holds everything."""
    said, requests, _ = run(chat(), V063, NAIVE, 300, max_num_seqs=1)
    assert all(request.num_preemptions == 0 for request in requests)
    assert len({token for tokens in said for token in tokens}) > 40
    return said


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a big pool": ((V063, NAIVE, 300), {}),
    "recompute": ((V063, NAIVE, 26), {"preemption_mode": "recompute"}),
    "asynchronous outputs": ((ASYNC, NAIVE, 26), {}),
    "swap": ((V063, NAIVE, 26), {"preemption_mode": "swap"}),
    "chunks": ((V063, NAIVE, 26), {"enable_chunked_prefill": True, "max_num_batched_tokens": 12}),
    "prefix": ((V063, PREFIX, 26), {}),
    "prefix and swap": ((V063, PREFIX, 26), {"preemption_mode": "swap"}),
    "asynchronous outputs and prefix": ((ASYNC, PREFIX, 26), {}),
    "v1": ((V1, V1_MANAGER, 26), {"max_num_batched_tokens": 20}),
    "v1 and prefix": ((V1, V1_MANAGER, 26), {"max_num_batched_tokens": 20, "prefix": True}),
}
PARTS_OF_OTHERS = {"asynchronous outputs", "swap", "prefix", "v1"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[long] * (case in PARTS_OF_OTHERS)) for case in CASES]
)
def test_pressure_changes_no_token(case: str, truth: list[list[int]]) -> None:
    positional, arguments = CASES[case]
    said, requests, executor = run(chat(), *positional, **arguments)
    assert said == truth
    for request, row in zip(requests, chat().rows, strict=True):
        assert request.output_tokens >= row.output_length
    assert (sum(each.num_preemptions for each in requests) > 0) == (case != "a big pool")
    assert (executor.swapped > 0) == ("swap" in case)
    assert (executor.cached > 0) == ("prefix" in case)


def test_samples_share_their_prompt_until_they_write(truth: list[list[int]]) -> None:
    """All samples say the same, as the most likely token is taken; half of them write to copies."""
    said, requests, executor = run(chat(), V063, NAIVE, 60, n=2)
    assert said == truth
    assert executor.copied > 0 and executor.swapped > 0
    assert [request.output_tokens for request in requests] == [
        2 * row.output_length for row in chat().rows
    ]


class LosesSwaps(Poisoning):
    def swap_in_ns(self, pairs: Any) -> int:
        return 1


class LosesCopies(Poisoning):
    def step_ns(self, plan: Plan) -> int:
        copies, plan.copies = plan.copies, []
        ns = super().step_ns(plan)
        plan.copies = copies
        return ns


class ReadsTheNeighbour(Poisoning):
    """Follows the block tables of decodes one block too far."""

    def _step(self, plan: Plan) -> Any:
        step, sampling = super()._step(plan)
        for table in step.tables:
            table[0] = (table[0] + 1) % 26
        return step, sampling


@pytest.mark.parametrize(
    ("executing", "blocks", "more"),
    [
        (LosesSwaps, 26, {"preemption_mode": "swap"}),
        (LosesCopies, 60, {"n": 2}),
        (ReadsTheNeighbour, 26, {}),
    ],
)
def test_what_goes_wrong_is_heard(
    executing: type[Poisoning], blocks: int, more: dict[str, Any], truth: list[list[int]]
) -> None:
    assert run(chat(), V063, NAIVE, blocks, executing=executing, **more)[0] != truth


class TestTexts:
    class Keys:
        """A stream whose first block is shared, the others are its own."""

        def __init__(self, own: int) -> None:
            self.own = own

        def keys(self, first: int, last: int, block_size: int) -> list[int]:
            return [7 if place == 0 else self.own + place for place in range(first, last)]

    def test_equal_keys_are_equal_tokens_and_others_differ(self) -> None:
        texts = Texts(vocab=1000, block_size=4)
        one = texts.begin(0, self.Keys(100)).tokens(0, 8)
        other = texts.begin(1, self.Keys(200)).tokens(0, 8)
        assert one[:4] == other[:4]
        assert one[4:] != other[4:]

    def test_tokens_do_not_depend_on_how_they_are_asked_for(self) -> None:
        whole = Texts(1000, 4).begin(0, self.Keys(100)).tokens(0, 11)
        parts = Texts(1000, 4).begin(0, self.Keys(100))
        assert [parts.tokens(i, i + 1)[0] for i in reversed(range(11))][::-1] == whole

    def test_what_was_sampled_stands_also_in_the_prompts_that_repeat_it(self) -> None:
        texts = Texts(1000, 4)
        first = texts.begin(0, self.Keys(100))
        made_up = first.tokens(0, 4)
        assert [first.say(4 + i, token) for i, token in enumerate((5, 6, 7, 8))] == [5, 6, 7, 8]
        assert texts.begin(1, self.Keys(100)).tokens(0, 8) == [*made_up, 5, 6, 7, 8]

    def test_what_a_prompt_made_up_cannot_be_sampled_otherwise(self) -> None:
        texts = Texts(1000, 4)
        promised = texts.begin(1, self.Keys(100)).tokens(0, 8)
        first = texts.begin(0, self.Keys(100))
        first.tokens(0, 6)
        assert first.say(6, promised[6] + 1) == promised[6]

    def test_a_block_that_is_never_full_belongs_to_its_request(self) -> None:
        texts = Texts(1000, 4)
        one, other = texts.begin(0, None), texts.begin(1, None)
        assert one.tokens(0, 4) != other.tokens(0, 4)
