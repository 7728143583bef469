"""`kvsim` and `python -m kvsim`."""

import atexit
import os
import sys


def run() -> None:
    """Run the command line; Ctrl-C ends it in one line, also while it is being imported."""
    codes: list[int] = []
    atexit.register(_end, codes)  # The first to be registered is the last to be called.
    try:
        from kvsim.core.collector import collect_seldom

        collect_seldom()
        # Arrow's own pool of memory keeps 12 MB more.
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
        from kvsim.cli import all_is_done, main

        try:
            main()
        except SystemExit as end:
            codes += [end.code] if isinstance(end.code, int) else []
            raise
        finally:
            all_is_done()
    except KeyboardInterrupt:
        sys.stderr.write("kvsim: interrupted\n")
        sys.exit(130)


def _end(codes: list[int]) -> None:
    """End the process with the code of its command, when all else is done.

    Python would free every object first, one by one, which takes as long as many a run.
    """
    for code in codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    run()
