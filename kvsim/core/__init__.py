"""The mechanism of an engine in plain typed Python: it keeps the books while policies decide.

In go requests and the decisions of a scheduler. Out come steps: a `plan.Plan` each, whose tokens
and blocks are booked once, and a row in `rows`. Most of it is compiled (`compiled`).
"""
