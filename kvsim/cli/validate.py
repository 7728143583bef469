"""`validate`: the same scheduler in front of a real engine and of the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvsim.cli.console import run_module
from kvsim.cli.options import ConfigFile, TraceForm, TracePath, takes_bundles
from kvsim.cli.server import SettingOptions, config_path
from kvsim.errors import ConfigError, check_choice
from kvsim.report.screen import make_console, make_table
from kvsim.settings.config import RunConfig, load_config, read_toml

if TYPE_CHECKING:
    from kvsim.workload.trace import Trace

SETUP, RECORDING = "setup.json", "recording.json"
RESULT, PAGE = "validation.json", "validation.html"

Table = dict[str, Any]


ProfileFile = Annotated[
    str | None, Option("--profile", metavar="FILE", help="What `kvsim calibrate` measured here.")
]
Device = Annotated[str, Option(metavar="cuda|cpu", help="Where the engine runs.")]
Policies = Annotated[
    str, Option(metavar="NAMES", help="Of recompute, swap, prefix-caching, chunked-prefill.")
]
Results = Annotated[str, Option("--out", metavar="DIR", help="Folder of the results.")]
Prepare = Annotated[
    str | None,
    Option("--prepare", metavar="FILE", help="Only write the setup, to measure it elsewhere."),
]
Source = Annotated[
    str | None,
    Option("--from", metavar="FILE", help="Continue from a recording, or draw a result."),
]
Trust = Annotated[
    list[str] | None,
    Option(metavar="MODULE:NAME", help="Code of your own that the file of --from may run."),
]
Page = Annotated[str | None, Option("--html", metavar="FILE", help="The page; default: in --out.")]


@takes_bundles
def validate(
    *,
    trace: TracePath = None,
    profile: ProfileFile = None,
    device: Device = "cuda",
    policies: Policies = "recompute,swap,prefix-caching",
    config: ConfigFile = None,
    form: TraceForm,
    out: Results = "runs/validate",
    prepare: Prepare = None,
    source: Source = None,
    trust: Trust = None,
    html: Page = None,
    settings: SettingOptions,
) -> None:
    """Run the scheduler on a real engine and show how far the profile is off.

    Random weights, a paged pool, real kernels. Errors are shown step by step and request by
    request, beside the difference of two real runs. The pool is really allocated: give
    --num-gpu-blocks-override, few enough that requests are preempted.
    """
    from kvsim.against.validate.setup import foreign, read_json, write_json
    from kvsim.against.validate.setup import prepare as setup_of
    from kvsim.settings.library import find

    if source is not None:
        _go_on(source, trust or (), profile, Path(out), html)
        return
    if trace is None:
        raise ConfigError("validate: give --trace FILE, or --from a recording or a result")
    check_choice("--device", device, ("cuda", "cpu"))
    if profile is None and prepare is None:
        raise ConfigError(
            "validate: give --profile FILE, made with `kvsim calibrate` on this device"
        )
    opened = form.open(trace)
    path = "" if profile is None else str(find("profiles", profile))
    made = read_json(path, "kvsim.profile/1") if path else {}
    loaded = _settings(opened, made, config, settings)
    setup = setup_of(opened, loaded, [name.strip() for name in policies.split(",")])
    if prepare is not None:
        written = write_json(prepare, setup)
        print(f"written to {written}: measure it with python -m kvsim.against.validate")
        return
    assert profile is not None
    written, recording = write_json(Path(out) / SETUP, setup), Path(out) / RECORDING
    arguments = [str(written), "--profile", path, "--device", device, "--out", str(recording)]
    named = foreign(setup)
    run_module("kvsim.against.validate", [*arguments, *(f"--trust={name}" for name in named)])
    _compare(recording, named, profile, Path(out), html)


def _go_on(
    source: str, trust: Sequence[str], profile: str | None, out: Path, html: str | None
) -> None:
    """Continue from a recording to a result, or from a result to its page."""
    from kvsim.against.validate.errors import KEYS, SCHEMA
    from kvsim.against.validate.setup import RECORDED, read_json, require

    table = read_json(source, RECORDED, SCHEMA)
    if table["schema"] == RECORDED:
        if profile is None:
            raise ConfigError(f"{source}: a recording; give --profile FILE to compare it with")
        _compare(Path(source), trust, profile, out, html)
    else:
        require(table, KEYS, source)
        _draw(table, html or str(out / PAGE))


def _settings(trace: Trace, made: Table, config: str | None, settings: SettingOptions) -> RunConfig:
    """The user's settings; missing ones are taken from the profile and fitted to the trace."""
    path, flags = config_path(config), settings.flags.settings
    given = {**(read_toml(path) if path else {}), **flags}
    longest = max(row.input_length + row.output_length for row in trace.rows)
    # The policies that it compares by default are those of this engine.
    defaults: Table = {"engine": "vllm-0.6.3", "max_model_len": longest}
    if made:
        model, engine = made["model"], made["engine"]
        defaults |= {"model": model["name"], "block_size": engine["block_size"]}
        defaults |= {"dtype": model["dtype"], "kv_cache_dtype": model["kv_dtype"]}
    if "num_gpu_blocks_override" not in given:
        raise ConfigError(
            "validate: give --num-gpu-blocks-override: the pool is really allocated, and a"
            " scheduler preempts only if blocks are few"
        )
    defaults["num_cpu_blocks_override"] = given["num_gpu_blocks_override"]
    missing = {key: value for key, value in defaults.items() if key not in given}
    return load_config(path, {**missing, **flags}, settings.assignments or ())


def _compare(
    recording: Path, trust: Sequence[str], profile: str, out: Path, html: str | None
) -> None:
    from kvsim.against.validate.errors import compare, count_rows, error_rows
    from kvsim.against.validate.setup import (
        RECORDED,
        RECORDED_KEYS,
        read_json,
        refuse_foreign,
        require,
        write_json,
    )

    table = read_json(recording, RECORDED)
    require(table, RECORDED_KEYS, recording)
    refuse_foreign(table["setup"], trust, recording)
    result = compare(table, profile)
    written = write_json(out / RESULT, result)
    for title, (head, rows) in (
        ("Error of the model, and in brackets the noise of the machine", error_rows(result)),
        ("Real / real again / simulated", count_rows(result)),
    ):
        make_console().print(make_table(*head, rows=rows, title=title))
    print(f"written to {written}")
    _draw(result, html or str(out / PAGE))


def _draw(result: Table, html: str) -> None:
    from kvsim.against.validate.page import build_page
    from kvsim.writing import write_text

    print(f"open {write_text(html, build_page(result))}")
