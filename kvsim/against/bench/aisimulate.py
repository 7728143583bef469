"""Times the core of NVIDIA AISimulate: a script for a Python that has `ai-dynamo-runtime`.

    python aisimulate.py TRACE ENGINE_ARGS_JSON TRACE_BLOCK_SIZE

writes the CPU seconds of its `run_mocker_trace_replay`, which reads the trace, too, and keeps
figures of all requests together only.
"""

import json
import sys
import time


def main(path: str, engine_args: str, block_size: str) -> None:
    """Replay a Mooncake file once."""
    from dynamo import _core  # type: ignore[import-not-found]

    engine = json.loads(engine_args)
    start = time.process_time()
    _core.run_mocker_trace_replay(
        [path],
        extra_engine_args={"engine": engine},
        trace_block_size=int(block_size),
        capture_per_request=False,
    )
    sys.stdout.write(f"\n{time.process_time() - start}")


if __name__ == "__main__":
    main(*sys.argv[1:])
