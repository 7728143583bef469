"""Finds the shipped geometry that a spelling of a model's name means, without a network.

`meta-llama/Llama-3.1-8B-Instruct`, `Llama-3.1-8B` and `unsloth/llama-3.1-8b-bnb-4bit` are all
`llama-3.1-8b`. Who publishes it, case, dots and dashes do not matter. Words for tuning, such as
`instruct`, are dropped unless a file is shipped under the full name, because its longest sequence
differs. Words for quantised weights tell how they are stored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_TUNING = frozenset(
    [
        *["instruct", "chat", "it", "base", "hf", "pt", "meta", "thinking", "unsloth", "distilled"],
        *["nvidia", "bf16", "reasoning", "preview", "exp", "terminus", "code"],
    ]
)
"""Words that say how a model was tuned or packed, not how large it is."""

_QUANTIZATION = {
    "nvfp4": "modelopt_fp4",
    "fp4": "modelopt_fp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "fp8": "fp8",
    "awq": "awq",
    "gptq": "gptq",
    "bnb": "bitsandbytes",
    "nf4": "bitsandbytes",
    "w4a16": "w4a16",
    "w8a8": "w8a8",
    "int8": "w8a8",
    "int4": "w4a16",
    "4bit": "bitsandbytes",
}
"""Word of a name → method. Of several words, the one that comes first here counts."""
_OF_QUANTIZATION = frozenset({"dynamic", "block", "quantized", "kv", "128g", "8bit"})
"""Words that come with those and say nothing more here."""

_ALIASES = {
    "phi3mini": "phi-3-mini-4k",
    "phi3.5mini": "phi-3-mini-128k",
    "r1distillqwen14b": "deepseek-r1-distill-qwen-14b",
    "r1distillqwen32b": "deepseek-r1-distill-qwen-32b",
    "r1distillllama8b": "deepseek-r1-distill-llama-8b",
    "r1distillllama70b": "deepseek-r1-distill-llama-70b",
    "qwen3coder30ba3binstruct": "qwen3-30b-a3b-2507",
    "mixtral8x7bv01": "mixtral-8x7b",
    "mixtral8x22bv01": "mixtral-8x22b",
    "deepseekv31": "deepseek-v3",
    "deepseekr10528": "deepseek-r1",
    "llama-3.1-nemotron-nano-8b-v1": "llama-3.1-8b",
    "llama-3.3-nemotron-super-49b-v1": "llama-3.3-nemotron-super-49b",
    "devstral-small": "mistral-small-3.1-24b",
    "magistral-small": "mistral-small-3.2-24b",
    "qwq-32b": "qwen2.5-32b-instruct",
    "mistral-nemo": "mistral-nemo-12b",
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-1.5b": "qwen2.5-1.5b-instruct",
    "qwen2-7b": "qwen2.5-7b-instruct",
    "qwen2-72b": "qwen2.5-72b-instruct",
    "minimaxm21": "minimax-m2",
    "minimaxm25": "minimax-m2",
    "minimaxm27": "minimax-m2",
    "kimik26": "kimi-k2.5",
    "kimik27": "kimi-k2.5",
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3-coder-next": "qwen3-next-80b-a3b",
    "qwen3-coder-480b-a35b-instruct": "qwen3-coder-480b-a35b",
    "qwen3guard-gen-8b": "qwen3-8b",
    "qwen3guard-gen-4b": "qwen3-4b",
    "glm-4.7": "glm-4.6",
    "glm-4.5v-air": "glm-4.5v",
    "nemotron-h-56b-8k": "nemotron-h-56b",
    "llama-4-scout": "llama-4-scout-17b-16e",
    "llama-4-maverick": "llama-4-maverick-17b-128e",
    "gpt-oss-120b-w-a": "gpt-oss-120b",
    "gpt-oss-20b-w-a": "gpt-oss-20b",
    "lfm2.5-1.2b-jp": "lfm2.5-1.2b",
    "lfm2-1.2b": "lfm2.5-1.2b",
    "lfm2-8b-a1b": "lfm2.5-8b-a1b",
    "deepseek-v3-0324": "deepseek-v3",
}
"""Compact spelling → shipped name, where the words alone do not lead to it."""


class Meaning(NamedTuple):
    """What a spelling stands for."""

    name: str
    """A shipped name."""
    quantization: str | None
    """The method by which the name says that weights are stored."""


def meaning(spelling: str, shipped: Iterable[str]) -> Meaning | None:
    """The shipped model that a spelling means; None for an unknown one."""
    known = {_compact(name): name for name in shipped}
    known |= {_compact(alias): name for alias, name in _ALIASES.items() if name in known.values()}
    words = _words(spelling)
    method = _method(words)
    for candidate in _candidates(words):
        if _compact(candidate) in known:
            return Meaning(known[_compact(candidate)], method)
    return None


def nearest_names(spelling: str, shipped: Iterable[str]) -> list[str]:
    """Up to three shipped names that look most like a spelling."""
    compact = {_compact(name): name for name in shipped}
    *_, plain = _candidates(_words(spelling))
    found = difflib.get_close_matches(_compact(plain), list(compact), n=3, cutoff=0.5)
    return [compact[each] for each in found]


def method_of(spelling: str) -> str | None:
    """The method by which a name says that weights are stored."""
    return _method(_words(spelling))


def _words(spelling: str) -> list[str]:
    last = spelling.rstrip("/").split("/")[-1].lower()
    return [word for word in re.split(r"[-_ :]|(?<=quantized)\.", last) if word]


def _candidates(words: list[str]) -> Iterator[str]:
    """Names that the words may mean, the most exact one first."""
    yield "-".join(words)
    stored = {*_QUANTIZATION, *_OF_QUANTIZATION}
    words = [word for word in words if word not in stored]
    yield "-".join(words)
    if "coder" in words:  # the longest sequence of the instruct model of the size
        words = [*(word for word in words if word not in ("coder", "instruct")), "instruct"]
        yield "-".join(words)
    words = [word for word in words if word not in _TUNING]
    yield "-".join(words)
    words = [word for word in words if not re.fullmatch(r"\d{4}|\d{6}", word)]
    yield "-".join(words)


def _method(words: list[str]) -> str | None:
    if "gptq" in words and ("int8" in words or "8bit" in words):
        return "gptq-int8"
    return next((method for word, method in _QUANTIZATION.items() if word in words), None)


def _compact(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
