"""Runs one list of commands in a folder, so that another run of them can be compared with it.

    python tests/fuzz/same.py a --jobs 1
    PYTHONHASHSEED=1 TZ=Asia/Kolkata other-python tests/fuzz/same.py b --jobs 4
    diff -r a b

Every file, and what every command prints, has to be the same whatever the Python, the hash seed,
the locale, the time zone and the number of processes. Parquet files hold the version of pyarrow.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "groundtruth" / "rtx4090-llama-3.1-8b"
"""A measured run; `check` and `profile fit-run` are left out where it is absent."""

_CHAT = "--trace chat --num-prompts 120"
_TIGHT = f"{_CHAT} --num-gpu-blocks-override 700"
COMMANDS = {
    "run": f"run {_TIGHT} --victim random --csv --block-map --step-log steps.jsonl OUT",
    "json": f"run {_TIGHT} --engine vllm-0.6.3 --preemption-mode auto --json",
    "rates": f"run {_CHAT} --request-rate 8 --burstiness 0.5 --seed 7 --csv OUT",
    "sglang": "run --trace agents --num-prompts 60 --engine sglang --csv OUT",
    "groups": f"run {_CHAT} --model gpt-oss-20b --csv OUT",
    "tier": f"run {_TIGHT} --kv-offloading-size 1 --csv OUT",
    "drafts": f"run {_CHAT} --speculative-config "
    '{"method":"ngram","num_speculative_tokens":3,"acceptance_rate":0.6} OUT',
    "stages": f"run {_CHAT} --pipeline-parallel-size 2 --csv OUT",
    "ranks": f"run {_CHAT} --data-parallel-size 2 --csv OUT",
    "fleet": f"run {_CHAT} --replicas 3 --router sglang-cache_aware --csv OUT",
    "split": f"run {_CHAT} --prefill-replicas 1 --decode-replicas 2 --csv OUT",
    "compare": f"compare naive prefix-caching {_TIGHT} OUT",
    "seeds": f"compare naive victims-random {_TIGHT} --request-rate 9 --seeds 4 OUT JOBS",
    "routers": f"compare {_CHAT} --replicas 2 --router round-robin,dynamo-kv OUT",
    "sweep": f"sweep {_CHAT} --grid max_num_seqs=4,8 --random request_rate=uniform(4,9)"
    " --samples 2 --slo p99_ttft<2s --ledger --seeds 2 OUT JOBS",
    "size": f"size {_CHAT} --slo p99_ttft<2s --find request_rate --from 2 --to 16"
    " --seeds 2 OUT JOBS",
    "curve": "cache curve agents --model llama-3-8b --out curve/page.html",
    "policies": "cache policies agents --capacity 400 --policy arc --policy lirs --json",
    "sample": "cache sample agents --capacity 400 --rate 0.3",
    "audit": "cache audit run --eviction arc --out audit/page.html",
    "convert": "trace convert chat convert/chat.jsonl --to mooncake --block-size 16",
    "synth": "trace synth agents --requests 200 --seed 3 --out synth/made.jsonl.gz",
    "info": "trace info agents",
    "advise": "advise chat --num-prompts 60 --slo p99_ttft<1s --seeds 3 JOBS",
    "timeline": "timeline run --out timeline/run.json.gz",
    "diff": "diff run other OUT",
    "other": f"run {_TIGHT} --victim tail --block-map OUT",
    "why": "why run --request 40 --html why/page.html",
    "measured": "check real/trace.jsonl --measured real/measured.jsonl --vllm-file real/meta.json"
    " --hardware rtx-4090 --num-prompts 60 OUT",
    "fitted": "profile fit-run rtx-pro-6000-server-llama-3.1-8b-public --run real/trace.jsonl"
    " --measured real/measured.jsonl --vllm-file real/meta.json --first 30 --out fitted/p.json",
}
"""Folder of a command's files -> its words: OUT stands for that folder, JOBS for the processes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--only", default="", help="commands, with commas between them")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    if REAL.is_dir():
        (args.folder / "real").symlink_to(REAL)
    names = args.only.split(",") if args.only else list(COMMANDS)
    for name in sorted(names, key=("run", "other", "synth", *COMMANDS).index):
        if "real/" in COMMANDS[name] and not REAL.is_dir():
            continue
        said = COMMANDS[name].replace("OUT", f"--out {name}").replace("JOBS", f"--jobs {args.jobs}")
        (args.folder / name).mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "kvsim", *said.split()],
            capture_output=True,
            cwd=args.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
            check=False,
        )
        (args.folder / f"{name}.txt").write_bytes(done.stdout)
        if done.returncode:
            print(f"{name}: exit code {done.returncode}: {done.stderr.decode()[-400:]}")


if __name__ == "__main__":
    main()
