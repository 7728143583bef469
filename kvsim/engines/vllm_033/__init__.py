"""vLLM 0.3.3: its scheduler and its blocks."""
