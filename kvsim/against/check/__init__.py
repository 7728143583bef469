"""Replays a measured run, and says how far the prediction is off, and why."""
