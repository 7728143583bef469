"""Measures how fast the simulator is, on workloads that anybody can rebuild."""
