"""A small engine that counts blocks: consistent results to report on, without the simulator.

First come first served, prompts before decodes, a watermark at admission, the last request as the
victim of a preemption. Prefix hits are drawn at random.
"""

from collections import Counter, deque

import numpy as np

from kvsim.schema import BLOCKED, REQUESTS, STEP_COLUMNS, TEXT

BLOCK_SIZE = 16


class Fake:
    """One request under way."""

    def __init__(self, index, id, arrival_ns, input_length, output_length, hit_tokens):
        self.index, self.id, self.arrival_ns = index, id, arrival_ns
        self.input_length, self.output_length, self.hit_tokens = (
            input_length,
            output_length,
            hit_tokens,
        )
        self.status, self.reason = "completed", ""
        self.generated = 0
        self.first_scheduled_ns = self.first_token_ns = self.last_token_ns = self.finish_ns = -1
        self.num_preemptions = self.recomputed_tokens = self.recached_tokens = 0
        self.swapped_out_blocks = self.swapped_in_blocks = self.blocked_steps = 0

    @property
    def length(self):
        return self.input_length + self.generated

    @property
    def blocks(self):
        return -(-self.length // BLOCK_SIZE)


class FakeEngine:
    """Plays requests and keeps what `kvsim.records.recorder` would have kept."""

    def __init__(self, total, cpu_total, watermark, *, caching, swap, max_num_seqs=64):
        self.total, self.cpu_total, self.watermark = total, cpu_total, watermark
        self.caching, self.swap, self.max_num_seqs = caching, swap, max_num_seqs
        self.waiting, self.running, self.swapped = deque(), [], deque()
        self.cached, self.now = 0, 0
        self.rows, self.gaps = [], Counter()

    @property
    def used(self):
        return sum(r.blocks for r in self.running)

    def play(self, requests):
        coming = deque(requests)
        while coming or self.waiting or self.running or self.swapped:
            if not (self.waiting or self.running or self.swapped):
                self.now = max(self.now, coming[0].arrival_ns)
            while coming and coming[0].arrival_ns <= self.now:
                self.waiting.append(coming.popleft())
            self.step()

    def step(self):
        row = dict.fromkeys(STEP_COLUMNS, 0)
        row["start_ns"] = self.now
        held_before = self.used
        admitted = self.admit(row) if not self.swapped else []
        if self.swapped and not admitted:
            row["blocked"] = BLOCKED.index("swapped") if self.waiting else 0
            self.swap_in(row)
        grown = [] if admitted else self.grow(row)
        self.keep_cache(held_before)
        transfer = 40_000 * (row["swap_out_blocks"] + row["swap_in_blocks"])
        tokens = row["prefill_tokens"]
        span = 22_000_000 + transfer + 45_000 * tokens + 150_000 * len(grown)
        row["transfer_ns"] = transfer
        self.describe(row, admitted, grown)
        self.settle(row, admitted + grown, self.now + span)

    def admit(self, row):
        admitted = []
        while self.waiting:
            head = self.waiting[0]
            free = self.total - self.used
            if len(self.running) >= self.max_num_seqs:
                cause = "slots"
            elif row["batched_tokens"] + head.length > 8192:
                cause = "tokens"
            elif head.blocks > free:
                cause = "blocks"
            elif head.blocks > free - self.watermark:
                cause = "watermark"
            else:
                cause = ""
            if cause:
                head.blocked_steps += 1
                row["blocked"] = BLOCKED.index(cause)
                break
            request = self.waiting.popleft()
            hits = request.hit_tokens if self.caching else 0
            if request.first_scheduled_ns < 0:
                request.first_scheduled_ns = self.now
            else:
                request.recached_tokens += hits
                request.recomputed_tokens += request.length - 1 - hits
            row["prefill_seqs"] += 1
            row["prefill_tokens"] += request.length - hits
            row["cached_tokens"] += hits
            row["batched_tokens"] += request.length - hits
            self.running.append(request)
            admitted.append(request)
        return admitted

    def swap_in(self, row):
        while self.swapped and self.swapped[0].blocks + 4 <= self.total - self.used:
            request = self.swapped.popleft()
            request.swapped_in_blocks += request.blocks
            row["swapped_in"] += 1
            row["swap_in_blocks"] += request.blocks
            self.running.append(request)

    def grow(self, row):
        """Make room for one more token of each running request; the last one gives way."""
        while self.running:
            needed = sum(r.length % BLOCK_SIZE == 0 for r in self.running)
            if self.used + needed <= self.total:
                break
            victim = self.running.pop()
            victim.num_preemptions += 1
            row["blocked"] = BLOCKED.index("preempted") if self.waiting else 0
            if self.swap:
                victim.swapped_out_blocks += victim.blocks
                row["preempted_swap"] += 1
                row["swap_out_blocks"] += victim.blocks
                self.swapped.append(victim)
            else:
                row["preempted_recompute"] += 1
                self.waiting.appendleft(victim)
        return list(self.running)

    def keep_cache(self, held_before):
        released = max(0, held_before - self.used)
        if self.caching:
            self.cached = min(self.cached + released, self.total - self.used)

    def describe(self, row, admitted, grown):
        used = self.used + sum(r.length % BLOCK_SIZE == 0 for r in grown)
        self.cached = min(self.cached, self.total - used)
        row.update(
            decode_seqs=len(grown),
            context_tokens=sum(r.length + 1 for r in grown),
            waiting=len(self.waiting),
            running=len(self.running),
            swapped=len(self.swapped),
            used_blocks=used,
            cached_blocks=self.cached,
            free_blocks=self.total - used - self.cached,
            cpu_used_blocks=sum(r.blocks for r in self.swapped),
            empty_slots=used * BLOCK_SIZE - sum(r.length for r in self.running) - len(grown),
        )
        row["batched_tokens"] += len(grown)

    def settle(self, row, producing, end_ns):
        self.now = row["end_ns"] = end_ns
        for request in producing:
            request.generated += 1
            if request.first_token_ns < 0:
                request.first_token_ns = end_ns
            else:
                self.gaps[end_ns - request.last_token_ns] += 1
            request.last_token_ns = end_ns
            if request.generated == request.output_length:
                request.finish_ns = end_ns
                self.running.remove(request)
                row["finished"] += 1
                if self.caching:
                    self.cached += request.blocks
        self.rows.append(tuple(row[name] for name in STEP_COLUMNS))


def fake_run(
    num_requests=120,
    *,
    seed=0,
    rate=2.0,
    blocks=480,
    cpu_blocks=256,
    watermark=0.01,
    caching=True,
    swap=False,
    longest=4000,
    ids="request-{}",
    kind="estimated",
):
    """Steps, requests, inter-token gaps and provenance of one run."""
    rng = np.random.default_rng(seed)
    arrivals = (np.cumsum(rng.exponential(1 / rate, num_requests)) * 1e9).astype(int)
    inputs = np.minimum(rng.lognormal(6.2, 0.9, num_requests), 6000).astype(int) + 8
    outputs = rng.lognormal(4.6, 0.7, num_requests).astype(int) + 1
    hits = (inputs * np.where(rng.random(num_requests) < 0.6, 0.5, 0)).astype(int) // 16 * 16
    everyone = [
        Fake(i, ids.format(i), int(arrivals[i]), int(inputs[i]), int(outputs[i]), int(hits[i]))
        for i in range(num_requests)
    ]
    for request in everyone:
        if request.input_length + request.output_length > longest:
            request.status, request.reason = "rejected", "longer than max_model_len"
    watermark_blocks = int(watermark * blocks)
    engine = FakeEngine(blocks, cpu_blocks, watermark_blocks, caching=caching, swap=swap)
    engine.play([r for r in everyone if r.status == "completed"])
    columns = np.array(engine.rows, dtype=np.int64).reshape(-1, len(STEP_COLUMNS))
    steps = {name: columns[:, i].copy() for i, name in enumerate(STEP_COLUMNS)}
    meta = provenance(num_requests, blocks, cpu_blocks, watermark, watermark_blocks, caching, kind)
    meta["seed"] = seed
    meta["config"]["preemption_mode"] = "swap" if swap else "recompute"
    return steps, request_columns(everyone, caching), dict(engine.gaps), meta


def request_columns(everyone, caching):
    def values(request):
        hits = request.hit_tokens if caching and request.first_scheduled_ns >= 0 else 0
        return vars(request) | {
            "session": "",
            "priority": 0,
            "n": 1,
            "client_queue_ns": 0,
            "released_ns": request.arrival_ns,
            "output_tokens": request.generated,
            "num_cached_tokens": hits,
        }

    rows = [values(request) for request in everyone]
    columns = {column: [row[column.name] for row in rows] for column in REQUESTS.held()}
    return {
        column.name: each if column.type == TEXT else np.array(each, dtype=np.int64)
        for column, each in columns.items()
    }


def provenance(num_requests, blocks, cpu_blocks, watermark, watermark_blocks, caching, kind):
    gib = 2**30
    return {
        "kvsim_version": "0.1.0",
        "config": {
            "request_rate": None,
            "burstiness": 1.0,
            "engine": "vllm-0.6.3",
            "enable_prefix_caching": caching,
            "block_size": BLOCK_SIZE,
            "watermark": watermark,
            "model": "llama-3-8b",
            "hardware": "h100-sxm",
            "num_gpu_blocks_override": blocks,
            "cost": {"model": "roofline", "link": {"latency_us": 10.0}},
            "goodput": {"ttft": 2000.0, "tpot": 60.0},
        },
        "trace": {
            "path": "traces/chat.jsonl",
            "format": "native",
            "sha256": "b8cbb061" * 8,
            "requests": num_requests,
            "notes": ["3 rows with no output were dropped"],
        },
        "seed": 0,
        "engine": "vllm-0.6.3",
        "block_manager": "prefix-caching" if caching else "naive",
        "scheduler": "vLLM 0.6.3: prompts first, recompute the last arrival",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks": blocks,
        "num_cpu_blocks": cpu_blocks,
        "watermark_blocks": watermark_blocks,
        "memory": {
            "formula": "vllm",
            "memory_bytes": 80 * gib,
            "gpu_memory_utilization": 0.9,
            "weight_bytes": 15 * gib,
            "activation_bytes": 2 * gib,
            "overhead_bytes": gib,
            "kv_bytes": 54 * gib,
            "block_bytes": 2 * 2**20,
            "num_gpu_blocks_in_budget": 27648,
            "num_gpu_blocks": blocks,
            "num_cpu_blocks": cpu_blocks,
            "num_gpu_blocks_overridden": True,
            "num_cpu_blocks_overridden": False,
        },
        "cost": {"kind": kind, "source": "roofline of h100-sxm", "model": "roofline"},
        "link": {"bandwidth_bytes_per_s": 25 * 10**9, "latency_us": 10},
        "outcome": {"kind": "finished"},
        "cache": {"block_lookups": 9000, "block_hits": 3600} if caching else {},
        "prefix_caching": caching,
        "goodput": {"ttft": 2000.0, "tpot": 60.0},
        "command": "kvsim run traces/chat.jsonl --engine vllm-0.6.3 --num-gpu-blocks-override 480",
    }
