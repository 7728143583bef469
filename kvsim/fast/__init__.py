"""Short cuts that decide the same as looking at every request in every step, with less work.

```
 known ──► shortcuts ─┬─► cohort ◄── batch          those that decode together are one thing
 (which)              └─► repeat ─┬─► decodes       steps that nobody need be asked about
                                  ├─► prompts
                                  └─► ahead
```

A batch without them is their twin (`exact_twin`). They hold a batch; no class here is a batch.
"""
