"""On what a calibration was made: the device, the software, and the code of the kernels."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(64 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""Settings of glibc's allocator for CPU runs, read when a process starts.

By default large buffers are mapped and unmapped on every call until a threshold adapts; until then
the same call takes up to three times as long, and a whole table may be off.
"""

TIMED = (
    "all_reduce", "buffers", "ceilings", "dense", "experts", "forward", "measure", "pages", "step",
    "swap", "timing", "torch_impl", "triton_attend", "triton_cache", "triton_decode",
    "triton_dense", "triton_prefill",
)  # fmt: skip
"""Modules whose code decides what a row measures."""


def device(cuda: bool) -> dict[str, Any]:
    """Name and size of the device that is timed."""
    if not cuda:
        return {"name": _processor(), "cores": os.cpu_count(), "threads": 1}
    import torch

    found = torch.cuda.get_device_properties()
    return {
        "name": found.name,
        "sms": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "mem_bytes": found.total_memory,
        "driver": _driver(),
    }


def software(cuda: bool) -> dict[str, Any]:
    """Versions and settings that can change a time."""
    import numpy
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "kvsim": _version("kvsim") or "checkout",
        "kernels": digest(),
    }
    if cuda:
        return found | {"cuda": torch.version.cuda, "triton": _version("triton")}
    keys = (*ALLOCATOR, "LD_PRELOAD")
    settings = {key: os.environ[key] for key in keys if key in os.environ}
    return found | {"environment": settings}


def digest() -> str:
    """The first 12 hex digits of a hash over the code that is timed or times."""
    total = hashlib.sha256()
    for name in TIMED:
        total.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return total.hexdigest()[:12]


def revision() -> str:
    """The commit of the checkout, or "unknown"; what is measured is told by `digest`."""
    here = str(Path(__file__).parent)
    return _output("git", "-C", here, "rev-parse", "--short=12", "HEAD")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _output(*command: str) -> str:
    """The first line that a command prints; "unknown" where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
