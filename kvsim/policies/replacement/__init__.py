"""Eviction policies of the literature and of engines, for prefix caches.

`kvsim.policies.eviction.EVICTIONS` names them. A block in use cannot go, so
each policy evicts the first block of its own order that is idle.
"""
