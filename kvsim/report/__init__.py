"""Results for people: words, terminals, pages, notebooks, and tracks for trace viewers.

In go tables and figures (`kvsim.results`) and explanations (`kvsim.explain`). Out come sentences,
rows, and HTML files that need no other file and no network.
"""
