"""From a file of requests to requests that arrive: formats, block identities, arrivals, clients."""

from kvsim.workload.formats import READERS, check_trace, convert, open_trace
from kvsim.workload.trace import Trace

__all__ = ["READERS", "Trace", "check_trace", "convert", "open_trace"]
