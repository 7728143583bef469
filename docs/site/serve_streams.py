"""Opens streams of `kvsim serve` and says how late their tokens are and what they cost.

    python docs/site/serve_streams.py 16 64 128 256 512
    python docs/site/serve_streams.py 256 512 --stream-interval 4    # any options of kvsim serve
    sudo chrt --rr 1 python docs/site/serve_streams.py 256           # where others use the cores

Steps take 10 ms, and every stream gets a token in each. The server has one core for itself and this
client another. A line for each number of streams is the round with the least p99 lateness of three.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

STEP_MS, TOKENS, ROUNDS = 10, 1000, 3
COMMAND = f"""serve --port 0 --max-num-seqs 1024 --max-num-batched-tokens 16384 --max-model-len 2048
 --num-gpu-blocks-override 100000 --cost-model constant --set cost.step_us={STEP_MS}000
 --set cost.prefill_token_us=0 --set cost.decode_seq_us=0 --set cost.context_token_ns=0""".split()


@contextmanager
def server(core: int, options: list[str]) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server on one core, and its port."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "kvsim", *COMMAND]
    command += options
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = re.search(r":(\d+)/v1", process.stdout.readline())
        assert told is not None
        yield int(told[1]), process


def read_all(port: int, streams: int) -> None:
    """Opens so many streams, and reads them to their ends."""
    body = json.dumps(
        {"prompt": [1] * 4, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d"
    left, tails = selectors.DefaultSelector(), dict[int, bytes]()
    for _ in range(streams):
        made = socket.create_connection(("127.0.0.1", port))
        made.sendall(head % len(body) + b"\r\n\r\n" + body)
        left.register(made, selectors.EVENT_READ)
    while left.get_map():
        for key, _ in left.select():
            assert isinstance(key.fileobj, socket.socket)
            if got := key.fileobj.recv(1 << 16):
                tails[key.fd] = (tails.get(key.fd, b"") + got)[-40:]
            else:
                assert b"data: [DONE]" in tails[key.fd], "a stream did not end properly"
                left.unregister(key.fileobj)
                key.fileobj.close()


def measured(streams: int, options: list[str]) -> tuple[float, str]:
    """The p99 lateness of one round, and all about it."""
    with server(0, options) as (port, process):
        begun_s = cpu_s(process.pid)
        read_all(port, streams)
        used_s = cpu_s(process.pid) - begun_s
        process.terminate()
        assert process.stdout is not None
        said = process.stdout.read()
    found = re.search(r"late by ([\d.]+) ms \(p50\), ([\d.]+) ms \(p99\)", said)
    assert found is not None, said
    cost = f"{used_s / streams / TOKENS * 1e6:.1f} | {used_s / (TOKENS * STEP_MS / 1e3):.0%}"
    return float(found[2]), f"| {streams} | {found[1]} | {found[2]} | {cost} |"


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    os.sched_setaffinity(0, {1})
    say = sys.stdout.write
    say("| streams | lateness p50, ms | p99, ms | us of CPU a token | cores needed | load |\n")
    say("|---|---|---|---|---|---|\n")
    numbers = [*takewhile(str.isdigit, sys.argv[1:])]
    for streams in map(int, numbers):
        best = min(measured(streams, sys.argv[1 + len(numbers) :]) for _ in range(ROUNDS))
        say(f"{best[1]} {os.getloadavg()[0]:.1f} |\n")
        sys.stdout.flush()
