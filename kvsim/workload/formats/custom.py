"""vLLM's custom data set: JSON Lines of `{"prompt": text, "output_tokens": number}`.

The traps (vLLM 0.33.0, `CustomDataset`): there are no arrivals; `output_tokens` may be missing,
where `vllm bench serve` takes `--custom-output-len`; prompts have no token counts
(`kvsim.workload.texts`); the benchmark shuffles the rows unless told otherwise.
"""

from __future__ import annotations

from kvsim.workload import texts
from kvsim.workload.gather import Gathered
from kvsim.workload.head import Head
from kvsim.workload.source import Source, parse, shown
from kvsim.workload.trace import Trace
from kvsim.workload.values import tokens


def recognises(head: Head) -> bool:
    """Whether the rows are texts to complete, without a body around them."""
    return "prompt" in head.keys and head.is_json and "body" not in head.keys


def read(source: Source) -> Trace:
    """The prompts, without arrivals. Raises `TraceError` at the first line that is wrong."""
    gathered, known = Gathered(source, "custom"), texts.TextIds()
    for line in source.lines():
        table = parse(source, line)
        prompt, output = table.get("prompt"), table.get("output_tokens")
        if not isinstance(prompt, str):
            raise source.error(f"{shown(prompt)} is not a text; give one", "prompt")
        if output is None:
            what = "missing, so the length of the output is unknown; add it to every row"
            raise source.error(what, "output_tokens")
        if not prompt:
            gathered.drop("the prompt is empty")
            continue
        stream = texts.Stream(known)
        stream.append(prompt)
        output_length = tokens(source, "output_tokens", output)
        gathered.add(stream.tokens, output_length, content=stream.content())
    return texts.identified(gathered.trace(texts.NOTE))
