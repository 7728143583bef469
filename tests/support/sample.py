"""Draws the sample of recorded logs that ships in `tests/data`.

    python tests/support/sample.py

Of each engine, each family of features and each group of releases of vLLM V1, and each policy of a
router, it takes the cases that show the most per packed byte until everything has been shown once.
Small cases show the most, and many rules matter only where many requests compete, so the rest of
the share is filled by chance. What a case shows is read from its settings and its log, not from
what kvsim does with it: equal recordings give an equal sample.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from places import DATA
from shared import SHARED

from kvsim.against.conform.cases import files_in, read_cases, read_router_runs, stem
from kvsim.against.conform.routers import REPLAYS
from kvsim.against.conform.step_log import error_kind

CORPUS = SHARED / "conformance"
LEAST = 12
SHARE_BYTES, ENGINES_SHARE_BYTES = 36_000, 130_000
"""Packed bytes for each kind of case, where `LEAST` cases do not need more; of whole engines."""
MOST_REQUESTS = 1000
"""Longer cases are not looked at."""

Row = dict[str, Any]

RECORDED = {
    "nano-vllm": ("cases", "fuzz/nano[.-]*"),
    "nano-vllm-2025-08": ("cases", "fuzz/nano_aug2025*"),
    "sglang": ("sglang/cases", "sglang/fuzz/*.gz"),
    "vllm-0.3.3": ("vllm-0.3.3/cases", "vllm-0.3.3/fuzz*.gz"),
    "vllm-0.6.3": ("cases", "fuzz/v063*"),
    "vllm-v1": ("cases", "fuzz/v1*"),
}
"""Engine → its folder of made cases, and its files of random ones."""
SILENT = {
    *("note", "trace_from", "trace_sha256", "vllm", "v1", "nano", "max_steps", "arrival"),
    *("prompt_token_ids", "output_len", "id", "t", "step", "time", "q", "bt", "kv", "state"),
    *("ratio", "prompt", "text", "body", "chosen", "cost", "workers", "alive", "qps", "error"),
}
"""Keys of settings, requests and records that do not say which rule decides."""


class Candidate(NamedTuple):
    """A case that may be drawn."""

    line: str
    packed_bytes: int
    unlike: set[str]
    """Releases that decide otherwise."""
    shown: set[str]
    """Settings, events, and what happens to a request after what."""


def candidate(row: Row, unlike: Collection[str] = ()) -> Candidate:
    """A case as it may be drawn."""
    line = json.dumps(row, separators=(",", ":")) + "\n"
    settings = set(_settings(row.get("config") or row["header"]["config"]))
    for each in row.get("trace", []):
        settings |= {f"request with {key}" for key in each.keys() - SILENT if each[key]}
    log = row.get("steps") or row["records"]
    events = set[str]().union(*map(_events, log))
    packed_bytes = len(zlib.compress(line.encode(), 9))
    return Candidate(line, packed_bytes, set(unlike), settings | events | set(_stories(log)))


def _settings(config: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for key, value in config.items():
        name = f"{inside}{key}"
        if key in SILENT:
            continue
        if isinstance(value, Mapping):
            yield from _settings(value, f"{name}.")
        elif isinstance(value, list):
            yield f"{name}: {len(value)}"
            for each in value:
                yield from _settings(each, f"{name}.") if isinstance(each, dict) else ()
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{name}: {value.bit_length()} bits"
        else:
            yield f"{name}={bool(value) if isinstance(value, float) else value}"


def _events(record: Row) -> set[str]:
    """What a record says that happened: what is not empty, what is 0, words, kinds of entries."""
    found = {f"ends by {kind}"} if (kind := error_kind(record)) else set()
    for key, value in record.items():
        if key in SILENT:
            continue
        if isinstance(value, list) and value:
            found.add(f"{key} of {'several' if len(value) > 1 else 'one'}")
            found |= {f"{key}: {_kind(each)}" for each in value if isinstance(each, list)}
        elif isinstance(value, str):
            found.add(f"{key}={value}")
        elif isinstance(value, (bool, int, float)) or value is None:
            found.add(f"{key}: {'some' if value else 'none'}")
    return found


def _kind(entry: list[Any]) -> str:
    return " ".join(str(int(bool(each))) for each in entry if not isinstance(each, str))


def _stories(log: list[Row]) -> Iterator[str]:
    """What happens to a request right after what."""
    last: dict[str, str] = {}
    for record in log:
        happened = [(record["op"], record["id"])] if "op" in record and "id" in record else []
        for key, value in record.items():
            for each in value if isinstance(value, list) else ():
                happened.append((key, each[0] if isinstance(each, list) and each else each))
        for what, request in happened:
            if isinstance(request, str):
                yield f"{what} after {last.get(request, 'nothing')}"
                last[request] = what


def draw(name: str, candidates: list[Candidate]) -> list[Candidate]:
    """Fills the share of a kind: with what tells a release from others and with what shows the
    most, up to a half of it, then with cases by chance, seeded by `name`."""
    share = ENGINES_SHARE_BYTES if name in RECORDED else SHARE_BYTES
    left = sorted(candidates, key=lambda each: (each.packed_bytes, each.line))
    drawn: list[Candidate] = []

    def take(each: Candidate, most_bytes: int) -> bool:
        fits = each.packed_bytes <= most_bytes - sum(one.packed_bytes for one in drawn)
        if fits or len(drawn) < LEAST:
            drawn.append(each)
        return fits

    for what in ("unlike", "shown"):
        have = set[str]().union(*(getattr(each, what) for each in drawn))
        while left:
            best = max(left, key=lambda each: len(getattr(each, what) - have) / each.packed_bytes)
            if getattr(best, what) <= have or not take(best, share // 2):
                break
            left.remove(best)
            have |= getattr(best, what)
    rest = [each for each in left if each not in drawn]
    Random(name).shuffle(rest)
    for each in rest:
        take(each, share)
    return drawn


# -- what there is ---------------------------------------------------------------------------------


def recorded(engine: str, path: Path) -> Iterator[Row]:
    """The cases of a file or folder, as rows that say their engine."""
    for case in read_cases(path, engine):
        if case.recorded is not None and len(case.trace) < MOST_REQUESTS:
            yield {
                "engine": engine,
                "from": f"{path.relative_to(CORPUS)}: {case.name}",
                "config": case.config,
                "trace": case.trace,
                "steps": case.recorded,
            }


def kinds() -> Iterator[tuple[str, list[Candidate]]]:
    """Name in the sample → the cases of one kind. A router has a kind for each policy."""
    for engine, places in RECORDED.items():
        paths = [path for place in places for path in sorted(CORPUS.glob(place))]
        yield engine, [candidate(row) for path in paths for row in recorded(engine, path)]
    yield from features()
    yield from releases()
    for router in REPLAYS:
        policies = defaultdict(list)
        for run in read_router_runs(CORPUS / "routers", router):
            row = {"router": router, "header": run.header, "records": run.records}
            policies[run.header["config"].get("policy")].append(candidate(row))
        for candidates in policies.values():
            yield f"router-{router}", candidates


def features() -> Iterator[tuple[str, list[Candidate]]]:
    """The families of features of vLLM V1. Made cases are named like their family."""
    made = CORPUS / "vllm-v1-features/cases"
    for file in files_in(CORPUS / "vllm-v1-features/fuzz"):
        family = stem(file)
        own = [path for path in sorted(made.iterdir()) if family.startswith(path.name[:2])]
        rows = [row for path in (*own, file) for row in recorded("vllm-v1", path)]
        yield f"vllm-v1-{family}", [candidate(row) for row in rows]


def releases() -> Iterator[tuple[str, list[Candidate]]]:
    """One release of each group of vLLM V1's that decide alike, with what tells it from others."""
    groups: dict[str, list[Row]] = {}
    for file in files_in(CORPUS / "vllm-v1-releases/fuzz"):
        rows = list(recorded("vllm-v1", file))
        if all(any(map(differs, rows, others)) for others in groups.values()):
            groups[stem(file)] = rows
    for release, rows in groups.items():
        candidates = []
        for number, row in enumerate(rows):
            unlike = [each for each, others in groups.items() if differs(row, others[number])]
            candidates.append(candidate(row, unlike))
        yield f"vllm-v1-{release}", candidates


def differs(row: Row, other: Row) -> bool:
    """Whether two releases decide otherwise in cases of the same seed."""
    return bool(row["steps"] != other["steps"])


def sample() -> dict[str, str]:
    """File of the sample → its text."""
    files = defaultdict[str, str](str)
    for name, candidates in kinds():
        files[name] += "".join(each.line for each in draw(name, candidates))
    return files


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for name, text in sample().items():
        (DATA / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
