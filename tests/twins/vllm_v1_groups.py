"""KV cache groups of vLLM V1 0.33.0 as their rules are worded: plain lists, no cleverness.

Nothing of kvsim is used. A request has `tokens`, `plen`, `computed`, `fly`, `key` (adapter and
salt), and what `Groups.join` adds.
"""

from math import ceil, gcd, lcm

from twins.steps import EngineError


def down(a, b):
    return a // b * b


class Groups:
    """One pool and the tables of all groups; one method per rule."""

    def __init__(self, config, drop=False, lookahead=0, k=0, in_flight=1, keyed=None):
        plain = [{"type": "full", "block_size": config["block_size"]}]
        self.groups = config.get("kv_groups") or plain
        self.caching = config.get("enable_prefix_caching", False)
        self.ret = config.get("prefix_cache_retention_interval", 0)
        self.max_len = config["max_model_len"]
        self.m = config["max_num_batched_tokens"] * in_flight
        self.threshold = config.get("long_prefill_token_threshold", 0)
        self.batched = config["max_num_batched_tokens"]
        self.drop, self.lookahead, self.k = drop, lookahead, k
        sizes = [g["block_size"] for g in self.groups]
        self.sbs = lcm(*sizes)
        self.hbs = gcd(*sizes) if (self.caching if keyed is None else keyed) else self.sbs
        self.total = config["num_gpu_blocks"]
        self.free = list(range(1, self.total))
        self.count = [0] * self.total
        self.key = [None] * self.total  # the content of a block: (group, tokens)
        self.map = {}
        self.now = set()  # keys of this schedule call

    # -- keys and pool --

    def number_of_keys(self, r):
        return max(len(r.tokens) - self.lookahead, 0) // self.hbs

    def content(self, r, g, end):
        if end > self.number_of_keys(r) * self.hbs:
            raise EngineError("AssertionError")
        return g, r.key, end, tuple(r.tokens[: end + self.lookahead])

    def present(self, r, members, i, find):
        end = (i + 1) * self.groups[members[0]]["block_size"]
        found = [find(self.content(r, g, end)) for g in members]
        return None if None in found else found

    def first_with(self, key):
        return self.map[key][0] if key in self.map else None

    def take(self, number):
        taken = []
        for _ in range(number):
            b = self.free.pop(0)
            self.unname(b)
            self.count[b] = 1
            taken.append(b)
        return taken

    def unname(self, b):
        if self.key[b] is not None:
            self.map[self.key[b]].remove(b)
            if not self.map[self.key[b]]:
                del self.map[self.key[b]]
            self.key[b] = None

    def name(self, b, key):
        self.unname(b)
        self.key[b] = key
        self.map.setdefault(key, []).append(b)
        self.now.add(key)

    def release(self, blocks):
        """One release call, in this order."""
        blank, keyed = [], []
        for b in blocks:
            if b:
                self.count[b] -= 1
                if self.count[b] == 0:
                    (blank if self.key[b] is None else keyed).append(b)
        self.free = blank + self.free + keyed

    # -- requests --

    def join(self, r):
        number = len(self.groups)
        r.tables = [[] for _ in range(number)]
        r.reg = [0] * number
        r.known = [False] * number
        r.grown = [False] * number
        r.last = [None] * number
        r.retired = [0] * number
        r.export = [None] * number

    def skipped(self, g, n):
        group = self.groups[g]
        if group["type"] == "sliding":
            return max(0, n - group["window"] + 1)
        if group["type"] == "chunked":
            return down(n, group["chunk"])
        if group["type"] == "mamba":
            return max(n - 1, 0)
        return 0

    def aligned(self, g):
        return self.groups[g]["type"] == "mamba" and self.caching

    # -- trim --

    def trim(self, r, n):
        for g, group in enumerate(self.groups):
            table, bs = r.tables[g], group["block_size"]
            end = min(self.skipped(g, n) // bs, len(table))
            gone = []
            if self.aligned(g):
                for i in range(end - 1, r.retired[g] - 1, -1):
                    gone.append(table[i])
                    table[i] = 0
                self.release(gone)
                r.retired[g] = max(r.retired[g], end)
                last = r.last[g]
                if last is not None and last < ceil(n / bs) - 1:
                    self.release([table[last]])
                    table[last] = 0
                continue
            for i in range(end - 1, -1, -1):
                if table[i] == 0:
                    break
                gone.append(table[i])
                table[i] = 0
            self.release(gone)

    # -- allocate --

    def cap(self, g):
        group = self.groups[g]
        bs = group["block_size"]
        if group["type"] == "sliding":
            return ceil(min(group["window"] - 1 + self.m, self.max_len) / bs) + 1
        if group["type"] == "chunked":
            return ceil(min(group["chunk"] + self.m, self.max_len) / bs)
        return 10**9

    def missing(self, r, g, n, cap, hits, start, tokens):
        bs, table = self.groups[g]["block_size"], r.tables[g]
        if self.groups[g]["type"] == "mamba":
            if hits and self.key[hits[-1]] in self.now:
                return self.total + 1
            if self.caching:
                return self.missing_states(r, g, hits, start, tokens, cap)
            n += bs * self.k
        want = ceil(n / bs)
        if cap:
            want = min(want, self.cap(g))
        if r.known[g]:
            return max(want - len(table), 0)
        sk = self.skipped(g, start) // bs
        idle = [b for b in hits[max(0, sk - len(table)) :] if b and self.count[b] == 0]
        return max(want - max(sk, len(hits) + len(table)), 0) + len(idle)

    def missing_states(self, r, g, hits, start, tokens, cap):
        bs, table = self.groups[g]["block_size"], r.tables[g]
        export = self.exporting(r, g, start, tokens)
        if not cap:
            r.export[g] = export
        q = ceil(tokens / bs) + self.k - len(hits) - len(table)
        if q > 0:
            q = min(q, 1 + (export is not None) + (0 if r.grown[g] else self.k))
        return q + len([b for b in hits if b and self.count[b] == 0])

    def exporting(self, r, g, start, n):
        bs, table = self.groups[g]["block_size"], r.tables[g]
        p, i = self.point(n, self.sbs), ceil(n / bs) - 2
        end = max(r.plen, len(r.tokens) - 1) if self.ret == 0 else 0
        if n < end or not self.can_export(g, start, n, p):
            return None
        spare = i >= len(table) or table[i] == 0
        if spare or (r.grown[g] and i >= len(table) - self.k):
            return p, i
        return None

    def can_export(self, g, start, e, p):
        group = self.groups[g]
        bs = group["block_size"]
        return (
            group.get("checkpoint", False)
            and start % self.hbs == 0
            and ceil(e / bs) - 2 > (start - 1) // bs
            and start + self.hbs <= p
            and start < p < e
            and (p - start) % group.get("checkpoint_alignment", 1) == 0
        )

    def point(self, n, u):
        if self.drop:
            return max(down(n, u) - u, 0)
        return max(down(n - max(1, self.lookahead), u), 0)

    def allocate(
        self, r, k, hits=None, nhit=0, ext=0, full=False, look=0, delay=False, reserved=0, w=0
    ):
        hits = hits or [[] for _ in self.groups]
        start = r.computed + nhit + ext
        total = min(start, self.max_len)
        every = range(len(self.groups))
        if full:
            n = min(len(r.tokens), self.max_len)
            if sum(self.missing(r, g, n, True, hits[g], total, n) for g in every) + w > len(
                self.free
            ):
                return False
        need = min(total + k + look, self.max_len)
        self.trim(r, max(0, total - r.fly))
        short = sum(self.missing(r, g, need, False, hits[g], start, total + k) for g in every)
        if short + w > len(self.free) - reserved:
            return False
        if (any(hits) or ext > 0) and not any(r.known):
            for g in every:
                sk = max(self.skipped(g, start) // self.groups[g]["block_size"], 0)
                for b in hits[g][sk:]:
                    if b:
                        if self.count[b] == 0:
                            self.free.remove(b)
                        self.count[b] += 1
                r.tables[g] = [0] * sk + hits[g][sk:]
                r.reg[g], r.known[g] = len(r.tables[g]), True
            for g in every:
                skipped = self.skipped(g, start)
                e = min(start - skipped, ext) if skipped > 0 else ext
                if e > 0:
                    more = ceil(start / self.groups[g]["block_size"]) - len(r.tables[g])
                    r.tables[g] += self.take(max(0, more))
        for g in every:
            self.grow(r, g, need, total + k)
        if not delay:
            self.register(r, min(total + k, len(r.tokens)))
        return True

    def grow(self, r, g, need, tokens):
        bs, table = self.groups[g]["block_size"], r.tables[g]
        if not self.aligned(g):
            if self.groups[g]["type"] == "mamba":
                need += bs * self.k
            table += self.take(max(0, ceil(need / bs) - len(table)))
            return
        need, export = ceil(tokens / bs) + self.k, r.export[g] is not None
        before, grown = len(table), r.grown[g]
        r.grown[g] = True
        if need <= before and not export:
            return
        if grown:
            r.last[g] = before - 1 - self.k
        elif before:
            r.last[g] = before - 1
        gap = need - self.k - 1 - export
        while len(table) < gap:
            table.append(0)
        if grown:
            for i in range(before - self.k, before):
                if i < gap:
                    table.append(table[i])
                    table[i] = 0
        table += self.take(max(0, need - len(table)))

    # -- register --

    def marks(self, r):
        if not self.drop:
            return [r.plen - 1]
        return [max(0, down(n, self.sbs) - self.sbs) for n in (r.plen - 1, r.plen)]

    def drops(self, g):
        """Whether hits of this group, or of one equal to it, lose their last block."""
        if not self.drop or not any(group.get("eagle") for group in self.groups):
            return self.drop
        return any(group.get("eagle") for group in self.groups if self.same(group, self.groups[g]))

    def same(self, a, b):
        return {k: v for k, v in a.items() if k != "eagle"} == {
            k: v for k, v in b.items() if k != "eagle"
        }

    def mask(self, r, g):
        """The rule as a function of a block number."""
        group, bs, align, drop = self.groups[g], self.groups[g]["block_size"], self.sbs, False
        drop = self.drops(g)
        marks = self.marks(r)
        if r.junction:
            marks += [r.junction, r.junction - bs] if drop else [r.junction]
        if group["type"] == "mamba":
            if self.ret is None or (self.ret and self.ret // bs <= 1):
                return lambda i: True
            per = self.ret // bs
            ends = [down(x, align) // bs - 1 for x in marks]
            return lambda i: i in ends or (per > 0 and (i + 1) % per == 0)
        if group["type"] != "sliding" or align % bs:
            return lambda i: True
        need, shift = ceil((group["window"] - 1) / bs) + drop, int(drop)
        segment = align if self.ret is None else self.ret
        per = segment // bs
        if segment and need >= per:
            return lambda i: True
        tails = [down(x, align) // bs + shift for x in marks] if self.ret is not None else []

        def kept(i):
            if segment and i >= shift and (i - shift) % per >= per - need:
                return True
            return any(max(0, e - need) <= i < e for e in tails)

        return kept

    def register(self, r, n):
        if not self.caching:
            return
        for g, group in enumerate(self.groups):
            bs = group["block_size"]
            m = n
            if len(self.groups) > 1:
                m = down(n, self.sbs)
                if self.drops(g) and m > 0:
                    m = min(n, m + bs)
            hi = min(m, self.number_of_keys(r) * self.hbs) // bs
            kept = self.mask(r, g)
            for i in range(r.reg[g], hi):
                b = r.tables[g][i]
                if b and kept(i):
                    self.name(b, self.content(r, g, (i + 1) * bs))
            if hi > r.reg[g]:
                r.reg[g], r.known[g] = hi, True
            if group["type"] == "full" and bs > self.hbs:
                self.register_tail(r, g, m)
            if self.aligned(g) and r.export[g]:
                self.register_export(r, g)

    def register_tail(self, r, g, m):
        bs, known = self.groups[g]["block_size"], self.number_of_keys(r) * self.hbs
        e = min(down(r.plen if self.drops(g) else r.plen - 1, self.hbs), known)
        if 0 < e <= m and e % bs and e // bs < len(r.tables[g]):
            b = r.tables[g][e // bs]
            if b and (self.key[b] is None or self.key[b][2] < e):
                self.name(b, self.content(r, g, e))

    def register_export(self, r, g):
        bs = self.groups[g]["block_size"]
        p, i = r.export[g]
        b = r.tables[g][i]
        worth = p in (self.point(r.plen, self.sbs), r.junction)
        if p % bs == 0:
            each = None if self.ret is None else self.ret // bs
            worth = worth or each in (None, 1) or (each > 0 and p // bs % each == 0)
        if not worth:
            self.unname(b)
        elif self.key[b] is None or self.key[b][2] != p:
            self.name(b, self.content(r, g, p))

    # -- hits --

    def sets(self):
        found = []
        for g, group in enumerate(self.groups):
            for members in found:
                if self.same(self.groups[members[0]], group):
                    members.append(g)
                    break
            else:
                found.append([g])
        return sorted(found, key=lambda members: self.groups[members[0]]["type"] != "full")

    def single(self, r, members, longest, drop, align, find):
        """The hit of equal groups: one entry per block, 0 for none."""
        group = self.groups[members[0]]
        bs = group["block_size"]
        n = longest // bs
        found = [None] * n
        if group["type"] == "mamba":
            for i in range(n - 1, -1, -1):
                blocks = self.present(r, members, i, find)
                if blocks and (i + 1) * bs % align == 0:
                    return [*found[:i], blocks]
            return []
        if group["type"] == "sliding":
            return self.single_window(r, members, n, drop, align, find)
        first = down(longest, group["chunk"]) // bs if group["type"] == "chunked" else 0
        end = first
        for i in range(first, n):
            found[i] = self.present(r, members, i, find)
            if not found[i]:
                break
            end = i + 1
        if group["type"] == "chunked":
            return found[:end]
        tokens = end * bs
        if drop and tokens:
            tokens -= bs
        return found[: down(tokens, align) // bs]

    def single_window(self, r, members, n, drop, align, find):
        group = self.groups[members[0]]
        bs = group["block_size"]
        need = ceil((group["window"] - 1) / bs) + drop
        found, run = [None] * n, 0
        for i in range(n - 1, -1, -1):
            blocks = self.present(r, members, i, find)
            if not blocks:
                run = 0
                continue
            if run == 0 and bs != align and (i * bs if drop else (i + 1) * bs) % align:
                continue
            found[i] = blocks
            run += 1
            if run >= need:
                found = found[: i + run]
                break
        else:
            found = found[:run]
            while len(found) * bs % align:
                found.pop()
        if drop and found:
            found.pop()
            while len(found) * bs % align:
                found.pop()
        return found

    def hits(self, r):
        """Hits of each group, their tokens; notes the junction."""
        r.junction = 0
        if not self.caching:
            return [[] for _ in self.groups], 0
        tables, tokens, r.junction = self.search(r, len(r.tokens) - 1, self.first_with)
        return tables, tokens

    def search(self, r, longest, find):
        sets = self.sets()
        if len(self.groups) == 1:
            found = {0: self.single(r, [0], longest, self.drop, self.sbs, find)}
            return self.spread(sets, found), len(found[0]) * self.sbs, 0
        known = self.number_of_keys(r) * self.hbs
        length, best, done, found = longest, 0, set(), {}
        while True:
            cur = length
            for s, members in enumerate(sets):
                group = self.groups[members[0]]
                bs = group["block_size"]
                if group["type"] == "full" and s in found:
                    cur = min(cur, len(found[s]) * bs)
                    continue
                drop = self.drops(members[0]) and s not in done
                margin = drop and group["type"] != "mamba"
                most = min(cur + bs, known) if margin else cur
                found[s] = self.single(r, members, most, drop, self.sbs, find)
                result = len(found[s]) * bs
                if drop:
                    done.add(s)
                elif result < cur:
                    done.clear()
                cur = result
                best = max(best, cur)
            if cur >= length:
                break
            length = cur
            if len(sets) == 2 and self.groups[sets[0][0]]["type"] == "full":
                break
        for s, members in enumerate(sets):
            if self.groups[members[0]]["type"] == "full":
                found[s] = found[s][: ceil(length / self.groups[members[0]]["block_size"])]
        return self.spread(sets, found), length, best if best > length else 0

    def spread(self, sets, found):
        tables = [[] for _ in self.groups]
        for s, members in enumerate(sets):
            for place, g in enumerate(members):
                tables[g] = [entry[place] if entry else 0 for entry in found[s]]
        return tables

    # -- the rest --

    def cut(self, r, start, m):
        states = [g for g in range(len(self.groups)) if self.aligned(g)]
        end = max(r.plen, len(r.tokens) - 1)
        if not states or start >= end:
            return m
        bs, e = self.groups[states[0]]["block_size"], start + m
        export = e >= end and all(
            self.can_export(g, start, e, self.point(end, self.sbs)) for g in states
        )
        if e < end:
            most = min(self.batched, self.threshold) if self.threshold > 0 else self.batched
            if down(e, bs) > start or bs <= most:
                e = down(e, bs)
        stops = [] if export else [self.point(len(r.tokens), bs)]
        if start % bs and not export:
            stops.append(down(start, bs) + bs)
        if start < r.junction < e:
            stops.append(start + down(r.junction - start, bs))
        return max(min([s for s in stops if start < s < e], default=e) - start, 0)

    def drop_all(self, r):
        for table in r.tables:
            self.release(reversed(table))
        self.join(r)
