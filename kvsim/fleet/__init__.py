"""Several replicas behind a router, in one simulation."""
