"""The KV connectors of vLLM V1 0.33.0 as their rules are worded: plain lists, slow.

Nothing of kvsim is used. An engine calls `match`, `allocated`, `build`, `finished`, `hear`; the
worker side is a few lines beside each connector. `NONE` is the answer of an engine without one.
"""

from math import ceil
from zlib import crc32

from twins.vllm_v1_groups import Groups, down

LATER = object()


def digest(*lists):
    return crc32(";".join(",".join(map(str, each)) for each in lists).encode())


class Nothing:
    """No connector."""

    can_load = delivers = False

    def match(self, r, nlocal):
        return 0, False

    def allocated(self, r, nlocal, ext):
        pass

    def build(self, engine, record):
        pass

    def finished(self, r):
        return False

    def hear(self, record):
        return [], []

    def busy(self):
        return False


class Lane:
    """Transfers of one direction: the number of steps left, and what they are."""

    def __init__(self, steps):
        self.steps, self.jobs = steps, []

    def step(self, new, flushed):
        """One worker step with new jobs; what is over, in order."""
        self.jobs += [[self.steps, job] for job in new]
        last = max((i for i, (_, job) in enumerate(self.jobs) if flushed(job)), default=-1)
        over = [job for i, (left, job) in enumerate(self.jobs) if left <= 0 or i <= last]
        self.jobs = [[left - 1, job] for left, job in self.jobs if job not in over]
        return over


class Nixl(Nothing):
    """Section 6."""

    def __init__(self, config, blocks):
        role = config.get("kv_role", "kv_both")
        self.blocks = blocks
        self.can_load, self.delivers = role != "kv_producer", role != "kv_consumer"
        self.config = config.get("nixl", {})
        self.begun, self.loads, self.sends = set(), [], []
        self.pulling, self.sending, self.results = [], [], []

    def match(self, r, nlocal):
        if r.pd == "decode" and r not in self.begun and r.plen > nlocal:
            return r.plen - nlocal, True
        return 0, False

    def allocated(self, r, nlocal, ext):
        if r.pd != "decode" or r in self.begun:
            return
        self.begun.add(r)
        pulled = []
        for g, table in enumerate(r.tables) if ext else ():
            group, bs = self.blocks.groups[g], self.blocks.groups[g]["block_size"]
            new = [b for b in table if b and self.blocks.key[b] is None]
            if group["type"] == "sliding":
                new = new[-(ceil(group["window"] / bs) + 1) :]
            pulled.append(new)
        self.loads.append((r, pulled, ext > 0))

    def finished(self, r):
        if r.pd == "decode" and r not in self.begun:
            self.begun.add(r)
            self.loads.append((r, [], False))
        if r.pd == "prefill" and r.status == "finished" and any(r.tables):
            self.sends.append(r)
            return True
        return False

    def build(self, engine, record):
        record["loads"] = [
            [i, r.id, sum(map(len, pulled)), int(waits), digest(*pulled)]
            for i, (r, pulled, waits) in enumerate(self.loads)
        ]
        record["sends"] = [r.id for r in self.sends]
        self.pulling += [[self.delay("load", r, "~"), r] for r, _, waits in self.loads if waits]
        self.sending += [[self.delay("send", r, "^"), r] for r in self.sends]
        over = [[r for left, r in queue if left <= 0] for queue in (self.pulling, self.sending)]
        self.results.append(over)
        for queue in (self.pulling, self.sending):
            queue[:] = [[left - 1, r] for left, r in queue if left > 0]
        self.loads, self.sends = [], []

    def delay(self, kind, r, mark):
        spread = self.config.get(f"{kind}_spread", 0) + 1
        return self.config.get(f"{kind}_steps", 1) + crc32(f"{r.id}{mark}".encode()) % spread

    def hear(self, record):
        pulled, read = self.results.pop(0)
        record["xdone"] = [r.id for r in pulled + read]
        return pulled, read


class Offload(Nothing):
    """Section 4. A key is (group, adapter and salt, tokens)."""

    can_load = True

    def __init__(self, config, blocks):
        c = self.config = config["offload"]
        self.blocks, self.bpc = blocks, c.get("blocks_per_chunk", 1)
        self.ct = [g["block_size"] * self.bpc for g in blocks.groups]
        self.eagle = [g.get("eagle", False) for g in blocks.groups]
        self.size = c["cpu_chunks"]
        self.state, self.place = {}, {}  # key -> -1 pending, number of readers; key -> chunk id
        self.fresh, self.freed = 0, []
        self.arc, self.rank, self.ranks = c.get("eviction_policy") == "arc", 0, {}
        self.t1, self.t2, self.b1, self.b2, self.p = [], [], [], [], 0.0
        self.threshold, self.counts = c.get("store_threshold", 0), []
        self.lanes = Lane(c.get("load_steps", 1)), Lane(c.get("store_steps", 1))
        self.job, self.jobs, self.delayed = 0, {}, []
        self.fences, self.touched, self.new_loads = [], set(), []
        self.known, self.results, self.left = [], [], c.get("sync_load_budget_bytes", 0)

    # -- keys, windows --

    def meet(self, r):
        if r not in self.known:
            n = range(len(self.ct))
            r.ids, r.next, r.jobs, r.rank = [[] for _ in n], [0 for _ in n], set(), 0
            r.seen, r.ins, r.reused, r.missed, r.store_junction = {}, set(), set(), set(), 0
            r.gone = False
            self.known.append(r)

    def keys(self, r, g):
        return self.blocks.number_of_keys(r) * self.blocks.hbs // self.ct[g]

    def key(self, r, g, i):
        return self.blocks.content(r, g, (i + 1) * self.ct[g])

    def reach(self, g):
        group = self.blocks.groups[g]
        return {"sliding": group.get("window"), "chunked": group.get("chunk")}.get(group["type"])

    def window(self, g, n=None):
        if self.reach(g) is None:
            return None
        chunks = ceil(self.reach(g) / self.ct[g])
        if n is not None and self.blocks.groups[g]["type"] == "sliding":
            chunks = max(chunks, ceil((self.reach(g) - 1 + -n % self.ct[g]) / self.ct[g]))
        return chunks

    # -- match --

    def match(self, r, nlocal):
        self.meet(r)
        r.ids, r.next = [[] for _ in self.ct], [0 for _ in self.ct]
        if r.jobs:
            return LATER, False
        r.nlocal, r.store_junction = nlocal, r.junction
        hit = 0 if r.skip else self.search(r, nlocal)
        if hit is LATER or not hit:
            return hit, False
        if self.blocks.caching:
            loading = {key for job in self.jobs.values() if job["async"] for key in job["keys"]}
            for g in range(len(self.ct)):
                first, last = nlocal // self.ct[g], ceil((nlocal + hit) / self.ct[g])
                if self.window(g) is not None:
                    first = max(first, last - self.window(g, nlocal + hit))
                if any(self.key(r, g, i) in loading for i in range(first, last)):
                    return LATER, False
        cost = hit * 4 * len(self.ct)
        within = self.config.get("sync_load_budget_bytes") and nlocal + hit < len(r.tokens)
        if within and cost <= self.left:
            self.left -= cost
            return hit, False
        return hit, True

    def search(self, r, base):
        groups = range(len(self.ct))
        full = [g for g in groups if self.window(g) is None]
        others = sorted((g for g in groups if self.window(g)), key=lambda g: -self.window(g))
        top, hit, later, popped = len(r.tokens) - bool(others), 0, False, set()
        todo = full + others
        while todo:
            again, looked = [], False
            for g in todo:
                ct, pop = self.ct[g], int(self.eagle[g] and g not in popped)
                top = min(top, self.keys(r, g) * ct)
                if top - base < ct:
                    return 0
                first, last = base // ct, min(ceil(top / ct) + pop, self.keys(r, g))
                states = [self.state.get(self.key(r, g, i)) for i in range(first, last)]
                if self.window(g) is None:
                    count = self.leading(states)
                else:
                    n = min(top, (last - pop) * ct)
                    count = self.backwards(states, self.window(g) + pop, self.window(g, n) + pop)
                if count == 0:
                    return 0
                if count is LATER:
                    later = True
                else:
                    popped |= {g} if pop else set()
                    top = min(top, ct * (first + count - pop))
                new = top - base
                if new < ct:
                    return 0
                if new < hit:
                    if not self.eagle[g]:
                        popped = set()
                    if later:
                        later, again = False, full + others
                    elif looked and not again:
                        again = others
                looked = looked or self.window(g) is not None
                hit = new
            todo = again
        return LATER if later else hit

    def leading(self, states):
        run = states.index(None) if None in states else len(states)
        return LATER if -1 in states[:run] else run

    def backwards(self, states, window, larger):
        run = []
        for i in range(len(states) - 1, -1, -1):
            if states[i] is None:
                run, larger = [], window
                continue
            run.append(states[i])
            if len(run) == larger:
                return LATER if -1 in run else i + larger
        return LATER if -1 in run else len(run)

    # -- the tier --

    def offer(self, r, keys):
        """Places of the new chunks; None: refused."""
        if self.threshold >= 2:
            self.count(keys)
        counts = dict(self.counts)
        wanted = [key for key in keys if key not in self.state]
        if self.threshold >= 2:
            wanted = [key for key in wanted if counts.get(key, 0) >= self.threshold]
        if self.arc:
            self.ghosts([key for key in wanted if key not in r.missed])
        r.missed |= set(wanted)
        ready = [key for key in keys if self.state.get(key, -1) >= 0]
        self.use(r, [key for key in keys if key in wanted or key in ready], ready)
        evict = len(wanted) - self.free()
        if evict > 0 and not self.evict(evict, keys):
            return None
        for key in wanted:
            if self.fresh < self.size:
                self.place[key] = self.fresh
                self.fresh += 1
            else:
                self.place[key] = self.freed.pop()
            self.state[key] = -1
            if self.arc:
                self.t1.append(key)
                self.b1 = [k for k in self.b1 if k != key]
                self.b2 = [k for k in self.b2 if k != key]
            else:
                self.ranks[key] = self.provisional(r, key)
        r.ins |= set(wanted)
        return wanted

    def free(self):
        return self.size - self.fresh + len(self.freed)

    def evictable(self):
        return [key for key, state in self.state.items() if state == 0]

    def count(self, keys):
        most = self.config.get("max_tracker_size", 64000)
        kept = [key for key, _ in self.counts if key in keys]
        for key in keys:
            if key in kept:
                old = dict(self.counts)[key]
                self.counts = [c for c in self.counts if c[0] != key] + [(key, old + 1)]
        for key in keys:
            if key in dict(self.counts):
                continue
            if len(self.counts) >= most:
                out = next((c for c in self.counts if c[0] not in kept), None)
                if out is None:
                    continue
                self.counts.remove(out)
            self.counts.append((key, 1))
            kept.append(key)

    def ghosts(self, keys):
        for key in reversed(keys):
            if key in self.b1:
                self.p = min(self.p + max(1, len(self.b2) / len(self.b1)), self.size)
                self.b1 = [k for k in self.b1 if k != key] + [key]
            elif key in self.b2:
                self.p = max(self.p - max(1, len(self.b1) / len(self.b2)), 0)
                self.b2 = [k for k in self.b2 if k != key] + [key]

    def provisional(self, r, key):
        if not r.rank:
            self.rank += 1
            r.rank = self.rank
        return r.rank, -key[2], key[0]

    def use(self, r, keys, reused):
        new = [key for key in keys if key not in r.seen]
        for key in new:
            r.seen[key] = None
            place = None if self.arc else self.provisional(r, key)
            if not self.arc and key in self.state and place > self.ranks[key]:
                self.ranks[key] = place
        r.reused |= {key for key in reused if key not in r.ins}

    def evict(self, number, kept):
        can = [key for key in self.evictable() if key not in kept]
        if len(can) < number:
            return False
        if not self.arc:
            out = sorted(can, key=lambda key: self.ranks[key])[:number]
        else:
            out, size = [], len(self.t1)
            for _ in range(number):
                one = [key for key in self.t1 if key in can and key not in out]
                two = [key for key in self.t2 if key in can and key not in out]
                first = one and (size >= int(self.p) or not two)
                size -= bool(first)
                out.append(one[0] if first else two[0])
        for key in out:
            if key in self.t1:
                self.t1.remove(key)
                self.b1.append(key)
            elif key in self.t2:
                self.t2.remove(key)
                self.b2.append(key)
            del self.state[key]
            self.freed.append(self.place.pop(key))
        self.b1, self.b2 = self.b1[-self.size :], self.b2[-self.size :]
        return True

    def ended(self, r):
        for key in sorted(r.seen, key=lambda key: (key[2], key[0]), reverse=True):
            if not self.arc:
                if key in self.state:
                    self.rank += 1
                    self.ranks[key] = (self.rank, 0, 0)
                continue
            for part in (self.t1, self.t2):
                if key in part and key in r.reused:
                    part.remove(key)
                    self.t2.append(key)
                    break
                if key in part and key in r.ins:
                    part.remove(key)
                    part.append(key)
                    break

    # -- allocated --

    def allocated(self, r, nlocal, ext):
        self.touched |= {b for table in r.tables for b in table if b}
        if not ext:
            return
        sync = r.sync
        keys, gpu = [], []
        for g, table in enumerate(r.tables):
            bs = self.blocks.groups[g]["block_size"]
            end = ceil((nlocal + ext) / bs)
            start = next(
                (
                    i
                    for i in range(ceil(nlocal / bs), end)
                    if table[i] and (sync or self.blocks.key[table[i]] is None)
                ),
                end,
            )
            last = ceil((nlocal + ext) / self.ct[g])
            if start < end:
                keys += [self.key(r, g, i) for i in range(start // self.bpc, last)]
            gpu += table[start:end]
            r.next[g] = last
        for key in keys:
            self.state[key] += 1
        self.use(r, keys, keys)
        cpu = [self.place[key] for key in keys]
        self.start(r, {"load": True, "keys": keys, "async": not sync, "gpu": gpu, "cpu": cpu})
        self.new_loads.append(self.job - 1)

    def start(self, r, job):
        self.jobs[self.job] = job | {"r": r, "full": [], "number": self.job}
        r.jobs.add(self.job)
        self.job += 1

    # -- build --

    def build(self, engine, record):
        self.note(engine)
        flush = set()
        for r in engine.preempted:
            flush |= r.jobs - set(self.new_loads) if r in self.known else set()
        flush |= {job for b, job in self.fences if b in self.touched}
        first = self.job
        for r, m in [(e[0], e[1]) for e in engine.batch]:
            self.store(r, r.computed + m, False, flush)
        for r in engine.gone:
            if r in self.known:
                n = r.computed if r.status == "aborted" else max(r.plen, len(r.tokens) - 1)
                self.store(r, n, True, flush)
        for r in [r for r in engine.gone if r in self.known]:
            self.ended(r)
            r.gone = True
            self.forget(r)
        stores = list(range(first, self.job))
        show = [[self.shown(job) for job in jobs] for jobs in (self.new_loads, stores)]
        record |= {"loads": show[0], "stores": show[1], "flush": sorted(flush)}
        pending = sum(state == -1 for state in self.state.values())
        record["cpu"] = [self.free(), len(self.evictable()), pending]
        loads = [job for job in self.new_loads if self.jobs[job]["async"]]
        within = [job for job in self.new_loads if not self.jobs[job]["async"]]
        over = self.lanes[0].step(loads, lambda job: job in flush)
        now = self.delayed + [job for job in stores if job in flush]
        over = self.lanes[1].step(now, lambda job: job in flush) + over + within
        self.delayed = [job for job in stores if job not in flush]
        self.results.append(over)
        self.new_loads, self.touched = [], set()
        self.left = self.config.get("sync_load_budget_bytes", 0)

    def shown(self, job):
        job = self.jobs[job]
        gpu, cpu = job["gpu"], job["cpu"]
        return [job["number"], job["r"].id, len(gpu), len(cpu), digest(gpu, cpu)]

    def note(self, engine):
        old = {}
        for r, _, _, _, admitted in engine.batch:
            self.meet(r)
            if admitted:
                r.ids = [[] for _ in self.ct]
            old[r] = [len(ids) for ids in r.ids]
            for g, table in enumerate(r.tables):
                new = table[len(r.ids[g]) :]
                r.ids[g] = r.ids[g] + new
                self.touched |= {b for b in new if b}
        for r in self.known:
            for g, ids in enumerate(r.ids):
                if self.window(g) is None:
                    continue
                for i in range(r.next[g] * self.bpc, old[r][g] if r in old else len(ids)):
                    if ids[i] in self.touched:
                        ids[i] = 0

    def store(self, r, n, over, flush):
        n = min(n, len(r.tokens))
        if self.config.get("offload_prompt_only", True):
            n = min(n, r.plen)
        his, offered = [], []
        for g in range(len(self.ct)):
            his.append(self.hi(r, g, n, over))
            offered += [(g, i) for i in self.offered(r, g, his[g], over)]
        keys = [self.key(r, g, i) for g, i in offered]
        wanted = self.offer(r, keys) if keys else []
        if wanted is None:
            return
        r.next = [max(a, b) for a, b in zip(r.next, his, strict=True)]
        if not wanted:
            return
        gpu, full, fenced = [], [], []
        for (g, i), key in zip(offered, keys, strict=True):
            if key in wanted:
                blocks = [b for b in r.ids[g][i * self.bpc : (i + 1) * self.bpc] if b]
                gpu += blocks
                (full if self.window(g) is None else fenced).extend(blocks)
        cpu = [self.place[key] for key in wanted]
        self.start(r, {"load": False, "keys": wanted, "async": False, "gpu": gpu, "cpu": cpu})
        job = self.job - 1
        self.jobs[job]["full"] = full
        self.fences += [(b, job) for b in fenced + (full if over else [])]
        if over and self.touched & set(full):
            flush.add(job)

    def hi(self, r, g, n, over):
        hi = n // self.ct[g]
        if self.eagle[g] and n > r.plen and not over:
            hi = max(0, hi - 1)
        return min(hi, len(r.ids[g]) // self.bpc, self.keys(r, g))

    def offered(self, r, g, hi, over):
        prompt, lo = r.plen // self.ct[g], r.next[g]
        horizon = hi if over else prompt if hi <= prompt else None
        late = self.late(g) and over and hi != prompt
        if late:
            per = self.align() // self.blocks.groups[g]["block_size"]
            lo = min(lo, down(hi * self.bpc, per) // self.bpc)
        kept, before = self.mask(r, g, horizon), self.mask(r, g, prompt)
        found = []
        for i in range(lo, hi):
            places = range(i * self.bpc, (i + 1) * self.bpc)
            if late and i < r.next[g] and any(map(before, places)):
                continue
            missing = any(kept(j) and not r.ids[g][j] for j in places)
            if r.ids[g][places[-1]] and any(map(kept, places)) and not missing:
                found.append(i)
        return found

    def align(self):
        sizes = {self.ct[g] for g in range(len(self.ct)) if self.window(g) is None}
        return max(self.ct) if not sizes else sizes.pop() if len(sizes) == 1 else None

    def late(self, g):
        group, align = self.blocks.groups[g], self.align()
        sliding = group["type"] == "sliding" and not self.eagle[g] and self.blocks.ret is None
        return sliding and align is not None and align % group["block_size"] == 0

    def mask(self, r, g, horizon):
        group, align = self.blocks.groups[g], self.align()
        bs, ret, drop = group["block_size"], self.blocks.ret, int(self.eagle[g])
        if group["type"] != "sliding" or align is None or align % bs:
            return lambda i: True
        need = ceil((group["window"] - 1) / bs) + drop
        segment = align if ret is None else ret
        per = segment // bs
        if segment and need >= per:
            return lambda i: True
        spans = []
        if ret is not None:
            for x in [r.plen - 1] + ([r.store_junction] if r.store_junction else []):
                e = down(x, align) // bs + drop
                spans.append((e - need, e))
        elif horizon and not drop and horizon * self.bpc % per:
            x = horizon * self.bpc
            spans.append((max(down(x, per), x - need), x))

        def kept(i):
            if segment and i >= drop and (i - drop) % per >= per - need:
                return True
            return any(a <= i < e for a, e in spans)

        return kept

    # -- the end --

    def finished(self, r):
        if r in self.known:
            for job in r.jobs:
                self.fences += [(b, job) for b in self.jobs[job]["full"]]
        return False

    def forget(self, r):
        if r.gone and not r.jobs:
            self.known.remove(r)

    def hear(self, record):
        over = self.results.pop(0)
        record["xdone"] = over
        received = []
        for number in over:
            job = self.jobs.pop(number)
            for key in job["keys"]:
                self.state[key] = 0 if not job["load"] else self.state[key] - 1
            if job["async"]:
                received.append(job["r"])
            self.fences = [(b, other) for b, other in self.fences if other != number]
            job["r"].jobs.remove(number)
            self.forget(job["r"])
        return received, []

    def busy(self):
        return bool(self.jobs)


class Simple(Nothing):
    """Section 7. The tier is a second `Groups` of which only the pool and its keys are used."""

    can_load = True

    def __init__(self, config, blocks):
        c = config["simple"]
        self.blocks, self.on, self.lazy = blocks, blocks.caching, c.get("lazy_offload", False)
        self.cpu = Groups(config | {"num_gpu_blocks": c["cpu_blocks"] if self.on else 1})
        self.ahead = 2 * sum(
            ceil(g["window"] / g["block_size"]) + 1
            if g["type"] == "sliding"
            else ceil(config["max_num_batched_tokens"] / g["block_size"])
            for g in blocks.groups
        )
        self.lanes = Lane(c.get("load_steps", 1)), Lane(c.get("store_steps", 1))
        self.cursor, self.pins, self.counts = None, {}, {}
        self.in_flight, self.queued, self.new_loads = set(), [], []
        self.events, self.results, self.loads, self.stores = [0, 0], [], {}, {}

    def pin(self, blocks, pool):
        for b in blocks:
            if pool.count[b] == 0:
                pool.free.remove(b)
            pool.count[b] += 1

    def match(self, r, nlocal):
        self.drop(r)
        chunks = [g["chunk"] for g in self.blocks.groups if g["type"] == "chunked"]
        if r.skip or not self.on or any(nlocal % n for n in (self.blocks.sbs, *chunks)):
            return 0, False
        behind = Behind(r, nlocal)
        if len(r.tokens) - 1 - nlocal <= 0 or not self.number(r) - nlocal // self.blocks.hbs:
            return 0, False
        tables, hit, _ = self.behind(behind).search(
            behind, len(r.tokens) - 1 - nlocal, self.cpu.first_with
        )
        if not hit:
            return 0, False
        self.pin([b for table in tables for b in table if b], self.cpu)
        self.pins[r] = tables
        return hit, True

    def number(self, r):
        return self.blocks.number_of_keys(r)

    def behind(self, behind):
        """The lookup rules of the GPU, with keys that are counted from the local hit on."""
        view = object.__new__(Groups)
        view.__dict__ = dict(self.blocks.__dict__)
        blocks, r, base = self.blocks, behind.r, behind.base
        view.number_of_keys = lambda _: blocks.number_of_keys(r) - base // blocks.hbs
        view.content = lambda _, g, end: blocks.content(r, g, base + end)
        return view

    def drop(self, r):
        for table in self.pins.pop(r, []):
            self.cpu.release(table)

    def allocated(self, r, nlocal, ext):
        if self.on and not self.lazy and r not in self.counts:
            n = len(self.blocks.groups)
            self.counts[r], r.ids = [0] * n, [[] for _ in range(n)]
        if not ext:
            return
        gpu, cpu = [], []
        for g, table in enumerate(self.pins[r]):
            bs = self.blocks.groups[g]["block_size"]
            for i, b in enumerate(table[: ceil(ext / bs)]):
                if b:
                    gpu.append(r.tables[g][nlocal // bs + i])
                    cpu.append(b)
        self.pin(cpu, self.cpu)
        self.pin(gpu, self.blocks)
        self.drop(r)
        self.new_loads.append((r, gpu, cpu))

    def build(self, engine, record):
        gpu = []
        if self.lazy and self.on:
            gpu += self.walk()
            self.pin(gpu, self.blocks)
            cpu = self.cpu.take(len(gpu))
        else:
            cpu = self.eager(engine, gpu)
        for more, taken in self.queued:
            gpu, cpu = gpu + more, cpu + taken
        self.queued = []
        loads, stores = [], []
        if gpu:
            stores = [self.event(1, gpu, cpu)]
            self.stores[stores[0][0]] = gpu, cpu
        if self.new_loads:
            flat = [[b for load in self.new_loads for b in load[i]] for i in (1, 2)]
            loads = [self.event(0, *flat)]
            self.loads[loads[0][0]] = self.new_loads
            self.new_loads = []
        flush = bool(engine.preempted) and self.on
        keyed = sum(key is not None for key in self.cpu.key)
        record |= {"loads": loads, "stores": stores, "flush": [1] if flush else []}
        record["cpu"] = [len(self.cpu.free), keyed]
        new = {event[0] for event in loads}, {event[0] for event in stores}
        over = [
            lane.step(sorted(mine), lambda job, mine=mine: flush and job not in mine)
            for lane, mine in zip(self.lanes, new, strict=True)
        ]
        self.results.append(over)

    def event(self, kind, gpu, cpu):
        self.events[kind] += 1
        return [self.events[kind] - 1, len(gpu), digest(gpu, cpu)]

    def walk(self):
        free, key = self.blocks.free, self.blocks.key
        start = free.index(self.cursor) + 1 if self.cursor in free else 0
        found = []
        for b in free[start : start + self.ahead]:
            if len(found) >= len(self.cpu.free):
                break
            self.cursor = b
            if key[b] is not None and key[b] not in self.cpu.map:
                found.append(b)
        if start == 0 and self.cursor not in free:
            self.cursor = None
        return found

    def eager(self, engine, gpu):
        cpu = []
        for r in engine.preempted:
            if r in self.counts:
                n = len(self.blocks.groups)
                self.counts[r], r.ids = [0] * n, [[] for _ in range(n)]
        admitted = [e[0] for e in engine.batch if e[4]]
        order = [r for r in admitted if not r.ever] + [r for r in admitted if r.ever]
        for r in order + [e[0] for e in engine.batch if not e[4]]:
            if r not in self.counts:
                continue
            if r in admitted:
                r.ids = [[] for _ in r.ids]
            for ids, table in zip(r.ids, r.tables, strict=True):
                ids += table[len(ids) :]
            chosen = self.select(r, r.ids)
            cpu += self.reserve(chosen)
            gpu += chosen
        return cpu

    def reserve(self, chosen):
        self.pin(chosen, self.blocks)
        self.in_flight |= set(chosen)
        return self.cpu.take(len(chosen))

    def select(self, r, tables):
        chosen, confirmed = [], r.computed - r.ph
        for g, table in enumerate(tables):
            bs, tokens = self.blocks.groups[g]["block_size"], confirmed
            if len(chosen) >= len(self.cpu.free):
                break
            if len(tables) > 1:
                tokens = down(confirmed, self.blocks.sbs)
                if self.blocks.drops(g) and tokens > 0:
                    tokens = min(confirmed, tokens + bs)
            for i in range(self.counts[r][g], min(len(table), tokens // bs)):
                b = table[i]
                if not b and (i + 1) * bs <= self.number(r) * self.blocks.hbs:
                    b = self.blocks.first_with(self.blocks.content(r, g, (i + 1) * bs)) or 0
                key = self.blocks.key[b] if b else None
                if key is not None and b not in self.in_flight and key not in self.cpu.map:
                    if len(chosen) >= len(self.cpu.free):
                        break
                    chosen.append(b)
                self.counts[r][g] += 1
        return chosen

    def finished(self, r):
        self.drop(r)
        if r in self.counts:
            sizes = [g["block_size"] for g in self.blocks.groups]
            cut = [t[: ceil(r.computed / bs)] for t, bs in zip(r.tables, sizes, strict=True)]
            chosen = self.select(r, cut)
            if chosen:
                self.queued.append((chosen, self.reserve(chosen)))
            del self.counts[r]
        return False

    def hear(self, record):
        loads, stores = self.results.pop(0)
        record["xdone"] = [f"L{n}" for n in loads] + [f"S{n}" for n in stores]
        received = []
        for number in loads:
            for r, gpu, cpu in self.loads.pop(number):
                self.cpu.release(cpu)
                self.blocks.release(gpu)
                received.append(r)
        for number in stores:
            gpu, cpu = self.stores.pop(number)
            self.in_flight -= set(gpu)
            for b, c in zip(gpu, cpu, strict=True):
                self.cpu.name(c, self.blocks.key[b])
            self.cpu.release(cpu)
            self.blocks.release(gpu)
        return received, []

    def busy(self):
        return bool(self.queued or self.stores)


class Behind:
    """A request as the second pool sees it: what follows its local hit."""

    def __init__(self, r, base):
        self.r, self.base = r, base


CONNECTORS = {"offloading": Offload, "simple": Simple, "nixl": Nixl}
