"""`kvsim profile show`: what was measured, how far off it is, and its page."""

from pathlib import Path

import pytest

from kvsim.cli import main


def test_show_prints_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.html"
    with pytest.raises(SystemExit) as caught:
        main(["profile", "show", "h200-sxm-llama-3-8b-public", "--out", str(path)])
    assert not caught.value.code
    out = capsys.readouterr().out
    assert "public-table, 2026-08-21" in out
    assert "decode_v2" in out
    assert "llama-3-8b on h200-sxm" in path.read_text()
