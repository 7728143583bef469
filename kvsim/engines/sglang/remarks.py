"""What may surprise a user of SGLang 0.5.23, told where it happened."""

from __future__ import annotations

from collections.abc import Mapping

from kvsim.engines.sglang.ratio import NewTokenRatio


def remarks(happened: Mapping[str, int], ratio: NewTokenRatio) -> list[str]:
    """Returns a line for each surprise. `happened`: event → how often it happened in a run."""
    found = []
    if happened["reserved"]:
        found.append(
            f"{happened['reserved']:,} times, the head of the queue was refused though memory was"
            " free: SGLang keeps it for what running requests are expected to generate, and wants"
            " room for all that the new one may generate; clients that announce max_new_tokens"
            " need less"
        )
    if happened["retracted"]:
        found.append(
            f"{happened['retracted']:,} retractions; the new-token ratio was between"
            f" {ratio.lowest:.3f} and {ratio.highest:.3f}. A higher schedule_conservativeness"
            " admits less and retracts less"
        )
    if happened["aborted"]:
        found.append(
            f"{happened['aborted']:,} retracted requests were aborted, because max_queued_requests"
            " counts them like new ones"
        )
    if 0 < happened["arrived"] == happened["ignore_eos"]:
        found.append(
            "every request ignores the end of sequence, so SGLang reserves all that each may"
            " generate, and the new-token ratio has no effect; requests that may stop early are"
            " admitted sooner, and may be retracted"
        )
    if happened["stuck"]:
        found.append(
            f"{happened['stuck']:,} prompts need nearly the whole pool: SGLang wants room for a"
            " page more, so it never admits them, and they block the queue for ever"
        )
    if happened["forgotten"]:
        found.append(
            f"{happened['forgotten']:,} times, a prompt was cut while another was unfinished:"
            " SGLang goes on with the later one, and the other decodes without the rest"
        )
    return found
