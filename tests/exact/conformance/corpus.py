"""Recorded cases as tests: which ones run, and what a difference looks like.

`KVSIM_WHOLE=1` runs all of them, and audits the books after every step.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from marks import WHOLE
from shared import SHARED

from kvsim.against.conform.cases import PREFIXES, Case, read_cases, run_case
from kvsim.against.conform.step_log import Record, first_divergence

CORPUS = SHARED / "conformance"
StepLog = Callable[[Record, list[Record]], list[Record]]
MakeCase = Callable[[int], tuple[Record, list[Record]]]
_BIG_BYTES = 200_000
"""Size of a log from which on a case is only run with KVSIM_WHOLE=1, and not audited."""
_AUDIT_EVERY = 1 if WHOLE else 20
"""Steps from one audit to the next. An audit takes three times as long as a step, and what is wrong
in the books stays wrong."""


def recorded_folders(engine: str, path: Path) -> list[Path]:
    """The case folders in `path` that have a log of this engine."""
    logs = sorted(path.glob(f"*/{PREFIXES[engine]}.steps.jsonl*"))
    return [log.parent for log in logs if WHOLE or log.stat().st_size < _BIG_BYTES]


def recorded_case(engine: str, folder: Path) -> Case:
    """The case of a folder."""
    (case,) = read_cases(folder, engine)
    return case


def recorded_lines(engine: str, path: Path, every: int) -> Iterator[Case]:
    """The cases of a file, one of so many."""
    for number, case in enumerate(read_cases(path, engine)):
        if WHOLE or number % every == 0:
            yield case


def check(engine: str, case: Case) -> None:
    """Assert that kvsim writes the recorded log: every record, every field."""
    audit_every = _AUDIT_EVERY if len(case.trace) < 1000 else 0
    log = list(run_case(engine, case.config, case.trace, audit_every))
    assert case.recorded is not None
    assert_equal(case.recorded, log, f"{engine}, {case.name}: recorded | kvsim")


def check_twin(step_log: StepLog, case: Case) -> None:
    """Assert that a twin writes the recorded log."""
    assert case.recorded is not None
    log = step_log(case.config, case.trace)
    assert_equal(case.recorded, log, f"{case.name}: recorded | twin")


def check_random(engine: str, make_case: MakeCase, step_log: StepLog, seeds: Iterable[int]) -> None:
    """Assert that kvsim writes the log of a twin for each seed."""
    for seed in seeds:
        config, trace = make_case(seed)
        log = list(run_case(engine, config, trace, _AUDIT_EVERY))
        assert_equal(step_log(config, trace), log, f"{engine}, seed {seed}: twin | kvsim")


def assert_equal(expected: list[Record], log: list[Record], what: str) -> None:
    """Assert that two logs are the same, and that `log` lacks no field."""
    divergence = first_divergence(expected, log)
    assert divergence is None, f"{what}: {divergence}"
    for one, other in zip(expected, log, strict=True):
        missing = one.keys() - other.keys()
        assert not missing, f"{what}: step {one['step']} lacks {missing}"
