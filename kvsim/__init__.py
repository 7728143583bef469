"""kvsim: a discrete-event simulator of KV-cache scheduling for LLM serving.

```python
import kvsim

result = kvsim.simulate("chat", {"model": "llama-3-8b", "enable_prefix_caching": True})
result.summary["p99_ttft_ms"], result.requests_frame(), result.plot()
```
"""

from kvsim.core.compiled import find_compiled_first

find_compiled_first()

TYPE_CHECKING = False
"""As in `typing`. This module imports nothing else: an interrupt before the command line heeds it
would show a traceback."""
if TYPE_CHECKING:
    from typing import Any

    from kvsim.report.result import Result
    from kvsim.report.session import simulate
    from kvsim.settings.config import RunConfig
    from kvsim.version import __version__
    from kvsim.workload import open_trace

__all__ = ["Result", "RunConfig", "__version__", "open_trace", "simulate"]

_PLACES = {
    "Result": "kvsim.report.result",
    "RunConfig": "kvsim.settings.config",
    "__version__": "kvsim.version",
    "open_trace": "kvsim.workload",
    "simulate": "kvsim.report.session",
}


def __getattr__(name: str) -> "Any":
    """Import what is asked for only then, so that `kvsim --help` stays quick."""
    if name in _PLACES:
        from importlib import import_module

        from kvsim.core.collector import collector_paused

        with collector_paused():
            return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'kvsim' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet."""
    return sorted(__all__)
