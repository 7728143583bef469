"""Why a run is as it is: stories of requests, differences between runs, caches, and certainty.

In go the tables and figures of one run, or of two. Out come parts that add up to what they
explain, or sentences; `kvsim.report` lays them out and draws them.
"""
