"""vLLM 0.6.3 as its rules are worded, in plain lists: slow, and easy to compare with them.

Nothing of kvsim is used. `step_log` returns the records that the engine is expected to write.
"""

from twins.steps import EngineError, play, queue_digest, table_digest
from twins.vllm063_blocks import LATER, NEVER, OK, Blocks
from twins.vllm063_groups import FINISHED, RUNNING, SWAPPED, WAITING, Budget, Seq, Twin


class Engine:
    """Queues and rules; one method per rule."""

    def __init__(self, config):
        self.blocks = Blocks(config)
        self.bs = config["block_size"]
        self.max_tokens = config["max_num_batched_tokens"]
        self.max_seqs = config["max_num_seqs"]
        self.max_len = config["max_model_len"]
        self.chunked = config.get("enable_chunked_prefill", False)
        self.caching = config.get("enable_prefix_caching", False)
        self.mode = config.get("preemption_mode")
        self.priority = config.get("policy", "fcfs") == "priority"
        self.is_async = config.get("async_output_proc", False)
        self.limit = self.max_len if self.chunked else min(self.max_len, self.max_tokens)
        self.waiting, self.running, self.swapped = [], [], []
        self.stopped, self.pending, self.reported = [], [], []

    def add(self, g):
        self.waiting.append(g)

    def busy(self):
        return bool(self.waiting or self.running or self.swapped)

    # -- rules of one scheduling call --

    def new_tokens(self, g, status, chunking):
        seqs = g.of(status)
        tokens = sum(q.new() for q in seqs)
        if chunking and len(seqs) == 1:
            left = self.max_tokens - self.budget.tokens
            if self.caching and self.max_tokens % self.bs:
                raise EngineError("ValueError")
            if tokens > left:
                return left // self.bs * self.bs if self.caching else left
        return tokens

    def prefills(self):
        result = []
        while self.waiting:
            g = self.waiting[0]
            if len(g.of(WAITING)) != 1:
                raise EngineError("AssertionError S:883")
            (q,) = g.of(WAITING)
            k = self.new_tokens(g, WAITING, self.chunked)
            verdict = NEVER if k > self.limit else self.blocks.admission(g)
            if verdict == NEVER:
                q.status = FINISHED
                self.ignored.append(self.waiting.pop(0))
                continue
            if verdict == LATER or k == 0 or not self.budget.fits(k, g.width()):
                break
            self.waiting.pop(0)
            self.blocks.allocate(q)
            q.status = RUNNING
            result.append((g, k))
            self.budget.add_tokens(g, k)
            self.budget.add_seqs(g, g.width())
        return result

    def run(self):
        """R: prefills, decodes, and the recompute and swap victims."""
        prefills, decodes, recomputed, swapped = [], [], [], []
        if self.stopped:
            raise EngineError("AssertionError S:541")
        while self.running:
            g = self.running[0]
            k = self.new_tokens(g, RUNNING, self.chunked)
            if k == 0:
                break
            self.running.pop(0)
            if self.is_async and len(g.seqs[0].tokens) > self.max_len:
                self.stopped.append(g)
                continue
            victim = None
            while victim is not g and not self.blocks.can_append(g):
                self.budget.subtract(g, k, g.width())
                victim = self.running.pop() if self.running else g
                if self.is_async and self.process_victim(victim):
                    continue
                mode = self.preempt(victim)
                (swapped if mode == "swap" else recomputed).append(victim)
            if victim is g:
                continue
            self.append(g)
            if g.prefill():
                prefills.append((g, k))
            else:
                decodes.append((g, 1))
            self.budget.add_tokens(g, k)
            if self.chunked:
                self.budget.add_seqs(g, g.width())
        return prefills, decodes, recomputed, swapped

    def append(self, g):
        self.copies += sum(self.blocks.append(q) for q in g.of(RUNNING))

    def swap_ins(self):
        prefills, decodes = [], []
        gpu, cpu = self.blocks.gpu, self.blocks.cpu
        while self.swapped:
            g = self.swapped[0]
            need = self.blocks.need(g.of(SWAPPED), gpu)
            if gpu.size < need:
                for q in g.seqs:
                    q.status = FINISHED
                self.infeasible.append(self.swapped.pop(0))
                continue
            if gpu.free() - need < self.blocks.wm:
                break
            k = self.new_tokens(g, SWAPPED, chunking=False)
            if k == 0 or not self.budget.fits(k, g.width()):
                break
            self.swapped.pop(0)
            moving = g.of(SWAPPED)
            self.pairs_in += self.blocks.move(moving, cpu, gpu)
            for q in moving:
                q.status = RUNNING
            self.append(g)
            (prefills if g.prefill() else decodes).append((g, k if g.prefill() else 1))
            self.budget.add_tokens(g, k)
            self.budget.add_seqs(g, g.width())
            self.swapped_in.append(g.id)
        return prefills, decodes

    def force(self):
        """F: the worst of the running make room for a better head of the queue."""
        running = sorted(self.running, key=Twin.key)
        if self.waiting:
            h = self.waiting.pop(0)
            k = self.new_tokens(h, WAITING, chunking=False)
            while running and running[-1].key() > h.key():
                if self.blocks.admission(h) == OK and self.budget.fits(k, h.width()):
                    break
                v = running.pop()
                self.budget.subtract(v, self.new_tokens(v, RUNNING, False), v.width())
                pairs = self.pairs_out
                self.preempt(v)
                self.pairs_out = pairs
                self.waiting.insert(0, v)
            self.waiting.insert(0, h)
            self.waiting.sort(key=Twin.key)
        self.running = running

    def preempt(self, g):
        mode = self.mode or ("recompute" if g.width() == 1 else "swap")
        moving = g.of(RUNNING)
        if mode == "recompute":
            if len(moving) != 1:
                raise EngineError("AssertionError S:1505")
            (q,) = moving
            q.status = WAITING
            self.blocks.free(q)
            q.computed, q.prefill = 0, True
        else:
            cpu = self.blocks.cpu
            if self.blocks.need(moving, cpu) > cpu.free():
                raise EngineError("RuntimeError S:1536")
            self.pairs_out += self.blocks.move(moving, self.blocks.gpu, cpu)
            for q in moving:
                q.status = SWAPPED
        self.preempted.append([g.id, mode])
        return mode

    # -- one scheduling call --

    def schedule(self):
        """The batch: (group, chunk) in order."""
        self.budget = Budget(self.max_tokens, self.max_seqs)
        self.ignored, self.infeasible, self.preempted, self.swapped_in = [], [], [], []
        self.copies = self.pairs_in = self.pairs_out = 0
        return self.schedule_chunked() if self.chunked else self.schedule_default()

    def schedule_default(self):
        for g in self.running:
            self.budget.add_seqs(g, g.width())
        first = [] if self.swapped else self.prefills()
        prefills, decodes, recomputed, swapped, back = [], [], [], [], []
        if not first:
            if self.priority:
                self.force()
            prefills, decodes, recomputed, swapped = self.run()
            if not (recomputed or swapped):
                back = [entry for entries in self.swap_ins() for entry in entries]
        for g in recomputed:
            self.waiting.insert(0, g)
        batch = first + prefills + decodes + back
        self.running += [g for g, _ in batch]
        self.swapped += swapped
        return batch

    def schedule_chunked(self):
        prefills, decodes, recomputed, swapped = self.run()
        back_prefills, back_decodes = [], []
        if not (recomputed or swapped):
            back_prefills, back_decodes = self.swap_ins()
        first = self.prefills()
        for g in recomputed:
            self.waiting.insert(0, g)
        for entries in (back_decodes, back_prefills, decodes, prefills, first):
            self.running += [g for g, _ in entries]
        self.swapped += swapped
        return first + prefills + back_prefills + decodes + back_decodes

    def account(self, batch, time):
        """Bookkeeping after the call: entries (group, chunk, samples), prefills, decodes."""
        entries, prefill, decode = [], [], []
        for g, chunk in batch:
            for q in g.of(RUNNING):
                q.access = time
                m = len(q.table) - 1
                if self.caching and not q.gap and q.seen < m:
                    q.seen += sum(self.blocks.gpu.is_computed(b) for b in q.table[q.seen : m])
                    q.gap = q.seen < m
            if not g.prefill():
                entries.append((g, chunk, True))
                decode.append(g.id)
                continue
            if len(g.seqs) != 1:
                raise EngineError("AssertionError S:1277")
            (q,) = g.seqs
            end = min(len(q.tokens), q.computed + chunk)
            covered = q.seen * self.bs if self.caching else 0
            cached = 0
            if covered > q.computed:
                cached = covered - q.computed if covered < end else end - q.computed - 1
            samples = q.computed + chunk >= len(q.tokens)
            entries.append((g, chunk, samples))
            prefill.append([g.id, chunk, cached, q.computed, int(samples)])
        if batch:
            self.blocks.gpu.scheduled()
            self.blocks.cpu.scheduled()
        return entries, prefill, decode

    # -- output processing --

    def advance(self, g, chunk):
        for q in g.seqs:
            if q.status != FINISHED:
                q.computed += chunk
                if q.computed == len(q.tokens):
                    q.prefill = False

    def process(self, entries):
        """Synchronous."""
        before = len(self.reported)
        for g, chunk, samples in entries:
            if g.finished():
                continue
            self.advance(g, chunk)
            if not samples:
                continue
            for q in g.of(RUNNING):
                self.sample(g, q)
            if g.finished():
                self.reported.append(g)
        if len(self.reported) > before:
            self.running = [g for g in self.running if not g.finished()]

    def sample(self, g, q):
        children = []
        if len(g.seqs) == 1:
            for j in range(g.n - 1):
                child = Seq(q.tokens, j)
                child.status, child.computed, child.prefill = RUNNING, q.computed, False
                children.append(child)
        for each in [*children, q]:
            g.append(each)
        for each in [*children, q]:
            if g.stops(each, self.max_len):
                each.status = FINISHED
        for child in children:
            g.seqs.append(child)
            if child.status != FINISHED:
                self.blocks.fork(q, child)
        if q.status == FINISHED:
            self.blocks.free(q)

    def process_one(self, g, samples):
        """Asynchronous: the stop test of one pending entry."""
        (q,) = g.seqs
        if q.status != FINISHED and samples and g.stops(q, self.max_len):
            q.status = FINISHED
            self.blocks.free(q)
            self.reported.append(g)

    def process_pending(self):
        entries, self.pending = self.pending, []
        before = len(self.reported)
        for g, _, samples in entries:
            self.process_one(g, samples)
        if len(self.reported) > before:
            self.running = [g for g in self.running if not g.finished()]
            self.stopped = []

    def process_victim(self, v):
        """Whether a victim turns out to have finished."""
        mine = [entry for entry in self.pending if entry[0] is v]
        self.pending = [entry for entry in self.pending if entry[0] is not v]
        for g, _, samples in mine:
            self.process_one(g, samples)
        return v.finished()

    def step(self, time):
        self.reported = []
        batch = self.schedule()
        entries, prefill, decode = self.account(batch, time)
        gpu, cpu = self.blocks.gpu, self.blocks.cpu
        record = {
            "prefill": prefill,
            "decode": decode,
            "preempted": self.preempted,
            "swapped_out": [name for name, mode in self.preempted if mode == "swap"],
            "swapped_in": self.swapped_in,
            "ignored": [g.id for g in self.ignored + self.infeasible],
            "waiting": len(self.waiting),
            "running": len(self.running),
            "swapped": len(self.swapped),
            "free_gpu_blocks": gpu.free(),
            "free_cpu_blocks": cpu.free(),
            "batched_tokens": self.budget.tokens,
            "blocks_to_copy": self.copies,
            "blocks_to_swap_in": self.pairs_in,
            "blocks_to_swap_out": self.pairs_out,
            "q": [queue_digest(queue) for queue in (self.waiting, self.running, self.swapped)],
            "bt": table_digest((g.id, q.table) for g, _ in batch for q in g.of(RUNNING)),
        }
        if self.is_async:
            self.process_pending()
            for g, chunk, samples in entries:
                if not g.finished():
                    self.advance(g, chunk)
                    if samples:
                        g.append(g.seqs[0])
            self.pending = entries
            if not self.busy():
                self.process_pending()
        else:
            self.process(entries)
        record["finished"] = [g.id for g in self.reported]
        record["free_gpu_blocks_end"] = gpu.free()
        return record


def step_log(config, trace):
    """The records of a run."""
    twins = [Twin(row) for row in trace]
    return play(Engine(config), twins, config.get("max_steps", 1_000_000))
