"""The counts at which fitted surfaces are evaluated for a profile."""

from __future__ import annotations

TOKENS = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512]
TOKENS += [640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 6144, 8192]
SEQS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
CONTEXTS = [2, 4, 8, *[base << i for i in range(13) for base in (16, 24)][:-1]]
CHUNKS = [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
BEFORE = [0, 256, 1024, 4096, 16384, 65536]

MIXED = {
    "q": [16, 48, 192, 512, 1024, 2048],
    "ctx": [0, 1024, 4096, 16384],
    "n": [1, 3, 6, 12, 32, 64, 128],
    "kv": [16, 192, 768, 1536, 3072, 6144, 16384],
}
"""Far fewer per axis, because four axes multiply; these lost least on an RTX PRO 6000."""
