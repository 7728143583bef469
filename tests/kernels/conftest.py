"""Kernels run on the GPU where there is one, else in Triton's interpreter, chosen before import."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

# Triton 3.9 warns while this is unset, and warnings are errors here.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def patch_once() -> None:
    """Triton's interpreter patches its language for a kernel, and again for each function that the
    kernel calls, which changes nothing and takes a third of the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patched(function: Any) -> Any:
        used = (each for each in function.__globals__.values() if each is tl or each is tl.core)
        unpatched = any(tl.core.is_builtin(each.load) for each in used)
        return patch(function) if unpatched else interpreter._LangPatchScope()

    interpreter._patch_lang = patched


if os.environ.get("TRITON_INTERPRET") and importlib.util.find_spec("triton") is not None:
    patch_once()
