"""Ahead-of-time compilation for sm_90: no spills, within its limits, tensor cores in use."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from batches import DEVICE, torch
from kvsim_kernels import compile_check, triton_attend
from marks import long, whole

KERNELS = Path(compile_check.__file__).parents[1]

GEOMETRY = "D128 BS16 G4"
CHECKED = [
    *(f"{name} bf16/bf16 {GEOMETRY}" for name in ("decode_v1", "decode_v2", "decode_reduce")),
    f"prefill bf16/bf16 {GEOMETRY}",
    f"prefill bf16/bf16 {GEOMETRY} window",
    f"decode_v2 bf16/bf16 {GEOMETRY} alibi",
    f"decode_v2 bf16/fp8e4nv {GEOMETRY}",
    "prefill bf16/bf16 D256 BS32 G8",
    "decode_v2 fp32/fp32 D128 BS128 G4",
    "prefill fp32/fp32 D128 BS128 G4",
    "write_cache bf16",
    "write_cache fp8e4nv",
    "copy_blocks",
    "rms_norm",
    "rope",
    "silu_mul",
]
"""A cross-section; `python -m kvsim_kernels.compile_check` compiles every variant."""

Usages = dict[str, dict[str, object]]

PROGRAM = """
import dataclasses, json, sys
from kvsim_kernels import compile_check
wanted = json.loads(sys.argv[1])
made = [compile_check.compile_variant(v) for v in compile_check.variants() if v.name in wanted]
print(json.dumps([dataclasses.asdict(usage) | {"fits": usage.fits()} for usage in made]))
"""


@pytest.fixture(scope="module")
def usages(tmp_path_factory: pytest.TempPathFactory) -> Usages:
    """What the compiler made of the checked variants, from a process that does not interpret."""
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(KERNELS)
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(CHECKED)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {usage["name"]: usage for usage in json.loads(done.stdout)}


@long
@whole
def test_every_checked_variant_exists(usages: Usages) -> None:
    assert sorted(usages) == sorted(CHECKED)


@long
@whole
@pytest.mark.parametrize("name", CHECKED)
def test_nothing_spills(usages: Usages, name: str) -> None:
    assert usages[name]["fits"], usages[name]


@long
@whole
@pytest.mark.parametrize("name", [n for n in CHECKED if "bf16/" in n and "reduce" not in n])
def test_dots_use_the_tensor_cores(usages: Usages, name: str) -> None:
    instruction = "hgmma" if name.startswith("prefill") else "hmma"
    assert usages[name][instruction] > 0, usages[name]


@long
@whole
@pytest.mark.parametrize("name", [n for n in CHECKED if "bf16/" in n and "reduce" not in n])
def test_loads_of_keys_and_values_run_ahead(usages: Usages, name: str) -> None:
    """A look-up in the block table that takes part in the pipeline leaves them one buffer."""
    assert usages[name]["buffers"] >= 2, usages[name]


def test_a_spill_or_an_excess_does_not_fit() -> None:
    usage = compile_check.Usage("k", 255, 1024, 0, 0, 0, 0)
    assert usage.fits()
    for excess in (
        {"stack_bytes": 8},
        {"local_instructions": 1},
        {"registers": 256},
        {"shared_bytes": 232_449},
    ):
        assert not compile_check.Usage(**{**vars(usage), **excess}).fits()


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are interpreted only without a GPU")
def test_an_interpreting_process_refuses_to_compile() -> None:
    assert triton_attend.INTERPRETED
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_check.compile_variant(next(compile_check.variants()))
    assert not torch.cuda.is_available()
