"""Public measurements of servers that nobody here ran, beside what kvsim says of them.

`written(folder)` makes the table of the page; `docs/site/real_runs.py` calls it. `folder` holds
`cases.json` (`vllm bench serve` at rate inf, and clients in a closed loop) and `blis_h100.json`
(stages of a constant rate, H100). Nothing is fitted to any of these runs.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload.spec import Workload, make_trace
from kvsim.workload.trace import SegmentContent, Trace

CODELLAMA = "codellama/CodeLlama-34b-Instruct-hf"
GEOMETRY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 48,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}
"""That of `CODELLAMA` (its config.json), which kvsim does not ship."""
PROMPTS = {
    "codegen": (11, 4, 100, 466),
    "general": (9, 5, 100, 447),
    "roleplay": (10, 5, 150, 600),
    "reasoning": (23, 1, 100, 934),
}
"""Prefixes, users of each, and tokens of prefix and question, by workload: `profile.yaml` of
github.com/inference-sim/training at c4f0340."""
TEMPLATE_MS = {
    ("Qwen/Qwen3-14B", "0.11.0"): 8.1,
    ("deepseek-ai/DeepSeek-R1-0528", "0.11.0"): 10.0,
    ("meta-llama/Llama-3.1-8B-Instruct", "0.9.0"): 7.0,
}
"""Milliseconds that the front end takes for each request, in runs over `/v1/chat/completions`, by
model and release: these releases of vLLM parse the chat template anew for each
(`entrypoints/chat_utils.py`: `resolve_chat_template_kwargs` in 0.11.0, `_detect_content_format`
in 0.9.0). The first two are the CPU time of the same calls on the same template, or for
DeepSeek-R1 on the one of vLLM's examples (Jinja2 3.1.6, Python 3.11, EPYC). The third is the
middle of 6 to 8, github.com/vllm-project/vllm/pull/20065. None is fitted to a run."""
MOST = 1000
"""Requests of a stage that are simulated: the load is steady."""
MOST_FAILED = 0.01
METRICS = {
    "duration_s": "duration",
    "output_throughput": "output_throughput",
    "mean_ttft_ms": "mean_ttft_ms",
    "mean_tpot_ms": "mean_tpot_ms",
}
"""Measured figure → the summary's."""


class Row(NamedTuple):
    """One run beside its prediction."""

    run: str
    load: str
    prices: str
    """How its steps were priced."""
    errors: dict[str, float] | None
    """By metric, in percent; None: it cannot be compared."""
    front_end_ms: float | None = None
    """What the front end takes for a request; None: not known, and so nothing."""


def written(folder: Path) -> str:
    """The table, saturated runs first."""
    rows = sorted([*_cases(folder), *_stages(folder)], key=lambda row: ORDER.index(row.load))
    names = ["duration", "throughput", "TTFT", "TPOT", "E2EL"]
    head = f"| run | load | steps | front end | {' | '.join(names)} |\n"
    head += f"| --- | --- | --- | --- |{' --- |' * 5}\n"
    return head + "".join(_line(row, names) for row in rows)


ORDER = ("saturated, long prompts", "saturated, short", "overloaded", "many clients", "steady")


def _line(row: Row, names: Sequence[str]) -> str:
    if row.errors is None:
        cells = ["most requests failed", *[""] * (len(names) - 1)]
    else:
        cells = [f"{row.errors[name]:+.0f}" if name in row.errors else "" for name in names]
    front_end = "" if row.front_end_ms is None else f"{row.front_end_ms:g} ms"
    return f"| {row.run} | {row.load} | {row.prices} | {front_end} | {' | '.join(cells)} |\n"


def _cases(folder: Path) -> Iterator[Row]:
    for case in json.loads((folder / "cases.json").read_text(encoding="utf-8"))["serving"]:
        model, *rest = shlex.split(case["command"])[2:]
        settings: dict[str, Any] = {"model": model, "hardware": case["hardware"]}
        settings |= {"vllm_version": case["vllm_version"], "request_rate": float("inf")}
        settings["max_concurrency"] = clients = case.get("max_concurrency")
        for flag, value in zip(rest[::2], rest[1::2], strict=True):
            key = {"-tp": "tensor_parallel_size", "--max-model-len": "max_model_len"}[flag]
            settings[key] = int(value)
        front_end_ms = TEMPLATE_MS.get((model, case["vllm_version"]))
        if front_end_ms is not None:
            settings["cost"] = {"front_end": {"request_ms": front_end_ms}}
        lengths = {key: case[key] for key in ("input_len", "output_len")}
        trace = make_trace(Workload("random", case["num_prompts"], **lengths), 0)
        result = simulate(trace, make_config(settings))
        predicted = {key: result.summary[name] for key, name in METRICS.items()}
        load = "saturated, long prompts" if case["input_len"] > 1000 else "saturated, short"
        if clients is not None:
            load = "many clients" if clients > 10 else "steady"
        title = f"{model.partition('/')[2]}, {case['hardware']}, {case['num_prompts']} x"
        title += f" {case['input_len']}/{case['output_len']}, vLLM {case['vllm_version']}"
        errors = _errors(case["measured"], predicted)
        yield Row(title, load, _prices(result), errors, front_end_ms)


def _errors(measured: dict[str, float], predicted: dict[str, float]) -> dict[str, float]:
    names = {
        "duration_s": "duration",
        "output_throughput": "throughput",
        "mean_ttft_ms": "TTFT",
        "mean_tpot_ms": "TPOT",
        "mean_e2el_ms": "E2EL",
    }
    return {names[key]: 100 * (predicted[key] / value - 1) for key, value in measured.items()}


def _stages(folder: Path) -> Iterator[Row]:
    runs = json.loads((folder / "blis_h100.json").read_text(encoding="utf-8"))
    with TemporaryDirectory() as where:
        config = Path(where) / "config.json"
        config.write_text(json.dumps(GEOMETRY), encoding="utf-8")
        for name, run in runs.items():
            given, app = run["exp"], name.rpartition("-")[2]
            model = str(config) if given["model"] == CODELLAMA else given["model"]
            settings = {
                "model": model,
                "hardware": "h100",
                "tensor_parallel_size": int(given["tensor_parallelism"]),
                **{
                    key: int(given[key])
                    for key in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
                },
            }
            for stage in run["stages"]:
                yield _stage(given, app, run["out"], stage, settings)


def _stage(
    given: dict[str, str], app: str, output: int, stage: dict[str, Any], settings: dict[str, Any]
) -> Row:
    title = f"{given['model'].partition('/')[2]}, {given['tensor_parallelism']} x H100, {app},"
    title += f" {stage['rate']}/s"
    if stage["fail"] > MOST_FAILED * (stage["n"] + stage["fail"]):
        return Row(title, "overloaded", "", None)
    rate = {"request_rate": float(stage["rate"]), "burstiness": float("inf")}
    trace = _repeated(app, output, min(stage["n"], MOST))
    result = simulate(trace, make_config({**settings, **rate}))
    found = result.summary
    ttft, e2e = 1e3 * stage["ttft"]["mean"], 1e3 * stage["e2e"]["mean"]
    measured = {
        "mean_ttft_ms": ttft,
        "mean_tpot_ms": (e2e - ttft) / (output - 1),
        "mean_e2el_ms": e2e,
    }
    predicted = {key: found[key] for key in measured}
    return Row(title, "steady", _prices(result), _errors(measured, predicted))


def _repeated(app: str, output: int, requests: int) -> Trace:
    """Users whose prompts are sent again and again."""
    prefixes, users, prefix, question = PROMPTS[app]
    trace = make_trace(
        Workload("random", requests=requests, input_len=prefix + question, output_len=output), 0
    )
    for row in trace.rows:
        user = row.index % (prefixes * users)
        row.content = SegmentContent(
            ((f"prefix {user % prefixes}", prefix), (f"user {user}", question))
        )
    return trace


def _prices(result: Result) -> str:
    kind = result.summary["meta"]["cost"]["kind"]
    return {"scaled": "SCALED", "roofline": "ESTIMATED, data sheet"}.get(kind, "ESTIMATED, table")
