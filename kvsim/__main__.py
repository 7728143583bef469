"""`kvsim` and `python -m kvsim`."""

import os
import sys


def run() -> None:
    """Run the command line; Ctrl-C ends it in one line, also while it is being imported."""
    try:
        from kvsim.core.collector import collect_no_more, collect_seldom

        collect_seldom()
        # Arrow's own pool of memory keeps 12 MB more.
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
        from kvsim.cli import all_is_done, main

        try:
            main()
        finally:
            all_is_done()
            collect_no_more()
    except KeyboardInterrupt:
        sys.stderr.write("kvsim: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    run()
