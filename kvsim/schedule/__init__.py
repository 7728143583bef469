"""Schedulers: what each step of an engine does."""
