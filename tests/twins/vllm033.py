"""vLLM 0.3.3 as its rules are worded, in plain lists: slow, and easy to compare with them.

Nothing of kvsim is used.
"""

from twins.steps import EngineError, play, queue_digest, table_digest

WAITING, RUNNING, SWAPPED, FINISHED = "waiting", "running", "swapped", "finished"


def step_log(config, trace):
    """The records that the engine is expected to write."""
    engine = Engine(config)
    groups = [Group(row, config["block_size"], engine.prefixes) for row in trace]
    return play(engine, groups, config.get("max_steps", 1_000_000))


class Block:
    """A physical block."""

    def __init__(self, number):
        self.number = number
        self.count = 0


class Pool:
    """The stack of free blocks of a device."""

    def __init__(self, size):
        self.free = [Block(number) for number in range(size)]

    def take(self):
        if not self.free:
            raise EngineError("ValueError: out of memory")
        block = self.free.pop()
        block.count = 1
        return block

    def drop(self, block):
        if block.count == 0:
            raise EngineError("ValueError: double free")
        block.count -= 1
        if block.count == 0:
            self.free.append(block)


class Prefix:
    """A declared prefix of so many blocks."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.table = None
        self.computed = False


class Sequence:
    """One sample."""

    def __init__(self, length, sample):
        self.length = length
        self.sample = sample
        self.status = WAITING
        self.table = []

    def finished(self):
        return self.status == FINISHED


class Group:
    """One request."""

    def __init__(self, row, bs, prefixes):
        self.id = row["id"]
        self.arrival = row["arrival"]
        self.plen = len(row["prompt_token_ids"])
        self.n = row.get("n") or 1
        self.lengths = row.get("output_lens")
        self.most = max(self.lengths) if self.lengths else row["output_len"]
        self.seqs = [Sequence(self.plen, self.n - 1)]
        content = tuple(row["prompt_token_ids"][: row.get("prefix_pos") or 0])
        content = content[: len(content) // bs * bs]
        self.prefix = None
        if content:
            self.prefix = prefixes.setdefault(content, Prefix(len(content) // bs))

    def of(self, status):
        return [seq for seq in self.seqs if seq.status == status]

    def width(self):
        if len(self.seqs) < self.n:
            return self.n
        return sum(not seq.finished() for seq in self.seqs)


class Engine:
    """Pools, queues and rules; one method per rule."""

    def __init__(self, config):
        self.bs = config["block_size"]
        self.gpu = Pool(config["num_gpu_blocks"])
        self.cpu = Pool(config.get("num_cpu_blocks", 0))
        self.total = config["num_gpu_blocks"]
        self.wm = int(config.get("watermark", 0.01) * self.total)
        self.max_len = config["max_model_len"]
        self.max_tokens = config.get("max_num_batched_tokens") or max(self.max_len, 2048)
        self.max_seqs = config.get("max_num_seqs", 256)
        self.max_paddings = config.get("max_paddings", 256)
        self.mode = config.get("preemption_mode")
        window = config.get("sliding_window")
        self.win = window // self.bs if window else None
        self.prefixes = {}
        self.waiting, self.running, self.swapped = [], [], []

    def add(self, g):
        self.waiting.append(g)

    def busy(self):
        return bool(self.waiting or self.running or self.swapped)

    # -- blocks --

    def logical(self, seq):
        return -(-seq.length // self.bs)

    def admission(self, g):
        need = self.logical(g.of(WAITING)[0])
        if g.prefix and g.prefix.table is not None:
            need -= g.prefix.blocks
        if self.win:
            need = min(need, self.win)
        if self.total - need < self.wm:
            return "NEVER"
        return "OK" if len(self.gpu.free) - need >= self.wm else "LATER"

    def allocate(self, g):
        (seq,) = g.of(WAITING)
        number = self.logical(seq)
        table = []
        if g.prefix and g.prefix.table is not None:
            number -= g.prefix.blocks
            for block in g.prefix.table:
                block.count += len(g.seqs)
                table.append(block)
        for i in range(number):
            reused = self.win and i >= self.win
            block = table[i % self.win] if reused else self.gpu.take()
            block.count = len(g.seqs)
            table.append(block)
        if g.prefix and g.prefix.table is None:
            g.prefix.table = table[: g.prefix.blocks]
            for block in g.prefix.table:
                block.count += 1
        seq.table = table
        seq.status = RUNNING

    def append(self, seq):
        table = seq.table
        if len(table) < self.logical(seq):
            if not self.win or len(table) < self.win:
                table.append(self.gpu.take())
                return
            table.append(table[len(table) % self.win])
        last = table[-1]
        if last.count != 1:
            table[-1] = self.gpu.take()
            self.gpu.drop(last)
            self.copies += 1

    def release(self, seq):
        for block in dict.fromkeys(seq.table):
            self.gpu.drop(block)
        seq.table = []

    def distinct(self, g):
        return len({block for seq in g.seqs if not seq.finished() for block in seq.table})

    def move(self, block, mapping, target):
        if block in mapping:
            mapping[block].count += 1
        else:
            mapping[block] = target.take()
        return mapping[block]

    def swap_out(self, g):
        if self.distinct(g) > len(self.cpu.free):
            raise EngineError("RuntimeError: lack of CPU swap space")
        mapping = {}
        for seq in g.of(RUNNING):
            table = []
            for block in seq.table:
                if not (g.prefix and block in g.prefix.table):
                    table.append(self.move(block, mapping, self.cpu))
                self.gpu.drop(block)
            seq.table = table
            seq.status = SWAPPED
        self.pairs_out += len(mapping)

    def swap_in(self, g):
        mapping = {}
        for seq in g.of(SWAPPED):
            table = list(g.prefix.table) if g.prefix else []
            for block in table:
                block.count += 1
            for block in seq.table:
                table.append(self.move(block, mapping, self.gpu))
                self.cpu.drop(block)
            seq.table = table
            seq.status = RUNNING
        self.pairs_in += len(mapping)

    # -- a step --

    def step(self, time):
        self.copies = self.pairs_out = self.pairs_in = 0
        self.preempted, self.ignored, self.came_back = [], [], []
        accepted = [] if self.swapped else self.prompts()
        if accepted or self.ignored:
            batch, prompt = accepted, True
            lengths = [g.of(RUNNING)[0].length for g in accepted]
            tokens = len(lengths) * max(lengths, default=0)
        else:
            self.decodes()
            batch, prompt = list(self.running), False
            tokens = sum(len(g.of(RUNNING)) for g in batch)
        batch.sort(key=lambda g: g.id)
        record = self.record(batch, prompt, tokens)
        record["finished"] = self.process(batch, prompt)
        record["free_gpu_blocks_end"] = len(self.gpu.free)
        return record

    def prompts(self):
        accepted, lengths = [], []
        seqs = sum(g.width() for g in self.running)
        while self.waiting:
            g = self.waiting[0]
            (seq,) = g.of(WAITING)
            too_long = seq.length > min(self.max_len, self.max_tokens)
            if too_long or self.admission(g) == "NEVER":
                seq.status = FINISHED
                self.ignored.append(self.waiting.pop(0))
                continue
            if self.admission(g) == "LATER":
                break
            padded = (len(lengths) + 1) * max([*lengths, seq.length])
            if padded > self.max_tokens or seqs + g.width() > self.max_seqs:
                break
            if padded - sum(lengths) - seq.length > self.max_paddings:
                break
            self.waiting.pop(0)
            self.allocate(g)
            self.running.append(g)
            accepted.append(g)
            lengths.append(seq.length)
            seqs += g.width()
        return accepted

    def decodes(self):
        queue = sorted(self.running, key=lambda g: g.arrival)
        self.running = []
        while queue:
            g = queue.pop(0)
            while len(g.of(RUNNING)) > len(self.gpu.free):
                victim = queue.pop() if queue else g
                self.preempt(victim)
                if victim is g:
                    break
            else:
                for seq in g.of(RUNNING):
                    self.append(seq)
                self.running.append(g)
        self.swapped.sort(key=lambda g: g.arrival)
        if self.preempted:
            return
        seqs = sum(g.width() for g in self.running)
        while self.swapped:
            g = self.swapped[0]
            free = len(self.gpu.free) - self.distinct(g) - len(g.of(SWAPPED))
            if free < self.wm or seqs + g.width() > self.max_seqs:
                break
            seqs += g.width()
            self.swap_in(self.swapped.pop(0))
            for seq in g.of(RUNNING):
                self.append(seq)
            self.running.append(g)
            self.came_back.append(g)

    def preempt(self, g):
        mode = self.mode or ("recompute" if g.width() == 1 else "swap")
        if mode == "swap":
            self.swap_out(g)
            self.swapped.append(g)
        else:
            if len(g.of(RUNNING)) != 1:
                raise EngineError("AssertionError")
            for seq in g.of(RUNNING):
                self.release(seq)
                seq.status = WAITING
            self.waiting.insert(0, g)
        self.preempted.append([g.id, mode])

    def record(self, batch, prompt, tokens):
        def cached(g):
            return g.prefix.blocks * self.bs if g.prefix and g.prefix.computed else 0

        queues = (self.waiting, self.running, self.swapped)
        return {
            "prefill": [[g.id, g.of(RUNNING)[0].length, cached(g), 0, 1] for g in batch]
            if prompt
            else [],
            "decode": [] if prompt else [g.id for g in batch],
            "preempted": self.preempted,
            "swapped_out": [name for name, mode in self.preempted if mode == "swap"],
            "swapped_in": [g.id for g in self.came_back],
            "ignored": [g.id for g in self.ignored],
            "waiting": len(self.waiting),
            "running": len(self.running),
            "swapped": len(self.swapped),
            "free_gpu_blocks": len(self.gpu.free),
            "free_cpu_blocks": len(self.cpu.free),
            "batched_tokens": tokens,
            "blocks_to_copy": self.copies,
            "blocks_to_swap_in": self.pairs_in,
            "blocks_to_swap_out": self.pairs_out,
            "q": [queue_digest(queue) for queue in queues],
            "bt": table_digest(
                (g.id, [block.number for block in seq.table])
                for g in batch
                for seq in g.of(RUNNING)
            ),
        }

    # -- after the step --

    def process(self, batch, prompt):
        finished = []
        for g in batch:
            for parent in g.of(RUNNING):
                children = []
                if prompt and g.n > 1:
                    children = [Sequence(parent.length, j) for j in range(g.n - 1)]
                    parent.sample = g.n - 1
                for seq in [*children, parent]:
                    seq.length += 1
                    seq.status = FINISHED if self.stops(g, seq) else RUNNING
                for child in children:
                    g.seqs.append(child)
                    if not child.finished():
                        child.table = list(parent.table)
                        for block in child.table:
                            block.count += 1
                if parent.finished():
                    self.release(parent)
            if all(seq.finished() for seq in g.seqs):
                finished.append(g.id)
        self.running = [g for g in self.running if g.id not in finished]
        for g in batch:
            if g.prefix:
                g.prefix.computed = True
        return finished

    def stops(self, g, seq):
        generated = seq.length - g.plen
        if seq.length > self.max_len or generated == g.most:
            return True
        return bool(g.lengths) and generated == g.lengths[seq.sample]
