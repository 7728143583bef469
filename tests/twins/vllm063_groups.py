"""Requests of vLLM 0.6.3 and the budget of a step, as their rules are worded.

Nothing of kvsim is used.
"""

from twins.steps import generated

WAITING, RUNNING, SWAPPED, FINISHED = "waiting", "running", "swapped", "finished"
END = 32000
"""The token that ends a sequence."""


class Seq:
    """A sequence."""

    def __init__(self, tokens, index):
        self.tokens = list(tokens)
        self.index = index
        self.status = WAITING
        self.computed = 0
        self.prefill = True
        self.table = None
        self.filled = 0
        self.seen = 0
        self.gap = False
        self.access = None

    def new(self):
        return len(self.tokens) - self.computed if self.prefill else 1


class Twin:
    """A group: one request."""

    def __init__(self, row):
        self.id = row["id"]
        self.arrival = row["arrival"]
        self.priority = row.get("priority", 0)
        self.n = row.get("n", 1)
        self.plen = len(row["prompt_token_ids"])
        self.lens = row.get("output_lens")
        self.most = max(self.lens) if self.lens else row["output_len"]
        self.seqs = [Seq(row["prompt_token_ids"], self.n - 1)]

    def of(self, status):
        return [q for q in self.seqs if q.status == status]

    def width(self):
        if self.n > len(self.seqs):
            return self.n
        return len(self.seqs) - len(self.of(FINISHED))

    def prefill(self):
        return self.seqs[0].prefill

    def finished(self):
        return all(q.status == FINISHED for q in self.seqs)

    def key(self):
        return self.priority, self.arrival

    def append(self, q):
        number = len(q.tokens) - self.plen
        token = generated(self.id if self.n == 1 else f"{self.id}/{q.index}", number)
        if self.lens and number + 1 == self.lens[q.index]:
            token = END
        q.tokens.append(token)

    def stops(self, q, max_model_len):
        if self.lens and q.tokens[-1] == END:
            return True
        return len(q.tokens) > max_model_len or len(q.tokens) - self.plen == self.most


class Budget:
    """Tokens and sequences of one scheduling call, with the ids counted."""

    def __init__(self, tokens, seqs):
        self.limits = tokens, seqs
        self.tokens = self.seqs = 0
        self.token_ids, self.seq_ids = set(), set()

    def fits(self, tokens, seqs):
        return self.tokens + tokens <= self.limits[0] and self.seqs + seqs <= self.limits[1]

    def add_tokens(self, g, number):
        if g.id not in self.token_ids:
            self.token_ids.add(g.id)
            self.tokens += number

    def add_seqs(self, g, number):
        if g.id not in self.seq_ids:
            self.seq_ids.add(g.id)
            self.seqs += number

    def subtract(self, g, tokens, seqs):
        if g.id in self.token_ids:
            self.token_ids.remove(g.id)
            self.tokens -= tokens
        if g.id in self.seq_ids:
            self.seq_ids.remove(g.id)
            self.seqs -= seqs
