"""The errors of kvsim, and who gets each message.

```
KvsimError            one line for the user: what, where, remedy; the command line exits with 2
├── ConfigError       a setting, a flag, a model, a hardware file, an impossible memory budget
│   └── PolicyError   a policy of the user's own that raised an exception, hung, or broke a rule
├── TraceError        a trace file: FILE:LINE: FIELD: what is wrong; what to do
└── OutputError       a result that could not be written or read
EngineStopped         the *simulated* engine died or got stuck: an outcome of a run
```
Broken promises inside kvsim are `AssertionError`s.
"""

import difflib
from collections.abc import Iterable

_LONGEST = 1200
"""Characters of a message."""
_LONGEST_WORD = 200
"""Characters that are compared with known names: longer ones resemble none."""


class KvsimError(Exception):
    """An error that the user can correct; its text is one clear line."""

    def __str__(self) -> str:
        # Names that it quotes may hold characters that end a line.
        return shortened(" ".join(super().__str__().splitlines()))


class ConfigError(KvsimError):
    """A setting is unknown, malformed, out of range, or impossible together with others."""


class PolicyError(ConfigError):
    """A user's own policy cannot be imported, did not return, or raised an exception, which is the
    cause of this one, or made kvsim raise one by breaking a rule."""


class TraceError(KvsimError):
    """A trace file cannot be read as what it claims to be."""


class OutputError(KvsimError):
    """A result cannot be written, or a result folder cannot be read."""


def shortened(text: str) -> str:
    """A message without the middle of what is too long to read: its ends name place and remedy."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 3 :]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """` did you mean X?` for a message; empty if no known word is near."""
    word = str(word)[:_LONGEST_WORD].replace("-", "_")
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" did you mean {found[0]!r}?" if found else ""


def check_choice(where: str, word: str, known: Iterable[str], also: str = "") -> None:
    """Raise `ConfigError` unless `word` is one of the `known` ones; `also` names other choices."""
    known = tuple(known)
    if word not in known:
        raise ConfigError(
            f"{where}: unknown {word!r};{nearest(word, known)} choose from {', '.join(known)}{also}"
        )


class EngineStopped(Exception):  # noqa: N818 - an outcome of a run, not an error of ours
    """The modelled engine raises an error here; `rule` names the place in its source.

    Faithful schedulers and block managers raise it. The replica catches it and ends the run with
    this outcome.
    """

    def __init__(
        self, kind: str, request_id: str, explanation: str, remedy: str, rule: str
    ) -> None:
        # All arguments, so that the exception can be copied from `args`, as event loops do.
        super().__init__(kind, request_id, explanation, remedy, rule)
        self.kind = kind
        """Short name, e.g. `swap-space-exhausted`."""
        self.request_id = request_id
        """The request at which it happened."""
        self.explanation = explanation
        """What happened, in words."""
        self.remedy = remedy
        """The setting that avoids it."""
        self.rule = rule
        """Exception class and place in its source, as `RuntimeError @ core/scheduler.py:1536`."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.explanation}"
