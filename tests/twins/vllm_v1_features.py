"""vLLM V1 0.33.0 as people run it, as its rules are worded: plain lists, slow.

Nothing of kvsim is used. `step_log` returns the records that the engine is expected to write.
"""

from math import ceil
from zlib import crc32

from twins.steps import EngineError, generated, queue_digest, table_digest
from twins.vllm_v1_connectors import CONNECTORS, LATER, Nothing
from twins.vllm_v1_groups import Groups

LOOK = {"ngram": 0, "draft_model": 1, "eagle": 1, "dflash": 1}


class Twin:
    """One request."""

    def __init__(self, row, name):
        self.id, self.arrival, self.priority = name, row["arrival"], row.get("priority", 0)
        self.tokens = list(row["prompt_token_ids"])
        self.plen, self.max_new = len(self.tokens), row["output_len"]
        self.lora, self.key = row.get("lora"), (row.get("lora"), row.get("cache_salt"))
        self.skip, self.pd = row.get("skip_prefix_read", False), row.get("pd")
        self.grammar = row.get("grammar_ready", 0)
        self.abort, self.abort_mid = row.get("abort"), row.get("abort_mid", False)
        self.computed = self.ph = self.fly = self.stale = self.drafts = self.junction = 0
        self.seq = self.not_before = 0
        self.part = self.drop = self.ever = self.load = self.loaded = self.sync = False
        self.status = "unknown"  # then waiting, running, finished, aborted

    @property
    def output(self):
        return len(self.tokens) - self.plen


class Engine:
    """Queues, batches and rules; one method per rule."""

    def __init__(self, config):
        spec = config.get("spec") or {}
        self.k, self.method = spec.get("num_spec_tokens", 0), spec.get("method")
        self.accept = spec.get("accept")
        self.slots = spec.get("draft_slots", int(self.method == "draft_model"))
        self.look = LOOK.get(self.method, 0) * self.k + (self.method == "dflash")
        self.is_async = config.get("v1_async", False)
        self.stages = config.get("pipeline_parallel_size", 1)
        self.most_pending = self.stages + self.is_async
        kind = config.get("kv_connector")
        needs = self.method == "eagle" and not spec.get("disable_eagle_block_drop", False)
        plain = bool(kind) or spec.get("disable_lookahead_block_hashes", False)
        caching = config.get("enable_prefix_caching", False)
        self.blocks = Groups(
            config,
            drop=needs and plain,
            lookahead=int(needs and not plain),
            k=self.k,
            in_flight=self.most_pending,
            keyed=caching or bool(kind),
        )
        self.kind = kind
        self.connector = CONNECTORS[kind](config, self.blocks) if kind else Nothing()
        self.defers = self.most_pending > 1 and self.connector.can_load
        self.max_seqs, self.max_len = config["max_num_seqs"], config["max_model_len"]
        self.batched, self.max_loras = config["max_num_batched_tokens"], config.get("max_loras")
        self.priority = config.get("policy", "fcfs") == "priority"
        self.wm = int(config.get("v1_watermark", 0.0) * config["num_gpu_blocks"])
        self.full = config.get("v1_reserve_full_isl", True)
        self.chunked = config.get("v1_enable_chunked_prefill", True)
        self.long = config.get("long_prefill_token_threshold", 0)
        self.running, self.waiting, self.holding = [], [], []
        self.prefills, self.kept, self.late, self.gone = [], {}, [], []
        self.call = self.sseq = self.pseq = 0

    # -- queues --

    def put(self, queue, requests, front=True):
        queue[:] = requests + queue if front else queue + requests
        if self.priority:
            queue.sort(key=lambda r: (r.priority, r.arrival, r.id))

    def unfinished(self):
        return bool(self.running or self.waiting or self.holding)

    def busy(self):
        if not self.kind:
            return self.unfinished()
        return self.unfinished() or bool(self.gone or self.kept or self.connector.busy())

    def owns(self, r):
        return r.load or r.computed > 0

    def reported_soon(self, r):
        return self.defers and r.seq > self.pseq

    def preempt(self, v):
        self.blocks.drop_all(v)
        v.status, v.ever, v.computed, v.ph, v.drafts = "waiting", True, 0, 0, 0
        v.drop = self.connector.delivers or (v.drop and v.stale > 0)
        v.stale = v.fly
        self.prefills = [p for p in self.prefills if p is not v]
        self.put(self.waiting, [v])
        self.preempted.append(v)

    def allocate(self, r, m, **more):
        guarded = r.status == "waiting" and self.running
        return self.blocks.allocate(r, m, w=self.wm if guarded else 0, **more)

    # -- schedule --

    def schedule(self, t):
        self.blocks.now.clear()
        self.call += 1
        self.bud = self.ibud = self.batched
        total = len(self.running) + len(self.waiting) + len(self.holding)
        self.thr = self.long if total > 1 else 0
        self.batch, self.preempted = [], []
        self.run()
        if not self.preempted:
            self.admit(t)

    def run(self):
        i = 0
        while i < len(self.running) and self.bud > 0 and self.ibud > self.slots:
            r = self.running[i]
            m = self.wanted(r)
            if m <= 0:
                i += 1
                continue
            while not self.allocate(r, m, look=self.look):
                v = self.victim()
                if self.reported_soon(v):
                    return
                if self.running.index(v) < i:
                    i -= 1
                self.running.remove(v)
                for entry in [entry for entry in self.batch if entry[0] is v]:
                    self.batch.remove(entry)
                    self.bud += entry[1]
                    self.ibud += entry[1] + self.slots
                self.preempt(v)
                if v is r:
                    break
            if r.status == "waiting":
                if self.priority:
                    continue
                return
            used = max(0, min(r.drafts, m + r.computed - len(r.tokens) - r.ph))
            r.drafts = 0
            self.batch.append((r, m, used, 0, False))
            self.bud -= m
            self.ibud -= m + self.slots
            i += 1

    def wanted(self, r):
        if self.is_async and r.ph > 0 and r.computed + 2 - r.ph >= r.plen + r.max_new:
            return 0
        if self.is_async and self.call < r.not_before:
            return 0
        m = len(r.tokens) + r.drafts + r.ph - r.computed
        if 0 < self.thr < m:
            m = self.thr
        m = min(m, self.bud, self.ibud - self.slots, self.max_len - r.computed - 1)
        return self.blocks.cut(r, r.computed, m) if m > 0 else m

    def victim(self):
        if not self.priority:
            return self.running[-1]
        worst = max((v.priority, v.arrival) for v in self.running)
        return next(v for v in self.running if (v.priority, v.arrival) == worst)

    def admit(self, t):
        aside = []
        ran = list(self.batch)
        while self.bud > 0:
            queue = self.holding or self.waiting
            if not queue or self.ibud <= self.slots or len(self.running) >= self.max_seqs:
                break
            r = queue[0]
            answer = self.look_at(r, t, ran)
            if answer == "stop":
                break
            queue.pop(0)
            if answer == "aside":
                aside.append((r, self.owns(r)))
        self.put(self.waiting, [r for r, owns in aside if not owns])
        self.put(self.holding, [r for r, owns in aside if owns])

    def look_at(self, r, t, ran):
        if r.load:
            if not r.loaded:
                return "aside"
            r.load = r.loaded = False
            self.blocks.register(r, r.computed)
            if r.computed == len(r.tokens):
                r.computed -= 1
        if r.grammar > t or (r.stale and not r.drop):
            return "aside"
        loras = {other.lora for other in self.running} - {None}
        if self.max_loras and r.lora and r.lora not in loras and len(loras) == self.max_loras:
            return "aside"
        hits, nlocal, ext, load = [[] for _ in self.blocks.groups], 0, 0, False
        comp = r.computed
        if comp == 0:
            if not r.skip:
                hits, nlocal = self.blocks.hits(r)
            ext, load = self.connector.match(r, nlocal)
            if r.skip:
                ext, load = 0, False
            if ext is LATER:
                return "aside"
            comp = nlocal + ext
        m, padded = 0, False
        if not load:
            m, padded = self.chunk(r, comp, ran)
            if m <= 0:
                return "stop"
        reserved = self.reserved() if load else 0
        look = 0 if load else self.look
        if not self.allocate(
            r,
            m,
            hits=hits,
            nhit=nlocal,
            ext=ext,
            full=self.full,
            look=look,
            delay=load,
            reserved=reserved,
        ):
            return "stop"
        r.sync = ext > 0 and not load
        self.connector.allocated(r, nlocal, ext)
        r.computed = comp
        if load or comp + m < len(r.tokens):
            self.prefills = [p for p in self.prefills if p is not r] + [r]
        if load:
            r.load = True
            return "aside"
        r.status = "running"
        self.running.append(r)
        self.batch.append((r, m, self.k if padded else 0, comp, True))
        self.bud -= m
        self.ibud -= m + self.slots
        return "admitted"

    def chunk(self, r, comp, ran):
        m, most = len(r.tokens) - comp, min(self.bud, self.ibud - self.slots)
        prompts = any(other.part for other, *_ in ran)
        padded = self.k > 0 and m == 1 and not prompts and bool(ran or comp > 0)
        padded = padded and comp + self.k + 2 <= self.max_len
        if padded:
            if 1 + self.k > most:
                return 0, False
            m = 1 + self.k
        if 0 < self.thr < m:
            m = self.thr
        if not self.chunked and m > most:
            return 0, False
        m = self.blocks.cut(r, comp, min(m, most))
        if padded and m != 1 + self.k:
            if m > 0 and not any(map(self.blocks.aligned, range(len(self.blocks.groups)))):
                raise EngineError("AssertionError")
            return min(m, 1), False
        return m, padded

    def reserved(self):
        more = 1 + self.k + self.look if self.k else 0
        groups = range(len(self.blocks.groups))
        total = sum(ceil(more / self.blocks.groups[g]["block_size"]) for g in groups)
        for p in self.prefills:
            n = min(len(p.tokens), self.max_len)
            total += sum(
                self.blocks.missing(p, g, n + more, True, [], p.computed, n) for g in groups
            )
        return total

    def advance(self, record):
        entries, prefill, decode = [], [], []
        self.sseq += bool(self.batch)
        for r, m, used, comp, admitted in self.batch:
            before = r.computed
            part = before < len(r.tokens) + r.ph - 1
            r.computed += m
            r.fly += m
            r.seq = self.sseq
            r.part = r.computed < len(r.tokens) + r.ph
            samples = not r.part
            if samples:
                self.prefills = [p for p in self.prefills if p is not r]
            if self.is_async and samples:
                r.ph += 1 + used
                r.drafts = self.k
                r.not_before = self.call + self.stages
            entries.append((r, m, samples, used, admitted))
            if admitted:
                prefill.append([r.id, m, comp, 0, int(samples)])
            elif part:
                prefill.append([r.id, m, 0, before, int(samples)])
            else:
                decode.append(r.id)
        record |= {"prefill": prefill, "decode": decode}
        if self.k:
            record["spec"] = [[r.id, used] for r, _, used, *_ in self.batch if used]
        return entries

    # -- results --

    def process(self, entries, record):
        finished = []
        if entries:
            self.pseq += 1
            while self.defers and self.late and self.late[0][0] <= self.pseq:
                self.blocks.release(reversed(self.late.pop(0)[1]))
        for r, m, samples, used, admitted in entries:
            r.fly -= m
            stale = r.stale > 0
            if stale:
                r.stale -= m
            over = r.status in ("finished", "aborted")
            if over or (stale and r.drop) or not samples:
                continue
            if self.output(r, used, admitted, stale):
                finished.append(r.id)
                self.remove(r)
                r.status = "finished"
                self.retire(r)
        if not self.is_async:
            for r, *_ in entries:
                if r.status not in ("finished", "aborted"):
                    r.drafts = 0 if r.part else self.drafted(r)
        if self.kind:
            received, read = self.connector.hear(record)
            for r in received + read:
                if r in self.kept:
                    for table in self.kept.pop(r):
                        self.blocks.release(reversed(table))
                else:
                    r.loaded = True
        return finished

    def output(self, r, used, admitted, stale):
        drawn = crc32(f"{r.id}!{r.output}".encode()) % (self.k + 1)
        taken = 0 if admitted else min(used, drawn if self.accept is None else self.accept)
        if not stale:
            r.computed -= used - taken if r.computed > 0 else 0
            r.ph -= used - taken if r.ph > 0 else 0
        stops = False
        for given in range(1, taken + 2):
            r.tokens.append(generated(r.id, r.output))
            if len(r.tokens) >= self.max_len or r.output >= r.max_new:
                stops = True
                r.computed -= 0 if stale else taken + 1 - given
                break
        if not stale:
            had = r.ph > 0
            r.ph -= 1 + taken if had else 0
            if r.status == "running" and (had or self.k):
                self.blocks.register(r, r.computed - r.fly)
        return stops

    def drafted(self, r):
        if self.method != "ngram":
            return self.k
        return crc32(f"{r.id}?{r.output}".encode()) % (self.k + 1)

    def remove(self, r):
        for queue in (self.running, self.waiting, self.holding):
            if r in queue:
                queue.remove(r)

    def retire(self, r):
        keep = r.load and not r.loaded
        if self.kind:
            self.blocks.trim(r, max(0, r.computed - r.fly))
            keep |= self.connector.finished(r)
        self.prefills = [p for p in self.prefills if p is not r]
        self.gone.append(r)
        tables = r.tables
        if keep:
            self.kept[r] = tables
            self.blocks.join(r)
        elif self.reported_soon(r):
            self.late.append((self.sseq, [b for table in tables for b in table]))
            self.blocks.join(r)
        else:
            self.blocks.drop_all(r)

    def end(self, r):
        """An abort. Whether the request was in progress."""
        if r.status not in ("waiting", "running"):
            return False
        self.remove(r)
        r.status = "aborted"
        self.retire(r)
        return True


def children(row):
    n = row.get("n", 1)
    return [Twin(row, row["id"])] if n == 1 else [Twin(row, f"{i}_{row['id']}") for i in range(n)]


class Run:
    """The loop around an engine."""

    def __init__(self, config, trace):
        self.config, self.engine = config, Engine(config)
        ordered = sorted(trace, key=lambda row: row["arrival"])
        self.todo = [child for row in ordered for child in children(row)]
        listed = [r for row in trace for r in self.todo if r.id.split("_")[-1] == row["id"]]
        aborts = [r for r in listed if r.abort is not None]
        self.aborts = sorted(aborts, key=lambda r: r.abort)
        self.pending, self.log, self.t, self.empty = [], [], 0.0, 0

    def play(self):
        engine = self.engine
        while self.todo or engine.busy() or self.pending:
            if not engine.busy() and not self.pending and self.todo[0].arrival > self.t:
                self.t = max(self.t, float(ceil(self.todo[0].arrival)))
            try:
                error = self.step()
            except EngineError:
                error = "AssertionError"
            if error:
                return [*self.log, {"step": len(self.log), "time": self.t, "error": error}]
        return self.log

    def step(self):
        engine, t = self.engine, self.t
        record = {"step": len(self.log), "time": t}
        added, ignored = self.hand_over()
        aborted, finished = [], []
        news = engine.unfinished() or engine.gone or engine.busy()
        if self.pending and not news:
            record |= {"drain": True, "ignored": ignored}
            finished = engine.process(self.pending.pop(0), record)
            self.t += 1.0
        else:
            record |= {"added": added, "ignored": ignored}
            aborted = self.abort_due(False)
            self.pending.append(compose(engine, record, t))
            full = len(self.pending) == engine.most_pending
            if full or not (self.pending[-1] or engine.busy()):
                aborted += self.abort_due(True)
                finished = engine.process(self.pending.pop(0), record)
                self.t += 1.0
            elif engine.kind:
                record["xdone"] = []
        if aborted:
            record["aborted"] = aborted
        record |= {"finished": finished, "free_gpu_blocks_end": len(engine.blocks.free)}
        self.log.append(record)
        if "drain" in record:
            return None
        if len(self.log) == self.config.get("max_steps", 1_000_000):
            return "max_steps"
        served = record["prefill"] or record["decode"] or finished or added
        self.empty = 0 if served else self.empty + 1
        return "deadlock" if self.empty >= 50 and not self.todo else None

    def hand_over(self):
        added, ignored = 0, []
        while self.todo and self.todo[0].arrival <= self.t:
            r = self.todo.pop(0)
            if r.plen >= self.engine.max_len:
                ignored.append(r.id)
                continue
            self.engine.blocks.join(r)
            r.status = "waiting"
            self.engine.put(self.engine.waiting, [r], front=False)
            added += 1
        return added, ignored

    def abort_due(self, mid):
        done = []
        while (
            self.aborts and self.aborts[0].abort <= self.t and (mid or not self.aborts[0].abort_mid)
        ):
            r = self.aborts.pop(0)
            if self.engine.end(r):
                done.append(r.id)
        return done


def step_log(config, trace):
    """The records of a run."""
    return Run(config, trace).play()


def compose(engine, record, t):
    """One scheduling call; completes the record as it stands right after it."""
    engine.schedule(t)
    engine.connector.build(engine, record)
    engine.gone = []
    entries = engine.advance(record)

    def tables(r):
        for g, table in enumerate(r.tables):
            yield (f"{r.id}#{g}" if g else r.id), table

    record |= {
        "preempted": [[r.id, "recompute"] for r in engine.preempted],
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
        "q": [queue_digest(q) for q in (engine.waiting, engine.running, engine.holding)],
        "bt": table_digest(pair for r, *_ in entries for pair in tables(r)),
    }
    if engine.kind:
        record["holding"] = len(engine.holding)
    return entries
