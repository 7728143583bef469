"""Defaults that do not depend on the engine."""

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block, as in vLLM on a GPU."""
DEFAULT_ENGINE = "vllm-v1"
"""The engine that most servers run today."""
DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_HARDWARE = "h100-sxm"
"""Model and GPU of a first run that names none; the run says so."""
DEFAULT_LORA_RANK = 16
"""`max_lora_rank` of vLLM 0.33.0 (config/lora.py)."""
