"""How the value of a server's argument is read: text of a command line, or a Python value of a log.

Each function returns the setting's value, or None where the argument says nothing. `ValueError`s
say what the argument takes. What Python printed is read by `pairs`: `{'a': 1}`, `Namespace(a=1)`,
`a=1, b=Config(c=[2])`. Values that are no literals, as `dtype=torch.bfloat16` or `<Enum.A: 1>`,
stay text.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsim.errors import ConfigError
from kvsim.settings.parsing import human_readable_int, parse_json

_DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_PRINTED = {"num_spec_tokens": "num_speculative_tokens"}
"""Names of a `SpeculativeConfig` in logs (vLLM 0.33.0 `config/speculative.py`, `__repr__`)."""
_CACHED_MODEL = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)(?:/|$)")
"""A folder of Hugging Face's cache: `models--ORGANISATION--NAME`."""


def whole(value: Any) -> int:
    """A whole number, also as `8k` or `8K`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    digits = str(value).strip()
    if re.fullmatch(r"-?\d{1,18}", digits):
        return int(digits)
    try:
        return human_readable_int(digits[:40])
    except ValueError:
        raise ValueError("a whole number, as 8192 or 8k") from None


def interval(value: Any) -> int | str:
    """A number of tokens, or `none`."""
    return "none" if str(value).strip().lower() == "none" else whole(value)


def length(value: Any) -> int | str:
    """A number of tokens, or `auto`, which vLLM also writes -1."""
    if str(value).strip().lower() in ("auto", "-1"):
        return "auto"
    return whole(value)


def number(value: Any) -> float:
    """A number that may have a fraction."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (ValueError, TypeError):
        raise ValueError("a number") from None


def table(value: Any) -> dict[str, Any] | None:
    """A table, as JSON on a command line; an empty one says nothing."""
    try:
        found = parse_json(value) if isinstance(value, str) else value
        if found is not None and not isinstance(found, dict):
            raise ValueError
        return found or None
    except ValueError:
        raise ValueError("a table of keys in JSON") from None


def json_object(value: Any) -> dict[str, Any]:
    """A table, also an empty one."""
    try:
        found = parse_json(str(value)) if not isinstance(value, dict) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("a JSON object")
    return found


def speculation(value: Any) -> dict[str, Any] | None:
    """A speculative configuration: a table, or what a log prints of it."""
    if not str(value).startswith("SpeculativeConfig("):
        return table(value)
    found = {key: each for key, each in pairs(value) if each is not None}
    return {_PRINTED.get(key, key): each for key, each in found.items()}


def switch(value: Any) -> bool:
    """A switch, which a file may also spell out."""
    words = {"true": True, "false": False, "1": True, "0": False}
    if str(value).strip().lower() not in words:
        raise ValueError("true or false")
    return words[str(value).strip().lower()]


def negated(value: Any) -> bool:
    """A switch that turns the setting off."""
    return not switch(value)


def text(value: Any) -> str | None:
    """A name; an empty one says nothing."""
    if not isinstance(value, str):
        raise ValueError("a name")
    return value.strip() or None


def model(value: Any) -> str | None:
    """A model's name; of a folder that is not on this machine, the name that it stands for."""
    name = text(value)
    if name is None:
        return None
    cached = _CACHED_MODEL.search(name)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    if name.startswith(("/", "~", "./", "../")) and not _exists(name):
        return name.rstrip("/").rpartition("/")[2] or name
    return name


def dtype(value: Any) -> str:
    """A type of weights; `half` is float16, `float` float32, `torch.` may stand before it."""
    name = str(value).strip().removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def cache_dtype(value: Any) -> str:
    """A type of the KV cache."""
    name = str(value).strip().removeprefix("torch.")
    return _DTYPES.get(name, name)


def quantization(value: Any) -> str | None:
    """How weights are quantised, without the kernel that multiplies them: `awq_marlin` is `awq`."""
    name = text(value)
    return None if name is None else name.removesuffix("_marlin")


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
_TOKEN = re.compile(
    r"""'(?:\\.|[^'\\])*(?:'|\\?\Z)|"(?:\\.|[^"\\])*(?:"|\\?\Z)|[()\[\]{}<>,]""", re.DOTALL
)
"""A quoted text, which ends with the line at the latest, or what may divide a text into parts."""


def pairs(text: str) -> Iterator[tuple[str, Any]]:
    """The names and values of a dictionary, a call, or of arguments without brackets.

    What follows the bracket that closes the first one is left aside, and so are parts without a
    name. Raises `ValueError` if the first bracket is never closed.
    """
    text = text.strip()
    head, bracket, _ = text.partition("{") if text.startswith("{") else text.partition("(")
    whole = bracket and "=" not in head and "," not in head
    for part in _parts(text[len(head) + 1 :], closed=True) if whole else _parts(text):
        name, value = _named(part, ":" if part.startswith(("'", '"')) else "=")
        if name:
            yield name, _value(value)


def whole_pairs(text: str, where: str) -> list[tuple[str, Any]]:
    """`pairs` of a line of a log at `where`. Raises `ConfigError` if the line is cut off."""
    try:
        return list(pairs(text))
    except ValueError:
        raise cut_off(where) from None


def cut_off(where: str) -> ConfigError:
    """The error for a line of a log that goes on in the next one, or is lost."""
    return ConfigError(
        f"{where}: the line is cut off, perhaps by the width of a terminal; give the log as the"
        " server wrote it"
    )


def _parts(text: str, closed: bool = False) -> Iterator[str]:
    """Split at commas outside brackets and quotes, up to a bracket that nothing opened; with
    `closed`, there has to be one."""
    expected: list[str] = []
    start = 0
    for token in _TOKEN.finditer(text):
        character = token[0]
        if character in _PAIRS:
            expected.append(_PAIRS[character])
        elif expected and character == expected[-1]:
            expected.pop()
        elif character in (")", "]", "}") and not expected:
            yield text[start : token.start()].strip()
            return
        elif character == "," and not expected:
            yield text[start : token.start()].strip()
            start = token.end()
    if closed:
        raise ValueError("a bracket is not closed")
    yield text[start:].strip()


def _named(part: str, separator: str) -> tuple[str, str]:
    name, found, value = part.partition(separator)
    name = name.strip().strip("'\"")
    return (name, value.strip()) if found and name.isidentifier() else ("", "")


def _value(text: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in texts that are not ours
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
