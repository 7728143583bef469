"""How sure a difference is: estimates with their error, intervals, and when to stop sampling.

The package takes figures as arrays and returns which of them differ. It does not import the
simulator.
"""
