"""Which chunks of the tier in CPU memory are evicted."""

from kvsim.engines.vllm_v1.cpu_tier import Access, Arc


def access(keys: list[str], reused: bool) -> Access:
    made = Access()
    made.seen = dict.fromkeys(keys)
    made.position = {key: place for place, key in enumerate(keys)}
    (made.reused if reused else made.inserted).update(keys)
    return made


def test_offers_that_meet_ghosts_move_the_target_by_how_many_the_other_list_has() -> None:
    """Megiddo and Modha, FAST 2003: by at least 1, and by the ratio of the ghosts if that is more.
    Three ghosts of chunks used once, each met, raise the target to 3; the one ghost of a chunk used
    again takes all three back, so that a chunk used once goes next."""
    arc = Arc(4)
    arc.inserted(["again"], access(["again"], False))
    arc.ended(access(["again"], True))
    assert arc.evict(1, bool) == ["again"]
    once = ["c", "d", "e"]
    arc.inserted(once, access(once, False))
    assert arc.evict(3, bool) == once
    arc.inserted(["x", "y"], access(["x", "y"], False))
    arc.ended(access(["y"], True))
    for key in once:
        arc.missed([key])
    arc.missed(["again"])
    assert arc.evict(1, bool) == ["x"]


def test_a_raised_target_keeps_chunks_used_once() -> None:
    arc = Arc(4)
    arc.inserted(["c"], access(["c"], False))
    assert arc.evict(1, bool) == ["c"]
    arc.inserted(["x", "y"], access(["x", "y"], False))
    arc.ended(access(["y"], True))
    for _ in range(2):
        arc.missed(["c"])
    assert arc.evict(1, bool) == ["y"]
