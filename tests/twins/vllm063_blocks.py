"""Block pools and tables of vLLM 0.6.3 as their rules are worded, in plain lists.

Nothing of kvsim is used. A key is the tuple of all tokens up to the end of the block.
"""

from twins.steps import EngineError
from twins.vllm063_groups import RUNNING, WAITING

OK, LATER, NEVER = "ok", "later", "never"


def ceil_div(a, b):
    """a / b rounded up."""
    return -(-a // b)


class NaivePool:
    """Blocks without content."""

    def __init__(self, first, size):
        self.size = size
        self.ids = range(first, first + size)
        self.blank = list(self.ids)
        self.count = {}

    def free(self):
        return len(self.blank)

    def take(self):
        b = self.blank.pop(0)
        self.count[b] = 1
        return b

    def take_full(self, key):
        return self.take()

    def promote(self, b, key):
        return b

    def drop(self, b):
        self.count[b] -= 1
        if self.count[b] == 0:
            del self.count[b]
            self.blank.insert(0, b)

    def release_full(self, b, key):
        self.drop(b)

    def costs(self, key):
        """Whether moving a full block here is taken to need a free block."""
        return True

    def scheduled(self):
        """A scheduling call has ended."""


class PrefixPool(NaivePool):
    """Blocks that are found by their content."""

    def __init__(self, first, size):
        super().__init__(first, size)
        self.cached = {}
        self.evictor = []  # [block, key, ntok, last], in order of insertion
        self.last = {}
        self.computed = {}
        self.touched = set()

    def free(self):
        return len(self.blank) + len(self.evictor)

    def take(self):
        b = self.blank.pop(0) if self.blank else self.evict()
        self.activate(b, computed=False)
        return b

    def activate(self, b, computed):
        self.count[b] = 1
        self.last[b] = -1
        self.computed[b] = computed

    def deactivate(self, b):
        del self.count[b], self.last[b], self.computed[b]

    def evict(self):
        candidate = self.evictor[0]
        for entry in self.evictor[1:]:
            if entry[3] > candidate[3]:
                break
            if entry[2] > candidate[2]:
                candidate = entry
        self.evictor.remove(candidate)
        del self.cached[candidate[1]]
        return candidate[0]

    def entry(self, b):
        return next((entry for entry in self.evictor if entry[0] == b), None)

    def hit(self, b):
        if b in self.count:
            self.count[b] += 1
        else:
            self.evictor.remove(self.entry(b))
            self.activate(b, computed=True)

    def take_full(self, key):
        if key in self.cached:
            self.hit(self.cached[key])
            return self.cached[key]
        return self.promote(self.take(), key)

    def promote(self, b, key):
        if key not in self.cached:
            self.cached[key] = b
            self.touched.add(b)
            return b
        self.drop(b)
        self.hit(self.cached[key])
        return self.cached[key]

    def drop(self, b):
        self.count[b] -= 1
        if self.count[b] == 0:
            self.deactivate(b)
            self.blank.insert(0, b)

    def release_full(self, b, key):
        self.count[b] -= 1
        if self.count[b] == 0:
            self.evictor.append([b, key, len(key), self.last[b]])
            self.deactivate(b)

    def costs(self, key):
        return key not in self.cached or self.entry(self.cached[key]) is not None

    def is_computed(self, b):
        return self.computed[b] if b in self.count else self.entry(b) is not None

    def stamp(self, b, access):
        """Raises KeyError for a block that is not of this pool."""
        if b in self.count:
            self.last[b] = access
        elif self.entry(b) is not None:
            self.entry(b)[3] = access
        else:
            raise KeyError(b)

    def scheduled(self):
        for b in self.touched:
            if b in self.count:
                self.computed[b] = True
        self.touched.clear()


class Blocks:
    """Two pools, and what sequences do with them."""

    def __init__(self, config):
        self.bs = config["block_size"]
        self.caching = config.get("enable_prefix_caching", False)
        pool = PrefixPool if self.caching else NaivePool
        gpu, cpu = config["num_gpu_blocks"], config.get("num_cpu_blocks", 0)
        self.gpu, self.cpu = pool(0, gpu), pool(gpu, cpu)
        self.wm = int(config.get("watermark", 0.01) * gpu)

    def key(self, q, i):
        return tuple(q.tokens[: (i + 1) * self.bs])

    def admission(self, g):
        waiting = g.of(WAITING)
        if not waiting:
            raise EngineError("IndexError")
        need = ceil_div(len(waiting[0].tokens), self.bs)
        if self.gpu.size - need < self.wm:
            return NEVER
        return OK if self.gpu.free() - need >= self.wm else LATER

    def allocate(self, q):
        full, rest = divmod(len(q.tokens), self.bs)
        q.table = [self.gpu.take_full(self.key(q, i)) for i in range(full)]
        if rest:
            q.table.append(self.gpu.take())
        q.filled = len(q.tokens)
        q.seen, q.gap, q.access = 0, False, None

    def touched(self, q):
        missing = len(q.tokens) - q.filled
        room = self.bs - q.filled % self.bs
        return 1 + ceil_div(missing - room, self.bs)

    def can_append(self, g):
        return sum(self.touched(q) for q in g.of(RUNNING)) <= self.gpu.free()

    def append(self, q):
        """Answers the number of copies."""
        copies = 0
        while len(q.table) * self.bs < len(q.tokens):
            q.table.append(self.gpu.take())
        while q.filled < len(q.tokens):
            i = q.filled // self.bs
            q.filled = min(len(q.tokens), (i + 1) * self.bs)
            if self.gpu.count[q.table[i]] > 1:
                self.gpu.drop(q.table[i])
                q.table[i] = self.gpu.take()
                copies += 1
            if q.filled % self.bs == 0:
                q.table[i] = self.gpu.promote(q.table[i], self.key(q, i))
        return copies

    def release(self, q, pool):
        for i, b in enumerate(q.table):
            if (i + 1) * self.bs <= q.filled:
                pool.release_full(b, self.key(q, i))
            else:
                pool.drop(b)

    def free(self, q):
        if q.table is None:
            return
        if self.caching and q.access is not None:
            try:
                for b in q.table:
                    self.gpu.stamp(b, q.access)
            except KeyError:
                raise EngineError("KeyError") from None
        self.release(q, self.gpu if not q.table or q.table[0] in self.gpu.ids else self.cpu)
        q.table = None

    def fork(self, parent, child):
        child.table = list(parent.table)
        child.filled = parent.filled
        for b in child.table:
            self.gpu.count[b] += 1

    def need(self, seqs, target):
        need = 0
        for q in seqs:
            full = q.filled // self.bs
            need += self.touched(q) + sum(target.costs(self.key(q, i)) for i in range(full))
        return need

    def move(self, seqs, source, target):
        """Answers the number of pairs."""
        pairs = 0
        for q in seqs:
            self.release(q, source)
            full = q.filled // self.bs
            table = [target.take_full(self.key(q, i)) for i in range(full)]
            table += [target.take() for _ in q.table[full:]]
            q.table = table
            pairs += len(table)
        return pairs
