"""Writes a run as tracks of the Chrome trace event format, for Perfetto and chrome://tracing."""
