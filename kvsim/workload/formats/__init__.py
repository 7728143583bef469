"""Readers of foreign trace formats: a module, or a `Reader` in one, `recognises` a head and will
`read` a source.

A reader looks at content, never at names. It raises `TraceError` for a file that it cannot read as
what it is, and whatever it drops or changes becomes a note of the trace. The traps of a format are
in the docstring of its module.
"""
