"""Makes `from made import ...` work in these test modules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
