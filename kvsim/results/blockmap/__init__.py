"""Samples, while a run goes on, which request holds which block."""
