"""kvsim beside something real: recorded decisions, measured runs, a GPU, and rival simulators.

In go logs and measurements of others. Out comes how far kvsim is from them, and what is to blame:
decisions (`conform`), times (`check`, `fit`, `validate`), and its own speed (`bench`).
"""
