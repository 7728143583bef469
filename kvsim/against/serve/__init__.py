"""`kvsim serve`: the simulated engine behind vLLM's HTTP interface, events and metrics.

Requests enter over HTTP while the engine runs, and leave as answers of the right number of made-up
tokens at the right time; KV events (ZMQ) and metrics (Prometheus) leave as vLLM writes them.

```
 HTTP ──► app ────► session ──► Serving (the loop of `kvsim run`)
                       ▲           │ a step is over
                     clock         ▼
 HTTP ◄── reply ◄───────────── watch ──► metrics, kv_events
```
The clock follows the wall's times a speed, or none at all. `protocol` and `words` are what is said;
`again` lets a finished run speak.
"""
