"""Questions that many runs answer: which settings, how much, how many, which release.

In go a configuration, what may change in it, and objectives. Out come every run that was made,
which of them keep the objectives, and how sure that is.
"""
