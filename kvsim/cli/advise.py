"""`advise`: the settings to change, how sure that is, and the command line to paste."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from kvsim.cli.console import progress_bar, tell_written
from kvsim.cli.options import (
    AsJson,
    ConfigFile,
    Jobs,
    Objectives,
    OutDir,
    TraceForm,
    note_arrivals,
    takes_bundles,
)
from kvsim.cli.server import ServerOptions, SettingOptions
from kvsim.report.screen import make_console, make_table

if TYPE_CHECKING:
    from kvsim.search.advise import Advice

Seeds = Annotated[
    int, Option(min=2, metavar="N", help="Up to N seeds; stops when a verdict is settled.")
]
STYLES = {"better": "green", "worse": "red"}


@takes_bundles
def advise(
    *,
    trace: Annotated[
        str, Argument(metavar="TRACE", help="As for `kvsim run --trace`, such as chat.")
    ],
    slo: Objectives,
    config: ConfigFile = None,
    seeds: Seeds = 8,
    jobs: Jobs = None,
    out: OutDir = None,
    as_json: AsJson = False,
    form: TraceForm,
    server: ServerOptions,
    settings: SettingOptions,
) -> None:
    """Try the settings that matter, and say which to change for these objectives.

    Every change meets the same seeds. Prints what limits the server now, three sentences, a table
    with intervals, and the command line of the server.
    """
    from kvsim.search.advice import (
        NAME,
        PAGE,
        build_page,
        cache_sentences,
        present,
        record,
        sentences,
        serve_command,
    )
    from kvsim.search.advise import MOST_COMBINED, changes_of
    from kvsim.search.advise import advise as search
    from kvsim.search.replicates import How, load_of
    from kvsim.search.slo import parse_slo
    from kvsim.settings.server.command import arguments
    from kvsim.writing import json_text, write_together

    objectives = parse_slo(slo)
    word = server.word()
    loaded = settings.load(config, word)
    opened = form.open(trace)
    note_arrivals(opened, [loaded])
    load = load_of(opened, [("", loaded)])
    changes = changes_of(loaded)
    most = (1 + len(changes.tried) + MOST_COMBINED) * seeds
    with progress_bar("trying settings", most) as progress:
        advice = search(
            load, loaded, objectives, changes, seeds=seeds, how=How(jobs=jobs, progress=progress)
        )
    line = serve_command(advice, word, arguments(server.vllm, server.vllm_file))
    cache = cache_sentences(opened, advice.best.config)
    now = present(advice)
    said = [remark.text for remark in now]
    found = json_text({"diagnosis": said, **record(advice, line), "cache": cache})
    if as_json:
        print(found, end="")
    else:
        _show(advice, [*said, *sentences(advice), *cache], line)
    if out is not None:
        write_together(out, {PAGE: build_page(advice, opened, now, cache, line), NAME: found})
        tell_written(out, PAGE)


def _show(advice: Advice, said: list[str], line: str) -> None:
    from kvsim.report.certainty import few_seeds
    from kvsim.search.advice import method, not_tried, rows

    console = make_console()
    for sentence in said:
        console.print(sentence)
    difference = f"{advice.decides.metric.label}: difference"
    table = make_table("setting", difference, "", texts=3)
    for row in rows(advice):
        table.add_row(*row, style=STYLES.get(row.finding, ""))
    console.print(table)
    few = few_seeds(advice.planned) if advice.redrawn else []
    for text in (method(advice), *few, *not_tried(advice)):
        console.print(text, style="dim")
    console.print(f"\n{line}", soft_wrap=True)
