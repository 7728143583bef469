"""vLLM 0.6.3: its scheduler, its blocks, and how its server dies."""
