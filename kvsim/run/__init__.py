"""One run: settings become objects, objects serve a trace in simulated time, a result is left.

In go a `RunConfig` and a trace (`simulation.simulate`). `assembly` builds engine, blocks, cost and
link, `attempt` and `serving` let time pass. Out comes a `result.Result`.
"""
