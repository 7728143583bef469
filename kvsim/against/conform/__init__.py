"""Step logs: what the engines decided, record by record, and whether kvsim decides the same."""
