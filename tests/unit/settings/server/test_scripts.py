"""The server's command in the files that people start it with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import ConfigError
from kvsim.settings.server import server_settings

SHELL = r"""#!/usr/bin/env bash
# vllm serve other-model --max-num-seqs 3
set -euo pipefail
export HF_HOME=/cache
MODEL="meta-llama/Llama-3.1-8B-Instruct"   # the model's name
TP=${TP:-2}
EXTRA="--enforce-eager --port ${PORT:-8000}"

nvidia-smi | head -3
exec vllm serve "$MODEL" \
    --tensor-parallel-size "$TP" \
    --api-key 'a#b' \
    --compilation-config '{"mode": 3,
                           "cudagraph_mode": "FULL"}' \
    $EXTRA \
    --max-num-seqs 64 > /var/log/vllm.log 2>&1 &
wait
"""

FILES = {
    "start.sh": SHELL,
    "windows.sh": SHELL.replace("\n", "\r\n"),
    "container.sh": SHELL.replace("exec vllm serve", "docker run x/vllm-openai:v0.11.2"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_server_in_every_kind_of_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name].encode())
    settings = dict(server_settings(vllm_file=str(path)).settings)
    version = settings.pop("vllm_version", None)
    assert version == ("0.11.2" if name == "container.sh" else None)
    assert settings == {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "max_num_seqs": 64,
        "engine": "vllm-v1",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ("a\0b", ["not a text"]),
        ("echo hello", ["no vLLM command"]),
        ("vllm serve a\nvllm serve b\n", ["2 vLLM commands", "a; b"]),
        ("echo\nvllm serve 'a\n", ["line 2"]),
        ("x" * 2_000_000, ["larger"]),
    ],
)
def test_bad_files(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "start.sh"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        server_settings(vllm_file=str(path))
    assert "\n" not in str(caught.value)
    for word in ["start.sh", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Dockerfile", 'FROM vllm/vllm-openai:v0.11.2\nCMD ["--model", "m"]\n'),
        ("start.sh", "docker build - <<EOF\nFROM x\nCMD vllm serve m\nEOF\n"),
        ("compose.yaml", "vllm serve m"),
        ("docker-compose.YML", "services:\n  a:\n    command: vllm serve m\n"),
        ("pod", "kind: Pod\nspec:\n  containers:\n  - args:\n    - vllm serve m\n"),
    ],
)
def test_a_file_of_containers_is_refused(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"are not read; paste the words of `command`"):
        server_settings(vllm_file=str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        server_settings(vllm_file=str(tmp_path / "none.sh"))


PIECES = sorted({piece for text in FILES.values() for piece in text.split(" ")})


@given(
    st.text() | st.lists(st.sampled_from([*PIECES, "'", '"', "$(", "`", "\n"])).map(" ".join),
)
def test_nothing_but_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.sh"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        server_settings(vllm_file=str(path))
    except ConfigError as error:
        assert "\n" not in str(error)


@given(st.sampled_from(sorted(FILES)), st.integers(0, 900), st.integers(0, 60), st.text(max_size=9))
def test_damaged_files(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, cut: int, junk: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged-{name}"
    whole = FILES[name]
    path.write_text(whole[:at] + junk + whole[at + cut :], encoding="utf-8", errors="replace")
    try:
        server_settings(vllm_file=str(path))
    except ConfigError as error:
        assert "\n" not in str(error)
