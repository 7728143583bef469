"""`kvsim crossover`: what it prints, writes and refuses."""

from pathlib import Path

import pytest

from kvsim.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["crossover", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_a_table_per_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "--model", "llama-3-8b", "--model", "tiny", "--tokens", "2048", "--layout", "cross"
    )
    assert code == 0
    assert "llama-3-8b: 128 KiB a token, 2.00 MiB a block" in out
    assert "tiny:" in out
    assert out.count("2,048") == 2
    assert "ESTIMATED step times (public-table: h100-sxm x llama-3-8b" in out
    assert "SCALED step times (scaled from public-table: h100-sxm x llama-3-8b" in out
    assert "layer" not in out


def test_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "crossover.html"
    code, out, _ = run(capsys, "--model", "tiny", "--hardware", "h200-sxm", "--out", str(path))
    assert code == 0
    assert f"written to {path}" in out.replace("\n", "")
    assert "Swap or recompute on h200-sxm" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layout", "row"], "--layout: unknown 'row'; choose from layer, cross"),
        (["--model", "llama"], "no model named 'llama'"),
        (["--hardware", "h300"], "no hardware named 'h300'"),
        (["--tokens", "0"], "--tokens"),
        (["--bandwidth-gb-s", "0"], "bandwidth_gb_s: 0.0 is not a bandwidth above 0"),
        (["--cost-model", "table", "--hardware", "l40"], "cost: table needs 'profile'"),
        (["--cost-model", "rooflin"], "did you mean 'roofline'?"),
        (["--profile", "none"], "no profile named 'none'"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size: 3 GPUs cannot share"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
