"""Figures of sessions: what agents wait for is the end of a task, not a first token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvsim.results.phases import Ints, completed, ints

_NS_PER_S = 1e9
_NS_PER_MS = 1e6
_SLOWEST = 0.1
TURNS = ((1, 1), (2, 9), (10, None))
"""First and last of the turns whose TTFT has a figure."""


def session_figures(requests: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the sessions; nothing where no session has a second turn.

    * `mean_s`, `p50_s`, `p90_s`: from when a client wants to send the first turn to the end of the
      last one, pauses included (job completion time), of sessions whose turns all completed;
    * `mean_served_s`: the time from when clients want to send turns to their ends;
      `slowest_tenth_served_s`: the mean of the tenth for which that is longest;
    * `mean_ttft_ms`: by turn;
    * `lost_in_pauses_tokens`: prompt tokens of later turns that were in the cache and evicted;
      `lost_between_sessions_tokens`: of first turns;
    * `computed_tokens`: prompt tokens that no hit saved, and those computed again.
    """
    names = np.asarray(requests.get("session", ()), dtype=object)
    which = np.flatnonzero(names.astype(bool)) if len(names) else np.empty(0, dtype=int)
    if len(which) == len(set(names[which])):
        return {}
    released = ints(requests["released_ns"])
    which = which[np.lexsort((which, released[which]))]
    turn: Ints = np.zeros(len(names), dtype=np.int64)
    members: dict[str, list[int]] = {}
    for index in which.tolist():
        turns = members.setdefault(names[index], [])
        turns.append(index)
        turn[index] = len(turns)
    done, finish = completed(requests), ints(requests["finish_ns"])
    whole = [turns for turns in members.values() if done[turns].all()]
    spans = np.array([finish[turns].max() - released[turns[0]] for turns in whole]) / _NS_PER_S
    served = np.array([(finish[turns] - released[turns]).sum() for turns in whole]) / _NS_PER_S
    slowest = np.sort(served)[-max(1, round(_SLOWEST * len(served))) :]
    figures: dict[str, Any] = {
        "num": len(members),
        "completed": len(whole),
        "mean_s": _mean(spans),
        "p50_s": float(np.percentile(spans, 50)) if len(spans) else None,
        "p90_s": float(np.percentile(spans, 90)) if len(spans) else None,
        "mean_served_s": _mean(served),
        "slowest_tenth_served_s": _mean(slowest),
        "mean_ttft_ms": {
            label: _mean(_ttft(requests)[done & (turn >= first) & (turn <= (last or turn.max()))])
            for label, (first, last) in zip(("first", "early", "late"), TURNS, strict=True)
        },
        "computed_tokens": int(
            (ints(requests["input_length"]) - ints(requests["num_cached_tokens"]))[which].sum()
            + ints(requests["recomputed_tokens"])[which].sum()
        ),
    }
    if "evicted_tokens" in requests:
        lost = ints(requests["evicted_tokens"])
        figures["lost_in_pauses_tokens"] = int(lost[turn > 1].sum())
        figures["lost_between_sessions_tokens"] = int(lost[turn == 1].sum())
    return {"sessions": figures}


def _ttft(requests: Mapping[str, Any]) -> Any:
    return (ints(requests["first_token_ns"]) - ints(requests["arrival_ns"])) / _NS_PER_MS


def _mean(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None
