"""kvsim: a discrete-event simulator of KV-cache scheduling for LLM serving.

```python
import kvsim

result = kvsim.simulate("trace.jsonl", {"model": "llama-3-8b", "enable_prefix_caching": True})
result.summary["p99_ttft_ms"], result.requests_frame(), result.steps_frame()
```
"""

from typing import TYPE_CHECKING, Any

from kvsim.version import __version__

if TYPE_CHECKING:
    from kvsim.result import Result
    from kvsim.run import simulate

__all__ = ["Result", "__version__", "simulate"]


def __getattr__(name: str) -> Any:
    """Import the simulator only when it is asked for, so that `kvsim --help` stays quick."""
    if name == "Result":
        from kvsim.result import Result

        return Result
    if name == "simulate":
        from kvsim.run import simulate

        return simulate
    raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
