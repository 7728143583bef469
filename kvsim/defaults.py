"""What is assumed where nobody says otherwise."""

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block, as in vLLM on a GPU."""
