"""Blocks that are counted against blocks that have names."""

import random

import pytest

from kvsim.engine.request import Request, Sequence
from kvsim.engine.tables import Tables
from kvsim.fast.counted import COUNTED_TWINS

SIZES = {"block_size": 4, "num_gpu_blocks": 30}


def made(kind: type[Tables]) -> Tables:
    more = {} if "V1" in kind.__name__ else {"num_cpu_blocks": 20}
    return kind(**SIZES, **more)


COUNTED = [kind for kind in COUNTED_TWINS if not kind.needs_keys]


@pytest.mark.parametrize("named", COUNTED, ids=lambda kind: kind.__name__)
def test_every_move_leaves_the_same_numbers(named: type[Tables]) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        pair = made(named), made(COUNTED_TWINS[named])
        held: list[tuple[Sequence, Sequence]] = []
        for number in range(60):
            move = rng.choice(("allocate", "append", "append", "free", "swap"))
            if move == "allocate":
                length = rng.randrange(1, 20)
                twins = tuple(Request(number, str(number), length) for _ in pair)
                if pair[0].admission_need(twins[0]) <= pair[0].gpu.free:
                    for blocks, request in zip(pair, twins, strict=True):
                        blocks.allocate(request.sequences[0])
                    held.append((twins[0].sequences[0], twins[1].sequences[0]))
            elif held:
                chosen = rng.choice(held)
                swapped = pair[0].swapped(chosen[0])
                for blocks, sequence in zip(pair, chosen, strict=True):
                    target = blocks.gpu if swapped else blocks.cpu
                    if move == "free":
                        blocks.free(sequence)
                    elif move == "append" and blocks.gpu.free and not swapped:
                        sequence.length += 1
                        blocks.append(sequence)
                    elif move == "swap" and blocks.swap_need([sequence], target) <= target.free:
                        (blocks.swap_in if swapped else blocks.swap_out)([sequence])
                if move == "free":
                    held.remove(chosen)
            same = [(b.census(), b.gpu.free, b.cpu.free) for b in pair]
            assert same[0] == same[1], f"seed {seed}, move {number}: {move}"
            for left, right in held:
                assert len(left.table) == len(right.table)
                assert left.filled == right.filled
        for side, blocks in enumerate(pair):
            blocks.audit([both[side].request for both in held])
