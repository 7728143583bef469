"""How sure a difference is: estimates with their error, intervals, and when to stop asking.

Knows nothing of runs: it gets figures as arrays and answers which of them differ.
"""
