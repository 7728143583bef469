"""The mechanism of an engine in plain typed Python: it keeps the books while policies decide.

Requests with block tables enter, and plans of steps, rows of steps and ended requests leave. Every
request and every block is looked at in every step, so that every override of every method counts.
"""
