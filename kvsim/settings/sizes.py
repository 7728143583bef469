"""Reads whole numbers with a suffix, as vLLM's command line does: 32K, 25.6k, 10G.

Lower-case suffixes are powers of 1,000, upper-case ones powers of 1,024. Source: vLLM 0.33.0,
vllm/utils/argparse_utils.py, `human_readable_int`. `10GiB`, which vLLM refuses, is `10G` here.
"""

from __future__ import annotations

import re
from fractions import Fraction

_SIZE = re.compile(r"(\d+)(\.\d+)?(?:([kmgt])|([KMGT])(?:iB)?)?")


def human_readable_int(text: str) -> int:
    """The number that a text means; raises `ValueError` with the remedy.

    Decimals go with lower-case suffixes only, and are cut to a whole number.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a number; write it as 32768, 32K (x 1,024) or 32k (x 1,000)")
    whole, decimals, thousands, binary = match.groups()
    if binary:
        if decimals:
            raise ValueError(f"has decimals before {binary}; use {binary.lower()}, or no decimals")
        return int(whole) << 10 * ("KMGT".index(binary) + 1)
    if decimals and not thousands:
        raise ValueError("is not a whole number")
    power = "kmgt".index(thousands) + 1 if thousands else 0
    return int(Fraction(whole + (decimals or "")) * 1000**power)
