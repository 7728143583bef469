"""The measuring code lies beside the package; what of it is tested here needs no torch."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))
