"""Steps of vLLM V1 0.33.0 with KV cache groups and speculative decoding, as their rules are worded.

`step_log` returns the records that the engine is expected to write; `blocks` is who keeps the
tables (`twins.vllm_v1_groups.Groups`, or another object with its verbs).
"""

from math import ceil
from zlib import crc32

from twins.steps import EngineError, generated, queue_digest, table_digest
from twins.vllm_v1_groups import Groups

WAITING, RUNNING, PREEMPTED = "waiting", "running", "preempted"
LOOK = {"ngram": 0, "draft_model": 1, "eagle": 1, "dflash": 1}


class Twin:
    """One request."""

    def __init__(self, row):
        self.id, self.arrival = row["id"], row["arrival"]
        self.priority = row.get("priority", 0)
        self.tokens = list(row["prompt_token_ids"])
        self.plen = len(self.tokens)
        self.max_new = row["output_len"]
        self.key = (row.get("lora"), row.get("cache_salt"))
        self.computed = self.ph = self.fly = self.stale = self.drafts = self.junction = 0
        self.chunk = False
        self.status = WAITING

    @property
    def output(self):
        return len(self.tokens) - self.plen


class Engine:
    """Queues and rules; one method per rule."""

    def __init__(self, config, blocks):
        self.blocks = blocks
        self.max_seqs, self.max_len = config["max_num_seqs"], config["max_model_len"]
        self.batched = config["max_num_batched_tokens"]
        self.caching = config.get("enable_prefix_caching", False)
        self.priority = config.get("policy", "fcfs") == "priority"
        self.wm = int(config.get("v1_watermark", 0.0) * config["num_gpu_blocks"])
        self.full = config.get("v1_reserve_full_isl", True)
        self.chunked = config.get("v1_enable_chunked_prefill", True)
        self.long = config.get("long_prefill_token_threshold", 0)
        self.is_async = config.get("v1_async", False)
        spec = config.get("spec") or {}
        self.k = spec.get("num_spec_tokens", 0)
        self.method = spec.get("method")
        self.accept = spec.get("accept")
        self.slots = spec.get("draft_slots", int(self.method == "draft_model"))
        self.look = LOOK.get(self.method, 0) * self.k + (self.method == "dflash")
        self.running, self.waiting, self.ends = [], [], set()

    # -- queues --

    def order(self, r):
        return r.priority, r.arrival, r.id

    def push(self, r, place=None):
        self.waiting.insert(len(self.waiting) if place is None else place, r)
        if self.priority:
            self.waiting.sort(key=self.order)

    def preempt(self, v):
        self.blocks.drop_all(v)
        v.status = PREEMPTED
        v.computed, v.stale, v.ph, v.drafts = 0, v.fly, 0, 0
        self.push(v, 0)

    def allocate(self, r, m, **more):
        guarded = r.status in (WAITING, PREEMPTED) and self.running
        return self.blocks.allocate(r, m, look=self.look, w=self.wm if guarded else 0, **more)

    # -- scheduling --

    def schedule(self):
        self.blocks.now.clear()
        self.bud = self.ibud = self.batched
        self.thr = self.long if len(self.running) + len(self.waiting) > 1 else 0
        batch, preempted = [], []
        i = 0
        while i < len(self.running) and self.bud > 0 and self.ibud > self.slots:
            r = self.running[i]
            m = self.wanted(r)
            if m <= 0:
                i += 1
                continue
            placed = True
            while not self.allocate(r, m):
                v, place = self.victim()
                if place < i:
                    i -= 1
                for entry in [entry for entry in batch if entry[0] is v]:
                    batch.remove(entry)
                    self.bud += entry[1]
                    self.ibud += entry[1] + self.slots
                self.preempt(v)
                preempted.append(v)
                if v is r:
                    placed = False
                    break
            if not placed:
                if self.priority:
                    continue
                break
            used = max(0, min(r.drafts, m + r.computed - len(r.tokens) - r.ph))
            r.drafts = 0
            batch.append((r, m, used, None))
            self.bud -= m
            self.ibud -= m + self.slots
            i += 1
        return batch + ([] if preempted else self.admit(batch)), preempted

    def wanted(self, r):
        if self.is_async and r.ph > 0 and r.computed + 2 - r.ph >= r.plen + r.max_new:
            return 0
        m = len(r.tokens) + r.drafts + r.ph - r.computed
        if 0 < self.thr < m:
            m = self.thr
        m = min(m, self.bud, self.ibud - self.slots, self.max_len - r.computed - 1)
        return self.blocks.cut(r, r.computed, m) if m > 0 else m

    def victim(self):
        v = self.running[-1]
        if self.priority:
            worst = max((v.priority, v.arrival) for v in self.running)
            v = next(v for v in self.running if (v.priority, v.arrival) == worst)
        place = self.running.index(v)
        self.running.remove(v)
        return v, place

    def admit(self, batch):
        aside, admitted = [], []
        prompts = any(r.chunk for r, *_ in batch)
        while (
            self.bud > 0
            and self.waiting
            and self.ibud > self.slots
            and len(self.running) < self.max_seqs
        ):
            r = self.waiting[0]
            if r.stale != 0:
                aside.append(self.waiting.pop(0))
                continue
            hits, hit = self.blocks.hits(r)
            m, most = len(r.tokens) - hit, min(self.bud, self.ibud - self.slots)
            padded = (
                self.k > 0
                and m == 1
                and not prompts
                and (batch or hit > 0)
                and hit + self.k + 2 <= self.max_len
            )
            if padded:
                if 1 + self.k > most:
                    break
                m = 1 + self.k
            if 0 < self.thr < m:
                m = self.thr
            if not self.chunked and m > most:
                break
            m = min(m, most)
            cut = self.blocks.cut(r, hit, m)
            if cut <= 0:
                break
            if cut < m:
                m, padded = cut, False
            if padded and m != 1 + self.k:
                raise EngineError
            if not self.allocate(r, m, hits=hits, nhit=hit, full=self.full):
                break
            self.waiting.pop(0)
            self.running.append(r)
            r.status, r.computed = RUNNING, hit
            admitted.append((r, m, self.k if padded else 0, hit))
            self.bud -= m
            self.ibud -= m + self.slots
        self.waiting = aside + self.waiting
        return admitted

    def advance(self, batch, record):
        entries, prefill, decode = [], [], []
        for r, m, used, hit in batch:
            before = r.computed
            part = before < len(r.tokens) + r.ph - 1
            r.computed += m
            r.fly += m
            samples = r.chunk = r.computed < len(r.tokens) + r.ph
            samples = not samples
            if self.is_async and samples:
                r.ph += 1 + used
                r.drafts = self.k
            entries.append((r, m, samples, used, hit is not None))
            if hit is not None:
                prefill.append([r.id, m, hit, 0, int(samples)])
            elif part:
                prefill.append([r.id, m, 0, before, int(samples)])
            else:
                decode.append(r.id)
        record |= {"prefill": prefill, "decode": decode}
        if self.k:
            record["spec"] = [[r.id, used] for r, _, used, _ in batch if used]
        return entries

    # -- output --

    def process(self, entries):
        finished = []
        for r, m, samples, used, admission in entries:
            if r in self.ends:
                continue
            r.fly -= m
            stale = r.stale > 0
            if stale:
                r.stale -= m
            if not samples:
                continue
            taken = 0 if admission else self.accepted(r, used)
            if not stale:
                rejected = used - taken
                r.computed -= rejected if r.computed > 0 else 0
                r.ph -= rejected if r.ph > 0 else 0
            stops = self.append(r, 1 + taken, stale)
            if not stale:
                placeholders = r.ph > 0
                if placeholders:
                    r.ph -= 1 + taken
                if r.status == RUNNING and (placeholders or self.k):
                    self.blocks.register(r, r.computed - r.fly)
            if stops:
                finished.append(r.id)
                self.ends.add(r)
                self.blocks.drop_all(r)
                (self.running if r in self.running else self.waiting).remove(r)
        if not self.is_async:
            for r, _, samples, *_ in entries:
                if r not in self.ends:
                    r.drafts = self.drafted(r) if samples else 0
        return finished

    def accepted(self, r, used):
        drawn = crc32(f"{r.id}!{r.output}".encode()) % (self.k + 1)
        return min(used, drawn if self.accept is None else self.accept)

    def drafted(self, r):
        if self.method != "ngram":
            return self.k
        return crc32(f"{r.id}?{r.output}".encode()) % (self.k + 1)

    def append(self, r, number, stale):
        for given in range(1, number + 1):
            r.tokens.append(generated(r.id, r.output))
            if len(r.tokens) >= self.max_len or r.output >= r.max_new:
                if not stale:
                    r.computed -= number - given
                return True
        return False


def groups_for(config):
    """The twin's block manager for a configuration."""
    spec = config.get("spec") or {}
    eagle = spec.get("method") == "eagle" and not spec.get("disable_eagle_block_drop", False)
    plain = spec.get("disable_lookahead_block_hashes", False)
    return Groups(
        config,
        drop=eagle and plain,
        lookahead=int(eagle and not plain),
        k=spec.get("num_spec_tokens", 0),
        in_flight=2 if config.get("v1_async") else 1,
    )


def step_log(config, trace, blocks=None):
    """The records of a run."""
    engine = Engine(config, blocks or groups_for(config))
    todo = [Twin(row) for row in sorted(trace, key=lambda row: row["arrival"])]
    log, pending = [], []
    t, empty, news = 0.0, 0, False
    while todo or engine.running or engine.waiting or pending:
        unfinished = engine.running or engine.waiting
        if not unfinished and not pending and todo[0].arrival > t:
            t = max(t, float(ceil(todo[0].arrival)))
        added, ignored = 0, []
        while todo and todo[0].arrival <= t:
            r = todo.pop(0)
            if r.plen >= engine.max_len:
                ignored.append(r.id)
            else:
                engine.blocks.join(r)
                engine.push(r)
                added += 1
        record = {"step": len(log), "time": t}
        if pending and not engine.running and not engine.waiting and not news:
            record |= {"drain": True, "ignored": ignored}
            finished = engine.process(pending.pop(0))
            t += 1.0
        else:
            record |= {"added": added, "ignored": ignored}
            try:
                entries = compose(engine, record)
            except EngineError:
                return [*log, {"step": len(log), "time": t, "error": "AssertionError"}]
            pending.append(entries)
            finished = []
            unfinished = engine.running or engine.waiting
            if not engine.is_async or len(pending) == 2 or not (entries or unfinished):
                finished = engine.process(pending.pop(0))
                t += 1.0
        news = bool(finished)
        record |= {"finished": finished, "free_gpu_blocks_end": len(engine.blocks.free)}
        log.append(record)
        if "drain" in record:
            continue
        if len(log) == config.get("max_steps", 1_000_000):
            return [*log, {"step": len(log), "time": t, "error": "max_steps"}]
        served = record["prefill"] or record["decode"] or finished or added
        empty = 0 if served else empty + 1
        if empty >= 50 and not todo:
            return [*log, {"step": len(log), "time": t, "error": "deadlock"}]
    return log


def compose(engine, record):
    """One scheduling call; completes the record as it stands right after it."""
    batch, preempted = engine.schedule()
    entries = engine.advance(batch, record)

    def tables(r):
        for g, table in enumerate(r.tables):
            yield (f"{r.id}#{g}" if g else r.id), table

    record |= {
        "preempted": [[r.id, "recompute"] for r in preempted],
        "swapped_out": [],
        "swapped_in": [],
        "waiting": len(engine.waiting),
        "running": len(engine.running),
        "swapped": 0,
        "free_gpu_blocks": len(engine.blocks.free),
        "free_cpu_blocks": 0,
        "batched_tokens": sum(m for _, m, *_ in entries),
        "blocks_to_copy": 0,
        "blocks_to_swap_in": 0,
        "blocks_to_swap_out": 0,
        "q": [queue_digest(engine.waiting), queue_digest(engine.running), 0],
        "bt": table_digest(pair for r, *_ in entries for pair in tables(r)),
    }
    return entries
