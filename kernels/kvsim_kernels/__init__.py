"""Paged-attention kernels, KV-cache moves and the dense part of a decoder, with their checks.

Read in this order: `pages.py` (what a kernel is given), `reference.py` (what it must compute),
`triton_attend.py` (the loop over keys that every attention kernel shares). Nothing here imports
kvsim; the simulator in turn reads only the profiles measured with these kernels.
"""
