"""The server's command in the files that people start it with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import ConfigError
from kvsim.server import server_settings

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

DOCKERFILE = """\
# syntax=docker/dockerfile:1
ARG TAG=v0.11.2
FROM vllm/vllm-openai:v0.11.2
ENV HF_HOME=/cache
RUN pip install x && \\
    echo done
ENTRYPOINT ["vllm", "serve"]
CMD ["meta-llama/Llama-3.1-8B-Instruct", "--tensor-parallel-size", "2", \\
     "--enforce-eager", "--max-num-seqs", "64"]
"""

DOCKERFILE_OF_THE_IMAGE = """\
FROM vllm/vllm-openai:v0.11.2
CMD --model meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --enforce-eager \\
    --max-num-seqs 64
"""

COMPOSE = """\
services:
  redis:
    image: redis:7
    command: redis-server --port 6379
  vllm:
    image: vllm/vllm-openai:v0.11.2
    ports: ["8000:8000"]
    environment:
      - HF_TOKEN=${HF_TOKEN}
    command: >
      --model meta-llama/Llama-3.1-8B-Instruct
      --tensor-parallel-size ${TP:-2}
      --enforce-eager
      --max-num-seqs 64
"""

COMPOSE_LIST = """\
services:
  vllm:
    image: vllm/vllm-openai:v0.11.2
    command:
      - --model=meta-llama/Llama-3.1-8B-Instruct
      - --tensor-parallel-size=2
      - --compilation-config
      - '{"mode": 3}'
      - --enforce-eager
      - --max-num-seqs
      - 64
"""

POD = """\
apiVersion: v1
kind: Service
metadata: {name: llm}
---
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: server
          image: vllm/vllm-openai:v0.11.2
          command: ["/bin/sh", "-c"]
          args:
            - |
              vllm serve meta-llama/Llama-3.1-8B-Instruct \\
                --tensor-parallel-size 2 --enforce-eager --max-num-seqs 64
          resources: {limits: {nvidia.com/gpu: 2}}
"""

FILES = {
    "start.sh": SHELL,
    "Dockerfile": DOCKERFILE,
    "Dockerfile.image": DOCKERFILE_OF_THE_IMAGE,
    "compose.yaml": COMPOSE,
    "docker-compose.yml": COMPOSE_LIST,
    "pod.yaml": POD,
    "windows.sh": SHELL.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_server_in_every_kind_of_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name].encode())
    settings = dict(server_settings(vllm_file=str(path)).settings)
    version = settings.pop("vllm_version", None)
    assert version == (None if name.endswith(".sh") else "0.11.2")
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
        ("FROM vllm/vllm-openai\nCMD vllm serve 'm", ["the '"]),
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


@pytest.mark.parametrize("text", ["command: [", "command: !!bool x", "a: b", "- 1", "[" * 5000])
def test_bad_yaml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"compose\.yaml: (not YAML|no vLLM command)"):
        server_settings(vllm_file=str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        server_settings(vllm_file=str(tmp_path / "none.sh"))


def test_aliases_of_yaml_are_read_once(tmp_path: Path) -> None:
    """Nine levels of nine aliases each would be 387 million containers."""
    lines = ["a0: &a0 {image: vllm-openai, command: [m, --max-num-seqs, 7]}"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    assert server_settings(vllm_file=str(path)).settings["max_num_seqs"] == 7


PIECES = sorted({piece for text in FILES.values() for piece in text.split(" ")})


@given(
    st.sampled_from(("fuzz.sh", "fuzz.yaml")),
    st.text()
    | st.lists(st.sampled_from([*PIECES, "'", '"', "$(", "`", "\n", "&a", "*a"])).map(" ".join),
)
def test_nothing_but_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
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
