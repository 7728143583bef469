"""Validates: the simulator's own scheduler drives a real engine, and the two are compared.

```
          settings ──prepare──► setup ──measure──► recording ──compare──► result ──page──► HTML
 needs    kvsim                 torch              kvsim, a profile       plotly
```

`loop.serve` is the serving loop: one scheduler and one block manager, unchanged, in front of
whatever says how long a step takes. A cost model says it by pricing the plan, `kvsim_kernels`'
executor by running it. So any difference between the two is step time.

`loop`, `measure` and `recording`, and all that they import, do without SimPy, msgspec, plotly and
rich: `python -m kvsim.validate` measures on a machine that has torch and little else.
"""
