"""vLLM V1 0.33.0: its scheduler, its block manager, and the parts that a run may add.

```
 connector, drafts, adapters        asked where vLLM asks them; by default they do nothing
             │
  scheduler ─┼─► manager ─► groups ─► pool
  who runs   │   tables     rules of layers
             ▼
            plan
```
"""
