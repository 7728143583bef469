"""Where things are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
DATA = ROOT / "tests" / "data"
"""The sample of recorded logs; `sample.py` draws it."""
