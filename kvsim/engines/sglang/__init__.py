"""SGLang 0.5.23: its scheduler, its radix tree, and its pool of pages.

```
 queue    order of the waiting requests
   │
 scheduler ─► adder    what one prefill takes on
   │            │
   └──────► manager ─► tree ─► pool of pages
```
"""
