"""What a run leaves: columns become tables, figures, and a ledger that adds up.

In go the columns of steps and requests (`kvsim.core.schema`). Out come Arrow tables, the figures of
`summary`, and in `ledger` where each nanosecond and each prompt token went.
"""
