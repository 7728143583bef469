"""Makes `from shared import ...` work in every test module; how random tests behave."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# Nothing here is timed; a random test that fails prints what repeats it.
settings.register_profile(
    "kvsim", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvsim")
