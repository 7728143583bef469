"""A process in which the libraries that a GPU machine may lack cannot be imported."""

import runpy
import sys
from importlib.abc import MetaPathFinder
from typing import Any

ABSENT = ("simpy", "msgspec", "plotly", "rich", "pyarrow", "typer", "yaml", "joblib")


class Blocker(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocker())
    sys.argv.pop(0)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
