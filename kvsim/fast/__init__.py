"""Short cuts that make the same decisions as handling every request in every step, with less work.

```
 known ──► shortcuts ─┬─► cohort ◄── batch          those that decode together are one thing
 (which)              └─► repeat ─┬─► decodes       steps that nobody need be asked about
                                  ├─► prompts
                                  └─► ahead
```

A batch without short cuts is their exact twin (`exact_twin`). Short cuts hold a batch; no class
here derives from it.
"""
