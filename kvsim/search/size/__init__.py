"""Sizing: how much is needed to keep the objectives, and how near the cliff is."""
