"""The engine room: requests, the batch that moves them, the loop that steps, and its hosts.

```
 request ─► scheduler ─► batch ─► plan ─► loop ─► recorder
            proposes     keeps    one     steps   remembers
                         books    step
```
"""
