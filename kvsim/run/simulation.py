"""One run: trace → requests → replica → result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.core.collector import collector_paused
from kvsim.errors import ConfigError
from kvsim.run.assembly import Parts, assemble
from kvsim.run.assumed import one_of_several, unheeded_wishes
from kvsim.run.blame import blaming
from kvsim.run.offload import role_of
from kvsim.settings.config import RunConfig, load_config, make_config
from kvsim.settings.limits import check_run
from kvsim.workload import open_trace
from kvsim.workload.trace import Row, Trace, column

if TYPE_CHECKING:
    from kvsim.run.result import Outcome, Result
    from kvsim.run.watchers import Watcher

Progress = Callable[[int], None]
Settings = RunConfig | Mapping[str, Any] | str | Path | None


@collector_paused()
def simulate(
    trace: Trace | str | Path | None,
    config: Settings = None,
    *,
    progress: Progress | None = None,
    watcher: Watcher | None = None,
    command: str = "",
    parts_of: Callable[[RunConfig], Parts] = assemble,
) -> Result:
    """Replay a trace under a configuration.

    `trace`: a path, an opened trace, or None for the `workload` of the settings. `config`: settings
    as a table, a path of a TOML file, or None for the defaults. `progress` is called with the
    number of requests that have just ended, `watcher` with every step.
    `parts_of` turns the settings into the objects of a run, for those who exchange one of them.

    With `on_engine_error = "reject"`, a run that ends in an engine error starts again with the
    request at fault refused at arrival, as often as it takes: what the engine decides is never
    patched in the middle.

    Raises `TraceError` and `ConfigError`, and a `PolicyError` for what a policy of your own
    raises; what goes wrong inside the simulated engine is an outcome in `Result.meta["outcome"]`,
    not an exception.
    """
    config = read_config(config)
    if role_of(config):
        raise ConfigError(
            "kv_role: one engine is half of a prefill/decode split; give both sides, as in"
            " --prefill-replicas 1 --decode-replicas 1"
        )
    trace = opened(trace, config)
    rows = trace.rows[: config.num_prompts]
    errors: list[Outcome] = []
    # With SimPy and numpy, which take the longest to import.
    from kvsim.core.loop import Listeners
    from kvsim.run.attempt import Attempt

    with blaming(config):
        while True:
            parts = assembled(config, rows, parts_of)
            refused = {error.request: error.kind for error in errors}
            run = Attempt(trace, rows, parts, refused, Listeners(watcher, progress))
            outcome = run.play()
            # Without a request to blame, or if it was refused already, another attempt would end
            # alike.
            if config.on_engine_error == "stop" or outcome.request in ("", *refused):
                break
            errors.append(outcome)
        result = run.result(trace, outcome, errors, command)
        result.meta["notes"] += one_of_several(config)
    return result


def read_config(config: Settings) -> RunConfig:
    """The settings, from any form in which `simulate` takes them. Raises `ConfigError`."""
    if isinstance(config, RunConfig):
        return config
    if config is None or isinstance(config, Mapping):
        return make_config(config or {})
    return load_config(str(config))


def opened(trace: Trace | str | Path | None, config: RunConfig) -> Trace:
    """The trace, from any form in which `simulate` takes it. Raises `TraceError`."""
    if trace is None:
        from kvsim.workload.spec import trace_of

        return trace_of(config)
    return trace if isinstance(trace, Trace) else open_trace(str(trace))


def to_repeat(meta: Mapping[str, Any], where: str) -> tuple[Trace, RunConfig]:
    """The requests and the settings of a run, by its provenance, to run it again. Raises
    `ConfigError`, which `where` opens, if its trace is another one by now."""
    from kvsim.results.plain import numeric

    config, named = make_config(numeric(meta["config"])), meta["trace"]
    trace = None if config.workload is None else opened(None, config)
    if trace is None or trace.sha256 != named["sha256"]:  # A trace counts more than a workload.
        trace = open_trace(named["path"], named["format"])
    if trace.sha256 != named["sha256"]:
        raise ConfigError(f"{where}: its trace {named['path']} has changed since; run it again")
    return trace, config


def assembled(
    config: RunConfig,
    rows: Sequence[Row],
    parts_of: Callable[[RunConfig], Parts] = assemble,
) -> Parts:
    """The objects that settings stand for, to serve these rows.

    Raises `ConfigError`, also for a run that would be too long.
    """
    given_up = column(rows, "abort_after_ns").count(None) < len(rows)
    parts = parts_of(config)
    goes_on = given_up and not parts.scheduler.ends_early
    unheeded = unheeded_wishes(column(rows, "lora"), config, goes_on)
    if unheeded:
        parts = parts._replace(notes=(*parts.notes, *unheeded))
    if parts.speculation is not None:
        parts.speculation.learn(rows)
    check_run(len(rows), _least_steps(rows, parts))
    return parts


def _least_steps(rows: Sequence[Row], parts: Parts) -> int:
    """Steps that the outputs take, each step one token of as many sequences as may run, or with
    drafts as many tokens as can be accepted."""
    outputs: Sequence[int] = column(rows, "output_length")
    full = sum(outputs) * parts.config.n // max(parts.scheduler.max_num_seqs, 1)
    spec = parts.speculation
    return max(full, max(outputs, default=0)) // (
        1 if spec is None else 1 + spec.proposer.num_spec_tokens
    )
