"""The simulated engine as a server."""

from __future__ import annotations

from msgspec.structs import asdict
from typer import Option

from kvsim.cli.commands import command_line, note, tell_written
from kvsim.cli.options import Bundle, ConfigFile, OutDir, takes_bundles
from kvsim.cli.settings import Settings
from kvsim.errors import ConfigError


class Front(Bundle):
    """Where the server is, and as what."""

    host: str | None = Option(
        None, metavar="ADDRESS", help="Address to listen at. Default: 127.0.0.1."
    )
    port: int | None = Option(
        None, min=0, max=65535, metavar="N", help="Port. Default: 8000; 0: any free one."
    )
    served_model_name: str | None = Option(
        None, metavar="NAME", help="Name of the model, for clients."
    )


class Pace(Bundle):
    """How simulated time passes."""

    speed: float = Option(1.0, metavar="X", help="Simulated seconds in a second of the wall clock.")
    as_fast_as_possible: bool = Option(
        False, "--as-fast-as-possible", help="Answer at once, with simulated times."
    )
    hold: int = Option(0, min=0, metavar="N", help="Begin when N requests have come.")

    def check(self) -> None:
        """Raises `ConfigError` if no time could pass."""
        if not self.speed > 0:
            raise ConfigError(
                f"--speed: {self.speed} is not above 0; or give --as-fast-as-possible"
            )
        if self.hold and not self.as_fast_as_possible:
            raise ConfigError("--hold: the wall clock waits for nobody; give --as-fast-as-possible")


class Answers(Bundle):
    """What clients and routers are told."""

    stream_interval: int | None = Option(
        None, min=1, metavar="N", help="Tokens from one event of a stream to the next."
    )
    lora_modules: list[str] | None = Option(
        None, metavar="NAME=PATH", help="An adapter that clients may ask for; may be repeated."
    )
    mean_output_tokens: float = Option(
        256.0,
        min=1,
        metavar="N",
        help="Mean length of answers without ignore_eos; inf: all of max_tokens.",
    )
    kv_events_config: str | None = Option(
        None, metavar="JSON", help="As of vllm serve: publish KV events."
    )


@takes_bundles
def serve(
    *,
    config: ConfigFile = None,
    front: Front,
    pace: Pace,
    answers: Answers,
    out: OutDir = None,
    settings: Settings,
) -> None:
    """Serve vLLM's HTTP interface, metrics and KV events from the simulated engine."""
    import asyncio
    from math import inf

    try:
        from uvicorn.loops.auto import auto_loop_factory

        from kvsim.against.serve.server import Server, listen
    except ImportError as error:
        raise ConfigError(f"serve: {error}; pip install 'kvsim[serve]'") from None
    from kvsim.against.serve.kv_events import events_config
    from kvsim.against.serve.session import Options, Session, adapters_of, said_in
    from kvsim.run.blame import blaming
    from kvsim.settings.server.command import arguments

    pace.check()
    command = arguments(settings.vllm, settings.vllm_file)
    said = said_in(command, **asdict(front), **asdict(answers))
    loaded, events = settings.load(config), said.kv_events_config
    options = Options(
        speed=inf if pace.as_fast_as_possible else pace.speed,
        hold=pace.hold,
        mean_output_tokens=answers.mean_output_tokens,
        stream_interval=said.stream_interval or 1,
        adapters=adapters_of(said.lora_modules),
        kv_events=None if events is None else events_config(events),
    )
    with blaming(loaded):
        session = Session(loaded, records=out is not None)
        model = said.name or session.parts.model.name
        note(*session.parts.notes)
        address = said.host or "127.0.0.1"
        port = (said.port or 8000) if front.port is None else front.port
        with listen(address, port) as listening:
            made = Server(session, model, options)
            where = f"http://{address}:{listening.getsockname()[1]}"
            told = f"serving {model} at {where}/v1"
            with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
                runner.run(made.run(listening, lambda: print(told, flush=True)))
        for line in made.clock.report():
            print(line)
        if out is not None:
            from kvsim.cli.folders import write_run
            from kvsim.report import PAGE

            write_run(session.result(command_line()), out, page=True)
            tell_written(out, PAGE)
