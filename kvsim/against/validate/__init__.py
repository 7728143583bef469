"""Validates: the simulator's own scheduler drives a real engine, and the two are compared.

```
          settings ──prepare──► setup ──measure──► recording ──compare──► result ──page──► HTML
 needs    kvsim                 torch              kvsim, a profile       plotly
```
`measure.serve` is the serving loop: one scheduler and one block manager, unchanged, in front of a
source of step times. A cost model prices the plan of a step; `kvsim_kernels`' executor runs it. So
every difference between the two is a difference of step time.

`setup` and `measure`, and everything they import, need no SimPy, msgspec, plotly or
rich: `python -m kvsim.against.validate` measures on a machine that has torch and little else.
"""
