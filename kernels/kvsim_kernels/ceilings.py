"""The most that the device does: plain copies and one large matrix product."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import torch

from kvsim_kernels.forward import TORCH_DTYPES, Decoder
from kvsim_kernels.timing import Clock, Timing


def time(shape: dict[str, Any], decoder: Decoder, clock: Clock) -> Timing:
    """A ceiling by its name `what`.

    gemm: m x n x k in the decoder's dtype. copy: `bytes` read and as many written on the device.
    h2d, d2h: `bytes` over the host link from or to pinned memory; both: as many each way at once.
    """
    if shape["what"] == "gemm":
        return _gemm(shape, decoder, clock)
    size, device = shape["bytes"], decoder.device
    here = torch.ones(size // 4, device=device)
    if shape["what"] == "copy":
        there = torch.empty_like(here)
        return clock.alone(lambda: there.copy_(here))
    host = torch.ones(size // 4, pin_memory=decoder.cuda)
    if shape["what"] == "h2d":
        return clock.whole(lambda: here.copy_(host, non_blocking=True))
    if shape["what"] == "d2h":
        return clock.whole(lambda: host.copy_(here, non_blocking=True))
    more_host, more_here = torch.ones(size // 4, pin_memory=True), torch.empty_like(here)
    side = torch.cuda.Stream()

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            more_here.copy_(more_host, non_blocking=True)
        host.copy_(here, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    return clock.whole(both)


def _gemm(shape: dict[str, Any], decoder: Decoder, clock: Clock) -> Timing:
    dtype, device = TORCH_DTYPES[decoder.geometry.dtype], decoder.device
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        empty = torch.empty(rows, columns, dtype=dtype, device=device)
        return empty.normal_(generator=generator)

    left, right = matrix(shape["m"], shape["k"]), matrix(shape["k"], shape["n"])
    out = torch.empty(shape["m"], shape["n"], dtype=dtype, device=device)
    return clock.alone(lambda: torch.mm(left, right, out=out))
