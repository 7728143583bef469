"""Why a run is as it is: stories of requests, differences between runs, caches, and certainty.

In go the tables and figures of one run, or of two. Out come parts that add up to what they
explain, as plain values; `kvsim.report` puts them into words and draws them.
"""
