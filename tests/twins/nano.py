"""nano-vllm as its rules are worded, in plain lists: slow, and easy to compare with them.

Nothing of kvsim is used. Keys are nested pairs (key before, tokens), so nothing can collide.
"""

from twins.steps import EngineError, generated, play, queue_digest, table_digest


def step_log(config, trace, version_2025=False):
    """The records that the engine is expected to write."""
    engine = (August2025 if version_2025 else Head)(config)
    return play(engine, [Twin(row) for row in trace], config.get("max_steps", 1_000_000))


class Twin:
    """One sequence."""

    def __init__(self, row):
        self.id = row["id"]
        self.arrival = row["arrival"]
        self.tokens = list(row["prompt_token_ids"])
        self.plen = len(self.tokens)
        self.output_len = row["output_len"]
        self.table = []
        self.cached = 0


class Head:
    """Commit bb823b3."""

    def __init__(self, config):
        self.bs = config["block_size"]
        self.max_seqs = config["max_num_seqs"]
        self.max_tokens = config["max_num_batched_tokens"]
        number = config["num_gpu_blocks"]
        self.free = list(range(number))
        self.count = [0] * number
        self.key = [None] * number
        self.content = [None] * number
        self.map = {}
        self.waiting = []
        self.running = []

    def add(self, q):
        self.waiting.append(q)

    def busy(self):
        return bool(self.waiting or self.running)

    # -- pool --

    def blocks(self, q):
        """The tokens of each block, the last one perhaps partial."""
        return [tuple(q.tokens[i : i + self.bs]) for i in range(0, len(q.tokens), self.bs)]

    def keys(self, q):
        """The chained keys of the full blocks."""
        keys, before = [], None
        for tokens in self.blocks(q):
            if len(tokens) == self.bs:
                before = (before, tokens)
                keys.append(before)
        return keys

    def take(self):
        b = self.free.pop(0)
        if self.map.get(self.key[b]) == b:
            del self.map[self.key[b]]
        self.key[b] = self.content[b] = None
        self.count[b] = 1
        return b

    def share(self, b):
        if self.count[b] == 0:
            self.free.remove(b)
        self.count[b] += 1

    def release(self, q):
        for b in reversed(q.table):
            self.count[b] -= 1
            if self.count[b] == 0:
                self.free.append(b)
        q.table, q.cached = [], 0

    def store(self, b, key, tokens):
        self.key[b], self.content[b], self.map[key] = key, tokens, b

    # -- a step --

    def step(self, time):
        self.preempted = []
        s = self.prefills()
        if s:
            prefill = [
                [q.id, k, 0 if later else q.cached, q.cached if later else 0, int(done)]
                for q, k, later, done in s
            ]
            decode, tokens = [], sum(k for _, k, _, _ in s)
            batch = [(q, k, done) for q, k, _, done in s]
        else:
            batch = [(q, 1, True) for q in self.decodes()]
            prefill, decode, tokens = [], [q.id for q, _, _ in batch], len(batch)
        record = {
            "prefill": prefill,
            "decode": decode,
            "preempted": [[q.id, "recompute"] for q in self.preempted],
            "swapped_out": [],
            "swapped_in": [],
            "ignored": [],
            "waiting": len(self.waiting),
            "running": len(self.running),
            "swapped": 0,
            "free_gpu_blocks": len(self.free),
            "free_cpu_blocks": 0,
            "batched_tokens": tokens,
            "blocks_to_copy": 0,
            "blocks_to_swap_in": 0,
            "blocks_to_swap_out": 0,
            "q": [queue_digest(self.waiting), queue_digest(self.running), 0],
            "bt": table_digest((q.id, q.table) for q, _, _ in batch),
        }
        record["finished"] = self.process(batch)
        record["free_gpu_blocks_end"] = len(self.free)
        return record

    def prefills(self):
        """(sequence, tokens, whether it had a table before, whether its prompt is complete)."""
        s = []
        while self.waiting and len(s) < self.max_seqs:
            q = self.waiting[0]
            left = self.max_tokens - sum(k for _, k, _, _ in s)
            if left == 0:
                break
            later = bool(q.table)
            if later:
                k = len(q.tokens) - q.cached
            else:
                nblk = len(self.blocks(q))
                hits = []
                for key in self.keys(q)[: nblk - 1]:
                    if key not in self.map:
                        break
                    hits.append(self.map[key])
                missing = nblk - sum(self.count[b] > 0 for b in hits)
                if len(self.free) < missing:
                    break
                k = len(q.tokens) - len(hits) * self.bs
            if left < k and s:
                break
            if not later:
                for b in hits:
                    self.share(b)
                q.table = hits + [self.take() for _ in range(nblk - len(hits))]
                q.cached = len(hits) * self.bs
            take_on = min(k, left)
            done = q.cached + take_on == len(q.tokens)
            if done:
                self.waiting.pop(0)
                self.running.append(q)
            s.append((q, take_on, later, done))
        return s

    def decodes(self):
        s = []
        while self.running and len(s) < self.max_seqs:
            q = self.running.pop(0)
            needs = len(q.tokens) % self.bs == 1
            gone = False
            while needs and not self.free and not gone:
                gone = not self.running
                self.preempt(q if gone else self.running.pop())
            if gone:
                continue
            if needs:
                q.table.append(self.take())
            self.opened(q)
            s.append(q)
        if not s:
            raise EngineError("AssertionError")
        self.running = s + self.running
        return s

    def preempt(self, q):
        self.release(q)
        self.waiting.insert(0, q)
        self.preempted.append(q)

    def opened(self, q):
        """The newest token has its slot."""

    def process(self, batch):
        finished = []
        for q, k, done in batch:
            self.computed(q, k)
            if not done:
                continue
            q.tokens.append(generated(q.id, len(q.tokens) - q.plen))
            if len(q.tokens) - q.plen == q.output_len:
                self.release(q)
                self.running.remove(q)
                finished.append(q.id)
        return finished

    def computed(self, q, k):
        for i in range(q.cached // self.bs, (q.cached + k) // self.bs):
            before = self.key[q.table[i - 1]] if i else None
            tokens = self.blocks(q)[i]
            self.store(q.table[i], (before, tokens), tokens)
        q.cached += k


class August2025(Head):
    """Commit 6ef2a4f."""

    def take(self):
        b = self.free.pop(0)
        self.key[b] = self.content[b] = None
        self.count[b] = 1
        return b

    def prefills(self):
        s, tokens = [], 0
        while self.waiting and len(s) < self.max_seqs:
            q = self.waiting[0]
            full = tokens + len(q.tokens) > self.max_tokens
            if full or len(self.free) < len(self.blocks(q)):
                break
            self.allocate(q)
            tokens += len(q.tokens) - q.cached
            self.running.append(self.waiting.pop(0))
            s.append((q, len(q.tokens) - q.cached, False, True))
        return s

    def allocate(self, q):
        keys, missed = self.keys(q), False
        for i, tokens in enumerate(self.blocks(q)):
            key = keys[i] if i < len(keys) else None
            b = self.map.get(key)
            if b is None or self.content[b] != tokens:
                missed = True
            if missed:
                b = self.take()
            else:
                q.cached += self.bs
                self.share(b)
            q.table.append(b)
            if key is not None:
                self.store(b, key, tokens)

    def opened(self, q):
        if len(q.tokens) % self.bs == 0:
            before = self.key[q.table[-2]] if len(q.table) > 1 else None
            tokens = self.blocks(q)[-1]
            self.store(q.table[-1], (before, tokens), tokens)

    def computed(self, q, k):
        """Blocks were stored when they were allocated or filled."""
