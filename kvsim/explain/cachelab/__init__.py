"""What a trace's reuse says about caches, before any time is simulated.

```
 trace ─► runs ─► curve (LRU, every capacity at once) ─┐
            ├───► optimum (Belady, at chosen ones) ────┼─► words, page
            └───► policies, breakdown, sampling ───────┘
```

The cache is simulated alone: one request at a time in the order of the trace, no time, nothing
pinned by running requests. All blocks of a request are looked up, then inserted. The leading blocks
that are present hit. Only `audit` looks at a run.
"""
