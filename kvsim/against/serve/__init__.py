"""`kvsim serve`: the simulated engine behind vLLM's HTTP interface, events and metrics.

Requests enter over HTTP while the engine runs, and leave as answers of the right number of made-up
tokens at the right time; KV events (ZMQ) and metrics (Prometheus) leave as vLLM writes them.

```
 HTTP ──► server ─► session ──► Serving (the loop of `kvsim run`)
                       ▲           │ a step is over
                  its clock        ▼
 HTTP ◄── protocol ◄────────── watch ──► metrics, kv_events
```
Its clock follows the wall's times a speed, or none at all. Words stand in for tokens (`watch`);
`metrics` lets a finished run speak, too.
"""
