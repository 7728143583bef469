"""What every test module can import; how random tests behave."""

import gc
import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

from kvsim.core import compiled

TESTS = Path(__file__).parent
# Helpers by their names, modules beside tests by their paths, and the measuring code.
sys.path[:0] = [str(TESTS / "support"), str(TESTS), str(TESTS.parent / "kernels")]

from marks import examples  # noqa: E402

# pytest has a process for each core; what takes all cores by itself would start as many again.
for processes_or_threads in ("LOKY_MAX_CPU_COUNT", "OMP_NUM_THREADS"):
    os.environ.setdefault(processes_or_threads, "1")

# Nothing here is timed; a random test that fails prints what repeats it.
settings.register_profile(
    "kvsim",
    deadline=None,
    max_examples=examples(50),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvsim")


def pytest_report_header() -> str:
    """Which way the core runs."""
    return f"kvsim: {compiled.explanation()}"


def pytest_collection_finish() -> None:
    """From here on, Python's collector looks only at what tests make, not at all modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def pytest_sessionfinish() -> None:
    """Libraries complain of what nobody frees before Python ends."""
    gc.unfreeze()
