"""Measures runs of workloads: in this process, as a whole command, part by part, and by a peer.

What is measured runs in processes of its own, without shared memory or warm caches. CPU time is
user and system time of a process as Unix accounts for it, never wall-clock time. Measurements are
repeated in turns; their least counts, because disturbances only ever increase it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from compileall import compile_dir
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvsim.against.bench_workloads import WORKLOADS, Case, Workload
from kvsim.errors import ConfigError, check_choice
from kvsim.version import __version__
from kvsim.workload import open_trace

if TYPE_CHECKING:
    from kvsim.run.result import Result


try:
    import resource
except ImportError:  # Windows
    raise ConfigError(
        "bench: Windows does not report the CPU time of a process this way; use WSL, Linux or macOS"
    ) from None

T = TypeVar("T")


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload."""

    cpu_s: float
    """CPU time to read the file of requests and to simulate them, with the step log and the
    figures of every request, where modules and prices are loaded."""
    requests: int
    steps: int
    """Steps that compute something; `seq_steps` is the sum of their decodes."""
    seq_steps: int
    preemptions: int
    rss_mb: float
    """Peak memory of the process."""


def measure(case: Case, path: str) -> Measurement:
    """Run a case once on a file of `write_requests`.

    For comparable memory, call it in a fresh process. Raises `ConfigError` for settings that do not
    go together, and for a run that does not come to its end.
    """
    workload, settings = WORKLOADS[case.workload], case.table
    _run(workload, "chat", settings | {"num_prompts": 1})  # Loads modules and prices.
    start = cpu_s()
    engines = _run(workload, path, settings)
    spent, peak_mb = cpu_s() - start, peak_rss_mb()
    for engine in engines:
        if (end := engine.meta["outcome"]["kind"]) != "finished":
            raise ConfigError(f"bench: {case}: the run ended as {end}, so its time says nothing")
    steps = [engine.steps for engine in engines]
    return Measurement(
        cpu_s=spent,
        requests=sum(len(engine.requests["id"]) for engine in engines),
        steps=sum(int((each["prefill_seqs"] + each["decode_seqs"] > 0).sum()) for each in steps),
        seq_steps=sum(int(each["decode_seqs"].sum()) for each in steps),
        preemptions=sum(int(engine.requests["num_preemptions"].sum()) for engine in engines),
        rss_mb=peak_mb,
    )


def _run(workload: Workload, path: str, settings: dict[str, Any]) -> Sequence[Result]:
    """The result of each engine of a workload."""
    if workload.router:
        from kvsim.fleet import simulate_fleet

        configs = [settings] * workload.replicas
        return simulate_fleet(open_trace(path), configs, workload.router).replicas
    from kvsim.run.simulation import simulate

    return [simulate(open_trace(path), settings)]


Parts = dict[str, float]
"""Part → CPU seconds, in the order in which the parts happen."""


def around(case: Case, trace: str | None = None) -> Parts:
    """The parts of `kvsim run --out` of a case; call it in a fresh process.

    Each part includes the libraries that it is the first to load.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.jsonl")
        in_fresh_process(write_requests, case.workload, trace, path)
        command = (sys.executable, "-m", "kvsim", "--help")
        start_s = min(spent(*command)[0].cpu_s for _ in range(3))
        return {"start: kvsim --help": start_s} | _parts(case.table, path, folder)


def _parts(settings: dict[str, object], path: str, folder: str) -> Parts:
    marks = [("", cpu_s())]
    opened = open_trace(path)
    marks.append(("trace: read and check", cpu_s()))
    from kvsim.run.simulation import simulate

    marks.append(("simulate: imports", cpu_s()))
    result = simulate(opened, settings)
    marks.append(("simulate", cpu_s()))
    summary = result.summary
    marks.append(("summary", cpu_s()))
    from kvsim.report.files import write_results

    write_results(Path(folder) / "out", summary, result.requests, result.steps)
    marks.append(("files", cpu_s()))
    from kvsim.report.pages.run import build_page

    build_page(summary, result.requests, result.steps)
    marks.append(("page", cpu_s()))
    return {name: now - last for (_, last), (name, now) in pairwise(marks)}


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole process took, start and imports included."""

    cpu_s: float
    rss_mb: float


def store_bytecode(folder: Path) -> None:
    """Compile the modules in a folder, as pip does when it installs them.

    Otherwise processes would compile them again and again where `PYTHONDONTWRITEBYTECODE` is set.
    """
    compile_dir(folder, quiet=2)


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """The result of a function in a fresh process; its exceptions are raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def spent(*command: str) -> tuple[Whole, str]:
    """What a command took, and what it wrote; call it in a fresh process for its memory.

    Raises `subprocess.CalledProcessError`.
    """
    before_s = cpu_s(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    spent_s = cpu_s(resource.RUSAGE_CHILDREN) - before_s
    took = Whole(cpu_s=spent_s, rss_mb=peak_rss_mb(resource.RUSAGE_CHILDREN))
    return took, done.stdout


def kvsim_run(case: Case, path: str) -> Whole:
    """What `kvsim run --out` of a case takes, with its requests in a file of `write_requests`."""
    from kvsim.results.plain import flat

    settings = []
    for key, value in flat(case.table).items():
        settings += ["--set", f"{key}={msgspec.json.encode(value).decode()}"]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out")
        command = ("run", "--trace", path, "--out", out)
        return spent(sys.executable, "-m", "kvsim", *command, *settings)[0]


def write_requests(workload: str, trace: str | None, path: str) -> None:
    """Write the requests of a workload as Mooncake rows of 512-token ids; natively if these cannot
    hold what the requests say."""
    from kvsim.workload import convert

    made = WORKLOADS[workload].make(trace)
    convert(made, path, "native" if any(row.lora for row in made.rows) else "mooncake")


PEER = "aisimulate"
"""Another simulator, AISimulate. It reads the trace within its replay, too, and keeps figures of
all requests together only."""
_MODULE, _PACKAGE = "dynamo._core", "ai-dynamo-runtime==1.6.1"
"""What has to be importable, and what brings it."""
_REPLAY = """\
import json, sys, time
from dynamo import _core

path, arguments, block_size = sys.argv[1:]
engine = {"engine": json.loads(arguments)}
options = {"trace_block_size": int(block_size), "capture_per_request": False}
start = time.process_time()
_core.run_mocker_trace_replay([path], extra_engine_args=engine, **options)
print(f"\\n{time.process_time() - start}", end="")
"""
"""What a Python that has it runs, given a Mooncake file, the arguments of the engine in JSON and
the tokens of a block; it writes the CPU seconds of the replay."""

_LIMITS = ("block_size", "max_num_seqs", "max_num_batched_tokens")


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One run of another simulator."""

    core_s: float
    """CPU time of its replay, reading the trace included."""
    whole: Whole


def check_peer(name: str, python: str) -> None:
    """Raise `ConfigError` unless a Python can run this peer."""
    check_choice("--peer", name, [PEER])
    try:
        subprocess.run([python, "-c", f"import {_MODULE}"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(
            f"--peer {name}: {python} cannot import {_MODULE}; give --peer-python PATH, a"
            f" Python after `pip install {_PACKAGE}`"
        ) from None


def measure_peer(name: str, python: str, case: Case, path: str) -> Peer:
    """One run of a peer with the limits of a case and its prefix cache on.

    `path`: the requests, as `write_requests` writes them. Call it in a fresh process.
    """
    from kvsim.workload.formats.mooncake import DEFAULT_BLOCK_SIZE

    settings = case.table
    engine = {
        **{key: settings[key] for key in _LIMITS},
        "backend": "sglang" if settings["engine"] == "sglang" else "vllm",
        "num_gpu_blocks": settings["num_gpu_blocks_override"],
        "enable_prefix_caching": True,
    }
    args = (path, json.dumps(engine), str(DEFAULT_BLOCK_SIZE))
    whole, out = spent(python, "-c", _REPLAY, *args)
    return Peer(core_s=float(out.splitlines()[-1]), whole=whole)


def cpu_s(whose: int = resource.RUSAGE_SELF) -> float:
    """User and system time so far, of this process or of its children that have ended."""
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime


def peak_rss_mb(whose: int = resource.RUSAGE_SELF) -> float:
    """The most memory that this process has held, or one of its children that have ended."""
    peak = resource.getrusage(whose).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one case, once for each repeat."""

    workload: str
    settings: str
    runs: list[Measurement]
    whole: list[Whole] = []
    """Measurements of `kvsim run --out`, if there are any."""
    peer: list[Peer] = []

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(self.workload, self.settings)

    @property
    def cpu_s(self) -> float:
        """The least CPU time of a run; `whole_s` of the whole command, and those of the peer."""
        return min(each.cpu_s for each in self.runs)

    @property
    def whole_s(self) -> float:
        return min(each.cpu_s for each in self.whole)

    @property
    def peer_s(self) -> float:
        return min(each.core_s for each in self.peer)

    @property
    def peer_whole_s(self) -> float:
        return min(each.whole.cpu_s for each in self.peer)


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements on one machine."""

    kvsim_version: str
    python: str
    machine: str
    load_average: float | None
    """Load average of the last minute at the start."""
    peer: str | None
    rows: list[Row]


def run(
    cases: Iterable[Case],
    repeats: int,
    trace: str | None,
    done: Callable[[Case], None],
    peer: tuple[str, str] | None = None,
) -> Bench:
    """Measure all cases in turns, `repeats` times; `done` is called after each measurement.

    `peer`: the name of another simulator, and the Python that runs it.
    """
    rows = [Row(workload=case.workload, settings=case.settings, runs=[]) for case in cases]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with tempfile.TemporaryDirectory() as folder:
        paths = {row.workload: str(Path(folder) / f"{row.workload}.jsonl") for row in rows}
        for workload, path in paths.items():
            in_fresh_process(write_requests, workload, trace, path)
        for row in rows * repeats:
            _measure(row, paths[row.workload], peer)
            done(row.case)
    return Bench(
        kvsim_version=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        load_average=load,
        peer=None if peer is None else peer[0],
        rows=rows,
    )


def _measure(row: Row, path: str, peer: tuple[str, str] | None) -> None:
    """Add one measurement of each kind to a row."""
    row.runs.append(in_fresh_process(measure, row.case, path))
    if WORKLOADS[row.workload].replicas > 1:
        return
    if WORKLOADS[row.workload].whole or peer is not None:
        row.whole.append(in_fresh_process(kvsim_run, row.case, path))
    if peer is not None:
        row.peer.append(in_fresh_process(measure_peer, *peer, row.case, path))


def over_base(bench: Bench) -> dict[Case, float]:
    """CPU time of each case over that of its `Case.base`, in `bench` as well: a feature's and a
    policy's per step, a fleet's per request."""
    rows = {row.case: row for row in bench.rows}
    found = {}
    for case, row in rows.items():
        if case.base in rows:
            base = rows[case.base]
            is_fleet = WORKLOADS[case.workload].replicas > 1
            found[case] = _share_s(row, is_fleet) / _share_s(base, is_fleet)
    return found


def _share_s(row: Row, is_fleet: bool) -> float:
    """CPU time of a request in a fleet, of a step elsewhere."""
    one = row.runs[0]
    return row.cpu_s / (one.requests if is_fleet else one.steps)


def to_json(bench: Bench) -> str:
    """The text that `load` reads."""
    return msgspec.json.format(msgspec.json.encode(bench), indent=1).decode() + "\n"


def load(path: str) -> Bench:
    """The bench that `kvsim bench --json` printed. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Bench)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        text = str(error)
        raise ConfigError(
            f"{path}: {text[:1].lower()}{text[1:]}; give what `kvsim bench --json` printed"
        ) from None


def ratios(now: Bench, then: Bench) -> dict[Case, float]:
    """CPU time of each case in both benches: the least of now over the least of then."""
    before = {row.case: row.cpu_s for row in then.rows if row.runs}
    return {row.case: row.cpu_s / before[row.case] for row in now.rows if row.case in before}


Column = tuple[str, Callable[[Row], str]]


def columns_of(bench: Bench) -> Iterator[tuple[list[Row], list[Column]]]:
    """Each table: its rows, where there is something to show, and its columns."""
    over, peer = over_base(bench), bench.peer or ""
    yield (
        bench.rows,
        [
            ("CPU s", lambda row: f"{row.cpu_s:.3f}"),
            ("median", lambda row: f"{median(m.cpu_s for m in row.runs):.3f}"),
            ("us/req", lambda row: f"{row.cpu_s * 1e6 / row.runs[0].requests:,.1f}"),
            ("us/step", lambda row: f"{row.cpu_s * 1e6 / row.runs[0].steps:,.2f}"),
            ("ns/seq", lambda row: f"{row.cpu_s * 1e9 / max(row.runs[0].seq_steps, 1):,.0f}"),
            ("over base", lambda row: f"{over[row.case]:.2f}" if row.case in over else "-"),
            ("requests", lambda row: f"{row.runs[0].requests:,}"),
            ("steps", lambda row: f"{row.runs[0].steps:,}"),
            ("preemptions", lambda row: f"{row.runs[0].preemptions:,}"),
            ("MB", lambda row: f"{min(m.rss_mb for m in row.runs):,.0f}"),
        ],
    )
    yield (
        [row for row in bench.rows if row.peer],
        [
            ("CPU s", lambda row: f"{row.cpu_s:.3f}"),
            (peer, lambda row: f"{row.peer_s:.3f}"),
            ("ratio", lambda row: f"{row.cpu_s / row.peer_s:.2f}"),
            ("whole CPU s", lambda row: f"{row.whole_s:.3f}"),
            (peer, lambda row: f"{row.peer_whole_s:.3f}"),
            ("ratio", lambda row: f"{row.whole_s / row.peer_whole_s:.2f}"),
        ],
    )
    yield (
        [row for row in bench.rows if row.whole],
        [
            ("kvsim run --out: CPU s", lambda row: f"{row.whole_s:.3f}"),
            ("median", lambda row: f"{median(w.cpu_s for w in row.whole):.3f}"),
            ("MB", lambda row: f"{min(w.rss_mb for w in row.whole):,.0f}"),
        ],
    )
