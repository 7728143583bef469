"""Public data that lies beside the checkout but is never part of the project."""

import pytest
from places import ROOT

SHARED = ROOT.parent / "shared"


def needs_shared(relative: str) -> pytest.MarkDecorator:
    """Skip a test, with the reason, where the file or folder `shared/<relative>` is absent."""
    return pytest.mark.skipif(
        not (SHARED / relative).exists(), reason=f"public data ../shared/{relative} is not here"
    )
