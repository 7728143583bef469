"""Several replicas behind a router, or prefill and decode apart, in one simulation.

In go settings of the replicas and the name of a router. Out come a result for each replica, and
what the router's decisions cost.
"""
