"""From a file of requests to requests that arrive: formats, block identities, arrivals, clients."""

from kvsim.workload.formats import READERS, open_trace
from kvsim.workload.trace import Trace

__all__ = ["READERS", "Trace", "open_trace"]
