"""The virtual clock and the record of the step-log format, for the twins of several engines."""

from math import ceil
from zlib import crc32


class EngineError(Exception):
    """The engine raised."""


def play(engine, twins, max_steps):
    """The log of an engine with `add(twin)`, `busy()` and `step(time)` → record."""
    left = sorted(twins, key=lambda twin: twin.arrival)
    log, time, empty = [], 0.0, 0
    while left or engine.busy():
        if not engine.busy() and left[0].arrival > time:
            time = max(time, float(ceil(left[0].arrival)))
        added = 0
        while left and left[0].arrival <= time:
            engine.add(left.pop(0))
            added += 1
        number = len(log)
        try:
            record = engine.step(time)
        except EngineError as error:
            return [*log, {"step": number, "time": time, "error": str(error)}]
        log.append({"step": number, "time": time, "added": added, **record})
        time += 1.0
        if number + 1 == max_steps:
            return [*log, {"step": number + 1, "time": time, "error": "max_steps"}]
        nothing = not any(record[k] for k in ("prefill", "decode", "ignored", "preempted"))
        empty = empty + 1 if nothing else 0
        if empty >= 50 and not left:
            return [*log, {"step": number + 1, "time": time, "error": "deadlock"}]
    return log


def queue_digest(queue):
    return crc32(",".join(twin.id for twin in queue).encode())


def table_digest(tables):
    """Of (id, table) pairs in batch order."""
    digest = 0
    for name, table in tables:
        digest = crc32(f"{name}={','.join(map(str, table))};".encode(), digest)
    return digest


def generated(label, number):
    return crc32(f"{label}:{number}".encode()) % 32000
