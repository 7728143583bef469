"""vLLM V1 0.33.0 as its rules are worded, in plain lists: slow, and easy to compare with them.

Nothing of kvsim is used. `step_log` returns the records that the engine is expected to write.
"""

from math import ceil

from twins.steps import generated, queue_digest, table_digest

WAITING, RUNNING, PREEMPTED = "waiting", "running", "preempted"


class Twin:
    """One request."""

    def __init__(self, row):
        self.id = row["id"]
        self.arrival = row["arrival"]
        self.priority = row.get("priority", 0)
        self.tokens = list(row["prompt_token_ids"])
        self.plen = len(self.tokens)
        self.max_new = row["output_len"]
        self.computed = self.reg = 0
        self.ph = self.fly = self.stale = 0
        self.table = []
        self.status = WAITING

    def append(self):
        self.tokens.append(generated(self.id, len(self.tokens) - self.plen))

    def stops(self, max_model_len):
        return len(self.tokens) >= max_model_len or len(self.tokens) - self.plen >= self.max_new


class Engine:
    """Pool, queues and rules; one method per rule."""

    def __init__(self, config):
        self.bs = config["block_size"]
        self.budget = config["max_num_batched_tokens"]
        self.max_seqs = config["max_num_seqs"]
        self.max_len = config["max_model_len"]
        self.caching = config.get("enable_prefix_caching", False)
        self.priority = config.get("policy", "fcfs") == "priority"
        self.wm = int(config.get("v1_watermark", 0.0) * config["num_gpu_blocks"])
        self.full = config.get("v1_reserve_full_isl", True)
        self.chunked = config.get("v1_enable_chunked_prefill", True)
        self.long = config.get("long_prefill_token_threshold", 0)
        self.is_async = config.get("v1_async", False)
        self.free = list(range(1, config["num_gpu_blocks"]))
        self.count = [0] * config["num_gpu_blocks"]
        self.key = [None] * config["num_gpu_blocks"]
        self.map = {}
        self.running = []
        self.waiting = []

    # -- pool --

    def take(self):
        b = self.free.pop(0)
        if self.key[b] is not None:
            self.map[self.key[b]].remove(b)
            if not self.map[self.key[b]]:
                del self.map[self.key[b]]
            self.key[b] = None
        self.count[b] = 1
        return b

    def release(self, r):
        blank = []
        for b in reversed(r.table):
            self.count[b] -= 1
            if self.count[b] == 0:
                if self.key[b] is None:
                    blank.append(b)
                else:
                    self.free.append(b)
        self.free = blank + self.free
        r.table = []

    def keys(self, r):
        return [tuple(r.tokens[: i * self.bs]) for i in range(1, len(r.tokens) // self.bs + 1)]

    def register(self, r, m):
        keys = self.keys(r)
        bound = min(m // self.bs, len(keys))
        for i in range(r.reg, bound):
            self.key[r.table[i]] = keys[i]
            self.map.setdefault(keys[i], []).append(r.table[i])
        r.reg = max(r.reg, bound)

    def hits(self, r):
        found = []
        if self.caching:
            for key in self.keys(r)[: (len(r.tokens) - 1) // self.bs]:
                if key not in self.map:
                    break
                found.append(self.map[key][0])
        return found

    def allocate(self, r, k, hits, full):
        ev = [b for b in hits if self.count[b] == 0]
        w = self.wm if r.status in (WAITING, PREEMPTED) and self.running else 0

        def need(x):
            return max(ceil(x / self.bs) - len(hits) - len(r.table), 0) + len(ev)

        if full and need(min(len(r.tokens), self.max_len)) + w > len(self.free):
            return False
        total = r.computed + len(hits) * self.bs
        m = need(min(total + k, self.max_len))
        if m + w > len(self.free):
            return False
        if hits:
            for b in hits:
                if b in ev:
                    self.free.remove(b)
                self.count[b] += 1
                r.table.append(b)
            r.reg = len(r.table)
        for _ in range(m - len(ev)):
            r.table.append(self.take())
        if self.caching:
            self.register(r, min(total + k, len(r.tokens)))
        return True

    # -- queues --

    def order(self, r):
        return r.priority, r.arrival, r.id

    def push(self, r):
        self.waiting.append(r)
        if self.priority:
            self.waiting.sort(key=self.order)

    def push_front(self, r):
        self.waiting.insert(0, r)
        if self.priority:
            self.waiting.sort(key=self.order)

    def preempt(self, v):
        self.release(v)
        v.reg = 0
        v.status = PREEMPTED
        v.computed = 0
        v.stale = v.fly
        v.ph = 0
        self.push_front(v)

    # -- scheduling --

    def schedule(self):
        budget = self.budget
        thr = self.long if len(self.running) + len(self.waiting) > 1 else 0
        batch, preempted = [], []
        i = 0
        while i < len(self.running) and budget > 0:
            r = self.running[i]
            if self.is_async and r.ph > 0 and r.computed + 2 - r.ph >= r.plen + r.max_new:
                i += 1
                continue
            k = len(r.tokens) + r.ph - r.computed
            if 0 < thr < k:
                k = thr
            k = min(k, budget, self.max_len - r.computed - 1)
            if k == 0:
                i += 1
                continue
            placed = True
            while not self.allocate(r, k, [], False):
                if self.priority:
                    worst = max((v.priority, v.arrival) for v in self.running)
                    v = next(v for v in self.running if (v.priority, v.arrival) == worst)
                else:
                    v = self.running[-1]
                place = self.running.index(v)
                self.running.remove(v)
                if place < i:
                    i -= 1
                for entry in batch:
                    if entry[0] is v:
                        batch.remove(entry)
                        budget += entry[1]
                        break
                self.preempt(v)
                preempted.append(v)
                if v is r:
                    placed = False
                    break
            if not placed:
                if self.priority:
                    continue
                break
            batch.append((r, k))
            budget -= k
            i += 1
        admitted = [] if preempted else self.admit(budget, thr)
        return batch, admitted, preempted

    def admit(self, budget, thr):
        aside, admitted = [], []
        while budget > 0 and self.waiting and len(self.running) < self.max_seqs:
            r = self.waiting[0]
            if r.stale != 0:
                aside.append(self.waiting.pop(0))
                continue
            hits = self.hits(r)
            k = len(r.tokens) - len(hits) * self.bs
            if 0 < thr < k:
                k = thr
            if not self.chunked and k > budget:
                break
            k = min(k, budget)
            if not self.allocate(r, k, hits, self.full):
                break
            self.waiting.pop(0)
            self.running.append(r)
            r.status = RUNNING
            r.computed = len(hits) * self.bs
            admitted.append((r, k, len(hits) * self.bs))
            budget -= k
        self.waiting = aside + self.waiting
        return admitted

    def advance(self, batch, admitted):
        """Book the batch: (its entries, prefill and decode of the record)."""
        entries, prefill, decode = [], [], []
        for r, k, hit in [(r, k, None) for r, k in batch] + admitted:
            before = r.computed
            chunk = before < len(r.tokens) + r.ph - 1
            r.computed += k
            r.fly += k
            samples = not r.computed < len(r.tokens) + r.ph
            if self.is_async and samples:
                r.ph += 1
            entries.append((r, k, samples))
            if hit is not None:
                prefill.append([r.id, k, hit, 0, int(samples)])
            elif chunk:
                prefill.append([r.id, k, 0, before, int(samples)])
            else:
                decode.append(r.id)
        return entries, prefill, decode

    def process(self, entries):
        finished = []
        for r, k, samples in entries:
            if r not in self.running and r not in self.waiting:
                continue
            r.fly -= k
            stale = r.stale > 0
            if stale:
                r.stale -= k
            if not samples:
                continue
            r.append()
            stops = r.stops(self.max_len)
            if not stale and r.ph > 0:
                r.ph -= 1
                if self.caching and r.status == RUNNING:
                    self.register(r, r.computed - r.fly)
            if stops:
                finished.append(r.id)
                self.release(r)
                (self.running if r in self.running else self.waiting).remove(r)
        return finished


def step_log(config, trace):
    """The records of a run."""
    engine = Engine(config)
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
                engine.push(r)
                added += 1
        record = {"step": len(log), "time": t}
        if pending and not engine.running and not engine.waiting and not news:
            record |= {"drain": True, "ignored": ignored}
            finished = engine.process(pending.pop(0))
            t += 1.0
        else:
            record |= {"added": added, "ignored": ignored}
            entries = compose(engine, record)
            pending.append(entries)
            finished = []
            unfinished = engine.running or engine.waiting
            if not engine.is_async or len(pending) == 2 or not (entries or unfinished):
                finished = engine.process(pending.pop(0))
                t += 1.0
        news = bool(finished)
        record |= {"finished": finished, "free_gpu_blocks_end": len(engine.free)}
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
    batch, admitted, preempted = engine.schedule()
    entries, prefill, decode = engine.advance(batch, admitted)
    record |= {
        "prefill": prefill,
        "decode": decode,
        "preempted": [[r.id, "recompute"] for r in preempted],
        "swapped_out": [],
        "swapped_in": [],
        "waiting": len(engine.waiting),
        "running": len(engine.running),
        "swapped": 0,
        "free_gpu_blocks": len(engine.free),
        "free_cpu_blocks": 0,
        "batched_tokens": sum(k for _, k, _ in entries),
        "blocks_to_copy": 0,
        "blocks_to_swap_in": 0,
        "blocks_to_swap_out": 0,
        "q": [queue_digest(engine.waiting), queue_digest(engine.running), 0],
        "bt": table_digest((r.id, r.table) for r, _, _ in entries),
    }
    return entries
