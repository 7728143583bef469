"""Counts what becomes of published commands, logs and models, and writes the table into the page.

    python docs/site/door.py FOLDER               # FOLDER has commands/, logs/, models/published/
    python docs/site/door.py FOLDER --counts      # print the counts of the kvsim that is imported
    python docs/site/door.py FOLDER --refused     # print every refusal

Counts of an earlier version are those that `--counts` prints with its sources on `PYTHONPATH`.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvsim.errors import ConfigError
from kvsim.machine.models import load_model
from kvsim.settings.server import server_settings

PAGE = Path(__file__).resolve().parents[1] / "results" / "published-setups.md"
START, END = "<!-- counts -->\n", "<!-- end of counts -->\n"
BEFORE = {
    "commands: used": 6,
    "commands: refused, a placeholder or a shell variable": 0,
    "commands: refused, not simulated": 0,
    "commands: refused, the model is not known": 28,
    "commands: refused otherwise": 264,
    "logs: pool and model read": 2,
    "logs: refused, the model is not known": 4,
    "logs: refused otherwise": 2,
    "models: read, parameters within 1 %": 17,
    "models: read, parameters off": 4,
    "models: read, nobody states the parameters": 1,
    "models: refused": 21,
}
"""Counts of d3ff3e1, before command lines that were folded could be read."""
REASONS = {
    "a placeholder or a shell variable": r"placeholder|shell variable",
    "not simulated": r"is not simulated",
    "the model is not known": r"no model named|names no model",
}


def main() -> None:
    folder = Path(sys.argv[1])
    found = [*commands(folder), *logs(folder), *models(folder)]
    counts = Counter(kind for kind, _ in found)
    if "--refused" in sys.argv:
        lines = [f"{kind}: {line}\n" for kind, line in found if "refused" in kind]
        sys.stdout.write("".join(lines))
    elif "--counts" in sys.argv:
        sys.stdout.write(json.dumps({key: counts[key] for key in BEFORE}, indent=4) + "\n")
    else:
        page = PAGE.read_text()
        head, rest = page.split(START)
        PAGE.write_text(head + START + table(counts) + END + rest.split(END)[1])


def commands(folder: Path) -> Iterator[tuple[str, str]]:
    """What becomes of each command line, and the refusal."""
    for line in (folder / "commands" / "published.jsonl").read_text().splitlines():
        command = json.loads(line)["command"]
        try:
            word = server_settings(vllm=command)
            load_model(str(word.settings.get("model")))
        except ConfigError as error:
            yield f"commands: refused{reason(str(error))}", str(error)
        else:
            yield "commands: used", ""


def logs(folder: Path) -> Iterator[tuple[str, str]]:
    """What becomes of each start-up log alone, with no flag beside it."""
    for path in sorted((folder / "logs").glob("*.log")):
        try:
            word = server_settings(startup_log=str(path))
            model = word.settings.get("model")
            if model is None:
                raise ConfigError(f"{path}: names no model")
            load_model(str(model))
        except ConfigError as error:
            yield f"logs: refused{reason(str(error))}", str(error)
        else:
            yield "logs: pool and model read", ""


def models(folder: Path) -> Iterator[tuple[str, str]]:
    """What becomes of each published `config.json`."""
    stated = json.loads((folder / "models" / "published" / "parameters.json").read_text())
    for path in sorted((folder / "models" / "published").glob("*/config.json")):
        try:
            parameters = load_model(str(path)).parameters
        except ConfigError as error:
            yield "models: refused", str(error)
            continue
        truth = stated.get(path.parent.name)
        if truth is None:
            yield "models: read, nobody states the parameters", ""
        else:
            near = abs(parameters / truth - 1) <= 0.01
            yield f"models: read, parameters {'within 1 %' if near else 'off'}", ""


def reason(error: str) -> str:
    """Why something is refused, in words of `BEFORE`."""
    for words, pattern in REASONS.items():
        if re.search(pattern, error):
            return f", {words}"
    return " otherwise"


def table(counts: Counter[str]) -> str:
    """The counts before and now."""
    rows = (f"| {key} | {before} | {counts[key]} |\n" for key, before in BEFORE.items())
    return "| | before | now |\n|---|---:|---:|\n" + "".join(rows)


if __name__ == "__main__":
    main()
