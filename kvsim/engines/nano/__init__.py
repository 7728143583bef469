"""nano-vllm: its scheduler, its blocks, and how it counts its memory."""
