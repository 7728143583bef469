"""SGLang 0.5.23 as its rules are worded, in plain lists: slow, and easy to compare with them.

Nothing of kvsim is used. Token slots are numbers, the radix tree is made of nodes with tuples of
tokens, and every sum is taken anew.
"""

import heapq
import math
from itertools import count
from zlib import crc32

from twins.steps import EngineError

END = 32000
"""The token that ends a sequence."""

DEFAULTS = {
    "page_size": 1,
    "context_len": 4096,
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    "max_prefill_tokens": 16384,
    "prefill_max_requests": None,
    "max_queued_requests": None,
    "min_free_slots_delay": None,
    "prefill_decode_interval": 0,
    "prefill_decode_interval_min_bs": 0,
    "schedule_policy": "fcfs",
    "schedule_conservativeness": 1.0,
    "enable_mixed_chunk": False,
    "disable_radix_cache": False,
    "overlap": False,
    "ignore_eos": False,
    "radix_eviction_policy": "lru",
    "radix_eviction_policy_config": None,
    "enable_priority_scheduling": False,
    "disable_priority_preemption": False,
    "schedule_low_priority_values_first": False,
    "priority_scheduling_preemption_threshold": 10,
    "retraction_policy": "length",
    "init_new_token_ratio": 0.7,
    "min_new_token_ratio_factor": 0.14,
    "new_token_ratio_decay_steps": 600,
    "retract_decode_steps": 20,
    "clip_max_new_tokens": 4096,
    "in_batch_check_threshold": 32,
    "in_batch_deprioritize_threshold": 32,
    "max_steps": 1_000_000,
}

NO_TOKEN, OTHER, CONTINUE = "no token", "other", "continue"


def step_log(config, trace):
    """The records that the engine is expected to write."""
    config = {**DEFAULTS, **config}
    arrivals = [Twin(row, config) for row in sorted(trace, key=lambda row: row["arrival"])]
    return list(Engine(config).play(arrivals))


class Twin:
    """One request."""

    def __init__(self, row, config):
        self.id = row["id"]
        self.arrival = row["arrival"]
        self.prompt = list(row["prompt_token_ids"])
        self.output_len = row["output_len"]
        self.announced = row.get("max_new_tokens", self.output_len)
        self.ignores = row.get("ignore_eos", config["ignore_eos"])
        self.priority = row.get("priority", 0)
        self.routing_key = row.get("routing_key")
        self.out = []
        self.max = 0
        self.doomed = self.over = self.by_itself = self.retracted = False
        self.entry = self.came = 0
        self.slots = None
        self.known = self.considered = 0
        self.forget()

    def forget(self):
        """What is true of a request without KV."""
        self.prefix = self.protected = self.counted = self.matched = self.middle = self.kv = 0
        self.end = self.fresh = self.before = 0
        self.node = None

    @property
    def tokens(self):
        return self.prompt + self.out


class Node:
    """A run of tokens of the radix tree, and the slots that hold them."""

    def __init__(self, parent, tokens, slots, priority=0):
        self.parent, self.tokens, self.slots = parent, tokens, slots
        self.children = {}
        self.locks = self.hits = 0
        self.time = (0, 0)
        self.priority = priority
        self.depth = self.history = 0


class Group:
    """A batch object: it may be the running batch later."""

    def __init__(self, requests=(), mode="decode", only=True, chunked=None, nt=0):
        self.requests = list(requests)
        self.mode, self.only, self.chunked, self.nt = mode, only, chunked, nt
        self.full = False
        self.tails = []

    def filter(self, dropped=()):
        """Whether anybody left."""
        before = len(self.requests)
        self.requests = [r for r in self.requests if not r.over and r not in dropped]
        return len(self.requests) < before


class Tree:
    """The radix tree and the free list."""

    def __init__(self, config):
        self.ps = config["page_size"]
        self.pages = config["max_total_num_tokens"] // self.ps
        self.off = config["disable_radix_cache"]
        self.policy = config["radix_eviction_policy"]
        self.settings = config["radix_eviction_policy_config"] or {}
        self.list = list(range(1, self.pages + 1))
        self.root = Node(None, (), [])
        self.ticks = count(1)
        self.collected = None

    def tick(self):
        return (next(self.ticks), 0)

    def dn(self, n):
        return n // self.ps * self.ps

    def up(self, n):
        return -(-n // self.ps) * self.ps

    # -- free list --

    @property
    def free(self):
        return len(self.list) * self.ps

    def release(self, slots):
        """Give slots back, now or when the collection ends."""
        if self.collected is not None:
            self.collected += slots
        else:
            pages = list(dict.fromkeys(slot // self.ps for slot in slots))
            self.list = self.list + pages if self.ps == 1 else pages + self.list

    def collect(self):
        self.collected = []

    def apply(self):
        slots, self.collected = self.collected, None
        self.release(slots)

    def fill(self, slots, upto):
        """Add slots up to a length: the rest of the last page, then pages from the head."""
        while len(slots) < upto:
            if len(slots) % self.ps:
                slots.append(slots[-1] + 1)
            else:
                slots.append(self.list.pop(0) * self.ps)

    # -- tree --

    def nodes(self):
        found, stack = [], [self.root]
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children.values()
        return found[1:]

    @property
    def evictable(self):
        return sum(len(node.tokens) for node in self.nodes() if not node.locks)

    @property
    def locked(self):
        return sum(len(node.tokens) for node in self.nodes() if node.locks)

    def step_down(self, node, tokens):
        """The child that begins as the tokens do, and how many whole pages of it agree."""
        child = node.children.get(tuple(tokens[: self.ps]))
        if child is None or len(tokens) < self.ps:
            return None, 0
        agree = 0
        while agree < min(len(tokens), len(child.tokens)) and tokens[agree] == child.tokens[agree]:
            agree += 1
        return child, self.dn(agree)

    def match(self, tokens, limit):
        """(tokens found, node where they end); refreshes its recency."""
        tokens = tokens[: self.dn(min(limit, len(tokens)))]
        if self.off or not tokens:
            return 0, self.root
        node, found = self.root, 0
        while True:
            child, agree = self.step_down(node, tokens[found:])
            if child is None:
                break
            if agree < len(child.tokens):
                child = self.split(child, agree)
                node, found = child, found + agree
                break
            node, found = child, found + agree
        number, behind = next(self.ticks), 0
        each = node
        while each is not None:
            each.time = (number, behind)
            each, behind = each.parent, behind - 1
        return found, node

    def split(self, child, m):
        """Cut a node in two; the upper one is new."""
        upper = Node(child.parent, child.tokens[:m], child.slots[:m], child.priority)
        upper.time = self.tick()
        upper.hits, upper.locks, upper.history = child.hits, child.locks, child.history
        upper.depth = child.depth - len(child.tokens) + m
        child.parent.children[child.tokens[: self.ps]] = upper
        child.parent, child.tokens, child.slots = upper, child.tokens[m:], child.slots[m:]
        upper.children[child.tokens[: self.ps]] = child
        child.time = self.tick()
        return upper

    def insert(self, tokens, slots, prev, counted, priority):
        node, at, twice = self.root, 0, []
        node.time, node.priority = self.tick(), max(node.priority, priority)
        while at < len(tokens):
            child, agree = self.step_down(node, tokens[at:])
            if child is None:
                break
            child.time = self.tick()
            if agree < len(child.tokens):
                child = self.split(child, agree)
            child.priority = max(child.priority, priority)
            end = at + agree
            if max(at, prev) < end:
                twice.append(slots[max(at, prev) : end])
            child.hits += end > counted
            node, at = child, end
        if at < len(tokens):
            leaf = Node(node, tuple(tokens[at:]), slots[at:], priority)
            leaf.time = self.tick()
            leaf.hits = int(len(tokens) > counted)
            leaf.depth = leaf.history = len(tokens)
            node.children[leaf.tokens[: self.ps]] = leaf
            while node is not None:
                node.history = max(node.history, leaf.depth)
                node = node.parent
        for piece in twice:
            self.release(piece)

    def path(self, tokens):
        """(slots, node) of tokens that are all in the tree; changes nothing."""
        node, slots = self.root, []
        while len(slots) < len(tokens):
            node, agree = self.step_down(node, tokens[len(slots) :])
            assert agree == len(node.tokens)
            slots = slots + node.slots
        return slots, node

    def lock(self, node, by):
        while node is not None and node is not self.root:
            node.locks += by
            node = node.parent

    def rank(self, node):
        if self.policy == "lfu":
            return (node.hits, node.time)
        if self.policy == "slru":
            return (node.hits >= self.settings.get("protected_threshold", 2), node.time)
        if self.policy == "priority":
            return (node.priority, node.time)
        if self.policy == "tlru":
            reach = node.history + self.settings.get("next_prompt_estimate", 0)
            bound = max(reach - self.settings.get("threshold", 0), 0)
            return (-1 if node.depth - len(node.tokens) >= bound else 0, node.time)
        return (node.time,)

    def make_room(self, want):
        if self.off or self.free >= want:
            return
        leaves = [n for n in self.nodes() if not n.children and not n.locks]
        heap = [(self.rank(n), i, n) for i, n in enumerate(leaves)]
        heapq.heapify(heap)
        number = len(heap)
        while heap and self.free < want:
            leaf = heapq.heappop(heap)[2]
            self.release(leaf.slots)
            parent = leaf.parent
            del parent.children[leaf.tokens[: self.ps]]
            if parent is not self.root and not parent.children and not parent.locks:
                number += 1
                heapq.heappush(heap, (self.rank(parent), number, parent))


class Engine:
    """One scheduler process."""

    def __init__(self, config):
        self.config = config
        for key, value in config.items():
            setattr(self, key, value)
        self.tree = Tree(config)
        self.total = self.tree.pages * self.page_size
        chunk = config["chunked_prefill_size"]
        self.chunk = chunk if chunk and chunk > 0 else None
        self.rows0 = min(max(1, config["max_running_requests"]), self.total // 2)
        self.sign = 1 if config["schedule_low_priority_values_first"] else -1
        self.preempts = self.enable_priority_scheduling and not self.disable_priority_preemption
        if self.disable_radix_cache and self.schedule_policy == "shortest-prefill-first":
            raise EngineError("shortest-prefill-first needs the radix cache")
        self.init = min(self.init_new_token_ratio * self.schedule_conservativeness, 1)
        self.least = min(self.init * self.min_new_token_ratio_factor, 1)
        self.decay = (self.init - self.least) / self.new_token_ratio_decay_steps
        self.ratio = self.init
        self.waiting, self.run, self.last, self.chunked = [], Group(), None, None
        self.pending = []
        self.entries = count()
        self.counter = self.refreshes = self.armed = 0
        self.rows = self.rows0
        self.alive = 0
        self.record = {}

    # -- clock --

    def play(self, arrivals):
        t, step, idle = 0.0, 0, 0
        while True:
            if not self.alive and not self.pending:
                if not arrivals:
                    return
                if arrivals[0].arrival > t:
                    self.fresh_record()
                    self.schedule()
                    self.last, self.ratio = None, self.init
                    t = max(t, float(math.ceil(arrivals[0].arrival)))
            self.fresh_record()
            while arrivals and arrivals[0].arrival <= t:
                self.hand_over(arrivals.pop(0))
            try:
                self.iterate()
            except EngineError as error:
                yield {"step": step, "time": t, "error": str(error)}
                return
            yield {"step": step, "time": t, **self.record}
            step, t = step + 1, t + 1.0
            if step >= self.max_steps:
                yield {"step": step, "time": t, "error": "max_steps"}
                return
            busy = any(
                self.record[k] for k in ("prefill", "decode", "finished", "added", "aborted")
            )
            idle = 0 if busy else idle + 1
            if idle >= 50 and not arrivals:
                yield {"step": step, "time": t, "error": "deadlock"}
                return

    def fresh_record(self):
        lists = ("rejected", "retracted", "preempted", "aborted", "finished")
        self.record = {"added": 0, **{key: [] for key in lists}}

    def hand_over(self, r):
        size = len(r.prompt)
        if size >= self.context_len:
            self.record["rejected"].append(r.id)
            return
        self.record["added"] += 1
        longest = min(self.context_len - 1, self.total - 1)
        r.max = max(0, min(r.announced, longest - size - 1))
        r.max = max(0, min(r.max, self.total - self.tree.up(size) - self.page_size - 1))
        if size >= longest - 5:
            r.doomed, r.prompt = True, [0]
        self.alive += 1
        self.enqueue(r)

    def enqueue(self, r):
        most = self.max_queued_requests
        if most is not None and len(self.waiting) + 1 > most:
            loser = r
            if self.enable_priority_scheduling and self.waiting:
                worst = max(self.waiting, key=lambda w: (self.sign * w.priority, w.entry))
                if self.sign * r.priority < self.sign * worst.priority:
                    loser = worst
                    self.waiting.remove(worst)
            self.record["aborted"].append(loser.id)
            loser.over = True
            self.alive -= 1
            if loser is r:
                return
        r.entry, r.came = next(self.entries), self.counter
        self.waiting.append(r)

    # -- event loop --

    def iterate(self):
        batch = self.schedule()
        tree, record = self.tree, self.record
        record["mode"] = batch.mode if batch else "idle"
        fresh = [r for r in batch.requests if r not in batch.tails] if batch else []
        if batch and batch.mode == "decode":
            fresh, tails = [], list(batch.requests)
        else:
            tails = list(batch.tails) if batch else []
        record["prefill"] = [
            [r.id, r.fresh, 0 if r.before else r.matched, r.before, int(r.end == len(r.tokens))]
            for r in fresh
        ]
        record["decode"] = [r.id for r in tails]
        record["waiting"], record["running"] = len(self.waiting), len(self.run.requests)
        record["chunked"] = self.chunked.id if self.chunked else None
        record["full"] = int(self.run.full)
        record["free"], record["evictable"] = tree.free, tree.evictable
        record["protected"], record["rows"] = tree.locked, self.rows
        record["ratio"] = self.ratio
        record["q"] = [
            crc32(",".join(r.id for r in queue).encode())
            for queue in (self.waiting, self.run.requests)
        ]
        digest = 0
        for r in fresh:
            digest = crc32(f"{r.id}={','.join(map(str, r.slots[: r.end]))};".encode(), digest)
        for r in tails:
            digest = crc32(f"{r.id}={r.slots[-1]};".encode(), digest)
        record["kv"] = digest
        if batch:
            self.counter += batch.nt
            result = (list(batch.requests), batch.mode != "decode", set(batch.tails))
            self.pending.append(result)
        if self.overlap:
            if self.last is not None:
                self.process(self.pending.pop(0))
        elif batch:
            self.process(self.pending.pop(0))
        drained = self.overlap and self.last is not None
        if batch is None and not drained and not self.alive:
            self.ratio = self.init
        self.last = batch
        record["free_end"], record["evictable_end"] = tree.free, tree.evictable

    def schedule(self):
        r = self.chunked
        if r is not None and r.end > r.prefix:
            self.checkpoint(r, r.end)
            r.prefix = r.end
        last = self.last
        if last is not None and last.mode != "decode":
            if last.filter([self.chunked, last.chunked]):
                self.run.full = False
            if last.requests:
                if not self.run.requests:
                    self.run = last
                    last.full = False
                else:
                    self.run.requests = self.run.requests + last.requests
                    self.run.only = self.run.only and last.only
        if self.run.filter():
            self.run.full = False
        batch = None
        if self.armed > 0 and len(self.run.requests) >= self.prefill_decode_interval_min_bs:
            self.armed -= 1
        else:
            self.armed = 0
            batch = self.prefill()
        if batch is None and self.run.requests and not self.run.only:
            batch = self.decode()
        if batch is not None and batch.mode != "decode":
            self.armed = self.prefill_decode_interval
        return batch

    def process(self, result):
        requests, extends, tails = result
        self.tree.collect()
        for r in requests:
            if r.retracted or r.over:
                continue
            if extends and r.middle > 0:
                r.middle -= 1
                continue
            k = len(r.out)
            ends = not r.ignores and k == r.output_len - 1
            r.out.append(END if ends else crc32(f"{r.id}:{k}".encode()) % 32000)
            if r.doomed or ends or len(r.out) >= r.max:
                r.over = True
                r.by_itself = not r.doomed
                self.alive -= 1
                self.record["finished"].append(r.id)
                if r.doomed:
                    self.record["aborted"].append(r.id)
                self.let_go(r, keep=True)
            elif extends and r not in tails:
                self.checkpoint(r, r.end)
                r.prefix = r.end
        self.tree.apply()

    # -- memory --

    def checkpoint(self, r, upto):
        tree = self.tree
        if tree.off:
            return
        key = r.tokens[: min(upto, r.known)]
        if not key:
            return
        n = tree.dn(len(key))
        key = key[:n]
        tree.insert(key, r.slots[:n], r.protected, r.counted, r.priority)
        r.counted = max(r.counted, n)
        prompt = tree.dn(len(r.prompt))
        if 0 < prompt < n:
            tree.insert(key[:prompt], r.slots[:prompt], prompt, prompt, r.priority + 1)
        slots, node = tree.path(key)
        r.slots[r.protected : n] = slots[r.protected :]
        tree.lock(r.node, -1)
        tree.lock(node, 1)
        r.node, r.protected = node, n

    def let_go(self, r, keep):
        tree, own = self.tree, r.kv
        if r.by_itself:
            own = min(own, len(r.tokens))
        if keep:
            r.known = len(r.tokens)
            self.checkpoint(r, own)
        end = tree.up(own)
        if r.slots[r.protected : end]:
            tree.release(r.slots[r.protected : end])
        tree.lock(r.node, -1)
        if r.slots[end:]:
            tree.release(r.slots[end:])
        r.slots = None
        self.rows += 1

    def give_up(self, r, left):
        self.let_go(r, keep=False)
        self.tree.make_room(left * self.retract_decode_steps)
        r.forget()
        r.retracted = True

    # -- prefill --

    def expected(self, r):
        rest = min(r.max - len(r.out), self.clip_max_new_tokens)
        return rest * (1.0 if r.ignores else self.ratio)

    def left(self):
        return self.tree.free + self.tree.evictable - self.tot

    def cur(self):
        return self.tree.free + self.tree.evictable - self.now

    def state(self):
        if self.left() <= 0 or self.cur() <= 0:
            return NO_TOKEN
        if self.rin <= 0 or (self.rch is not None and self.rch <= 0):
            return OTHER
        return CONTINUE

    def charge(self, n, new):
        paged = self.tree.up(n)
        self.tot += paged + self.page_size + new
        self.now += paged + self.page_size
        self.rin -= paged
        if self.rch is not None:
            self.rch -= paged

    def prefill(self):
        run = self.run
        if self.preempts or not run.requests:
            run.full = False
        if (run.full or not self.waiting) and self.chunked is None:
            return None
        slots = min(self.rows0 - len(run.requests), self.rows)
        delay = min(self.min_free_slots_delay or 0, self.rows0)
        if delay > 1 and self.chunked is None and run.requests and slots < delay:
            return None
        if slots <= 0 and self.chunked is None and not self.preempts:
            run.full = True
            return None
        self.sort()
        mixes = self.enable_mixed_chunk and self.chunk is not None
        riders = len(run.requests) if mixes else 0
        self.rin = self.max_prefill_tokens - riders
        self.rch = None if self.chunk is None else self.chunk - riders
        expected = 0
        for r in run.requests:
            expected += self.expected(r)
        self.tot, self.now = riders + expected, riders
        self.ends = None
        self.chosen, self.preempted, self.truncated = [], [], None
        if self.chunked is not None:
            self.go_on(self.chunked)
        for r in list(self.waiting):
            if self.state() == OTHER:
                break
            held = sum(c.slots is not None for c in self.chosen)
            if len(self.chosen) >= min(self.rows0 - len(run.requests), self.rows + held):
                run.full = True
            if run.full and not (self.preempts and self.make_way(r)):
                break
            r.prefix, r.node = self.tree.match(r.tokens, len(r.tokens) - 1)
            r.protected = r.prefix
            r.known = r.considered = len(r.tokens)
            answer = self.add(r)
            if answer != CONTINUE:
                if answer == NO_TOKEN:
                    run.full = bool(self.chosen or run.requests)
                break
        self.waiting = [r for r in self.waiting if r not in self.chosen]
        for r in self.preempted:
            self.record["preempted"].append(r.id)
            self.enqueue(r)
        if not self.chosen:
            return None
        if self.truncated is not None:
            self.chunked = self.truncated
        if self.chunked is not None:
            self.chunked.middle += 1
        return self.extend()

    def go_on(self, r):
        """The next chunk of a prefill that has begun."""
        k = min(self.rch, int(self.left()))
        if k <= 0:
            k = self.rch
        if self.schedule_policy == "shortest-prefill-first":
            k = min(k, self.spared(r))
        rest = len(r.tokens) - r.prefix
        r.known = r.considered = len(r.tokens)
        self.take(r, min(rest, k), min(r.max, self.clip_max_new_tokens) if rest <= k else 0)
        r.before = r.prefix
        if rest <= k:
            self.chunked = None

    def spared(self, r):
        """The most that a chunk takes, so that shorter prefills fit beside it."""
        budget, kept = self.rch, 0
        if budget < 2 * self.page_size:
            return budget
        rest = len(r.tokens) - r.prefix
        for w in self.waiting:
            if w.work >= rest or kept + self.tree.up(w.work) > budget - self.page_size:
                break
            kept += self.tree.up(w.work)
        return self.tree.dn(budget - kept) if kept else budget

    def take(self, r, n, new):
        r.fresh, r.end = n, r.prefix + n
        self.chosen.append(r)
        self.charge(n, new)

    def add(self, r):
        if self.prefill_max_requests and len(self.chosen) >= self.prefill_max_requests:
            return OTHER
        if r.ignores and self.tree.off:
            return self.add_exactly(r)
        self.tree.lock(r.node, 1)
        answer = self.try_add(r)
        if r not in self.chosen:
            self.tree.lock(r.node, -1)
            return answer
        return self.state()

    def try_add(self, r):
        tree, rest = self.tree, len(r.tokens) - r.prefix
        clip = self.clip_max_new_tokens
        need = rest + min(max(r.max - len(r.out), 0), clip) + self.page_size
        if need >= self.left():
            return NO_TOKEN
        if self.rch is None:
            if self.chosen and tree.up(rest) >= self.rin:
                return OTHER
        elif tree.up(rest) > self.rch:
            if self.schedule_policy == "shortest-prefill-first" and self.chunked is not None:
                return OTHER
            e = tree.dn(r.prefix + tree.dn(self.rch)) - r.prefix
            if e <= 0:
                return OTHER
            return self.admit(r, e, 0, truncated=True)
        return self.admit(r, rest, min(r.max, clip))

    def admit(self, r, n, new, truncated=False):
        r.matched, r.before, r.retracted = r.prefix, 0, False
        self.take(r, n, new)
        if truncated:
            self.truncated = r
        return CONTINUE

    def add_exactly(self, r):
        """The test for requests that ignore the end of sequence, without a radix cache."""
        rest = len(r.tokens)
        need = self.tree.up(rest) + self.page_size
        if need > min(self.cur(), self.left()):
            return NO_TOKEN

        def entry(q):
            left = q.max * (1 if q.ignores else self.ratio) - len(q.out)
            return (left, len(q.tokens))

        if self.ends is None:
            entries = map(entry, [r, *self.run.requests, *self.chosen])
            self.ends = sorted((e for e in entries if e[0] > 0), key=lambda e: e[0])
        elif entry(r)[0] > 0:
            own = entry(r)
            places = [i for i, e in enumerate(self.ends) if e[0] >= own[0]]
            self.ends.insert(places[0] if places else -1, own)
        room, freed = self.cur() - need, 0
        for i, (left, occupied) in enumerate(self.ends):
            behind = len(self.ends) - i
            if room + freed - left * behind <= behind:
                return NO_TOKEN
            freed += occupied
        if self.rch is None or rest <= self.rch:
            self.admit(r, rest, min(r.max, self.clip_max_new_tokens))
        elif self.rch <= 0:
            return OTHER
        else:
            self.admit(r, self.rch, 0, truncated=True)
        return self.state()

    def make_way(self, r):
        s = self.sign
        candidates = [c for c in self.run.requests if not c.over and c not in self.preempted]
        candidates.sort(key=lambda c: (-s * c.priority, -c.entry))
        need = r.considered - r.prefix + min(r.max, self.clip_max_new_tokens) - self.left()
        victims = []
        for c in candidates:
            if (r.priority - c.priority) * -s <= self.priority_scheduling_preemption_threshold:
                break
            victims.append(c)
            need -= self.expected(c)
            if need <= 0:
                break
        if not victims or need > 0:
            return False
        before, gone = len(self.run.requests), 0
        for c in self.run.requests:
            if c in victims:
                self.tot -= self.expected(c)
                gone += 1
                self.give_up(c, before - gone)
        self.run.filter(victims)
        self.preempted += victims
        return True

    def extend(self):
        tree, ps = self.tree, self.page_size
        batch = Group(
            self.chosen,
            "extend",
            all(r.max == 0 for r in self.chosen),
            self.chunked,
            sum(r.fresh for r in self.chosen),
        )
        need = batch.nt + (ps * len(self.chosen) if ps > 1 else 0)
        tree.make_room(need)
        pages = 0
        for r in self.chosen:
            pages += tree.up(r.end) // ps - tree.up(r.prefix) // ps
        if pages > len(tree.list):
            raise EngineError("RuntimeError: prefill out of memory")
        for r in self.chosen:
            if r.slots is None:
                self.rows -= 1
                r.slots = tree.path(r.tokens[: r.prefix])[0] if r.prefix else []
            tree.fill(r.slots, r.end)
            r.kv = r.end
        if self.enable_mixed_chunk and self.chunk is not None and self.run.requests:
            self.mix(batch)
        return batch

    def mix(self, batch):
        run = self.run
        self.drop_finishing()
        if not run.requests or not self.fits(run.requests):
            return
        self.one_more(run.requests)
        for r in run.requests:
            r.end = r.kv
            r.known = len(r.tokens)
        batch.mode = "mixed"
        batch.tails = list(run.requests)
        batch.requests = batch.requests + batch.tails
        batch.nt += len(batch.tails)
        batch.only = batch.only and run.only
        self.run = Group()
        self.run.full = run.full

    # -- decode --

    def drop_finishing(self):
        """Whether somebody's last token is being computed."""
        if not (self.overlap and self.pending):
            return False
        inside = self.pending[-1][0]
        finishing = [r for r in self.run.requests if r in inside and len(r.out) + 1 >= r.max]
        if finishing:
            self.run.filter(finishing)
            self.run.full = False
        return bool(finishing)

    def fits(self, requests):
        need = self.page_size * sum(r.kv % self.page_size == 0 for r in requests)
        self.tree.make_room(need)
        return self.tree.free >= need

    def one_more(self, requests):
        self.tree.make_room(len(requests) * self.page_size)
        for r in requests:
            r.kv += 1
            self.tree.fill(r.slots, r.kv)

    def decode(self):
        run = self.run
        before = len(run.requests)
        finishing = self.drop_finishing()
        if not run.requests:
            run.full = False
            return None
        if not self.fits(run.requests):
            if finishing:
                run.full = False
                return None
            self.retract()
        else:
            self.ratio = max(self.ratio - self.decay, self.least)
        if len(run.requests) < before:
            run.full = False
        if not run.requests:
            return None
        self.one_more(run.requests)
        run.mode, run.tails = "decode", []
        return run

    def retract(self):
        def worth(r):
            key = (len(r.out), -len(r.prompt))
            return (-self.sign * r.priority, *key) if self.retraction_policy == "priority" else key

        run = self.run
        kept = sorted(run.requests, key=worth, reverse=True)
        retracted = []
        while not retracted or not self.fits(kept):
            if len(kept) == 1:
                break
            r = kept.pop()
            self.give_up(r, len(kept))
            retracted.append(r)
        if len(kept) <= 1 and not self.fits(kept):
            for r in kept:
                self.record["aborted"].append(r.id)
                r.over = True
                self.alive -= 1
                self.give_up(r, 0)
            kept = []
        run.requests = kept
        if kept:
            made = sum(len(r.out) for r in kept) + self.retract_decode_steps * len(kept)
            self.ratio = min(1, made / (sum(r.max for r in kept) + 1))
        else:
            self.ratio = 0.0
        for r in retracted:
            self.record["retracted"].append(r.id)
            self.enqueue(r)

    # -- queue order --

    def sort(self):
        policy, waiting, tree = self.schedule_policy, self.waiting, self.tree
        if policy in ("lpm", "hrrn") and len(waiting) > 128:
            policy = "fcfs"
        if tree.off and policy in ("lpm", "dfs-weight", "hrrn"):
            policy = "fcfs"
        if policy in ("fcfs", "lof", "routing-key"):
            self.refresh()
            self.sort_unaware(policy)
            return
        late, nodes, seen = set(), {}, []
        for r in waiting:
            prefix, nodes[r] = tree.match(r.tokens, len(r.tokens))
            r.share = min(prefix, len(r.tokens) - 1)
            r.work = max(1, len(r.tokens) - r.share)
            if prefix <= self.in_batch_check_threshold:
                common = max((agreement(r.tokens, other) for other in seen), default=0)
                if common >= self.in_batch_deprioritize_threshold:
                    late.add(r)
                else:
                    seen.append(r.tokens)
        if policy == "lpm":
            waiting.sort(key=lambda r: (r in late, 0 if r in late else -r.share))
        elif policy == "dfs-weight":
            self.waiting = self.depth_first(nodes)
        elif policy == "hrrn":
            waiting.sort(key=lambda r: self.response(r, r in late))
        else:
            waiting.sort(key=lambda r: (r in late, r.work, r.entry))

    def sort_unaware(self, policy):
        s, waiting = self.sign, self.waiting
        if policy == "fcfs" and self.enable_priority_scheduling:
            waiting.sort(key=lambda r: (s * r.priority, r.entry))
        elif policy == "lof" and self.enable_priority_scheduling:
            waiting.sort(key=lambda r: (s * r.priority, -r.max))
        elif policy == "lof":
            waiting.sort(key=lambda r: -r.max)
        elif policy == "routing-key":
            keys = [r.routing_key for r in self.run.requests if r.routing_key]
            if keys:
                waiting.sort(
                    key=lambda r: (
                        (0, -keys.count(r.routing_key), r.routing_key)
                        if r.routing_key in keys
                        else (1, 0, r.routing_key or "")
                    )
                )

    def response(self, r, late):
        if late:
            return (math.inf, r.id)
        uncached = max(0, len(r.prompt) - r.share)
        if not uncached:
            return (-math.inf, r.id)
        return (-max(0, self.counter - r.came) / uncached, r.id)

    def refresh(self):
        if self.tree.off or self.radix_eviction_policy != "lru" or not self.waiting:
            return
        if self.refreshes % 32 == 0:
            for r in reversed(self.waiting[:128]):
                self.tree.match(r.tokens, len(r.tokens))
        self.refreshes += 1

    def depth_first(self, nodes):
        def weight(node):
            own = sum(nodes[r] is node for r in self.waiting)
            return own + sum(weight(child) for child in node.children.values())

        def visit(node):
            found = []
            for child in sorted(node.children.values(), key=lambda child: -weight(child)):
                found += visit(child)
            return found + [r for r in self.waiting if nodes[r] is node]

        return visit(self.tree.root)


def agreement(one, other):
    """How many leading tokens agree."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same
