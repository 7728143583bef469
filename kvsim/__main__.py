"""`kvsim` and `python -m kvsim`."""

import sys


def run() -> None:
    """Run the command line; Ctrl-C ends it in one line, also while it is being imported."""
    try:
        from kvsim.collector import collect_no_more, collect_seldom

        collect_seldom()
        from kvsim.cli import main
        from kvsim.cli.stopping import all_is_done

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
