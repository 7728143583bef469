"""KV events: the bytes of vLLM, and what consumers make of them."""

from __future__ import annotations

import socket
from collections import Counter
from math import inf
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from kvsim.against.serve.kv_events import (
    Content,
    KVEvents,
    events_config,
    made_up_tokens,
)
from kvsim.against.serve.session import Session
from kvsim.core.host import NEVER_NS
from kvsim.errors import ConfigError
from kvsim.run.simulation import read_config
from tests.support.serving import SMALL, serving
from tests.unit.against.serve.test_session import made_trace, prompt_of

RECORDED = {
    "0.33.0": (
        "93cb3ff800000000000093de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392"
        "cfffffffffffffffff07b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa"
        "626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa6578"
        "7472615f6b6579739291a473616c74c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e"
        "64ae66756c6c5f617474656e74696f6ede000aa474797065ab426c6f636b53746f726564ac626c6f636b5f6861"
        "736865739109b1706172656e745f626c6f636b5f6861736807a9746f6b656e5f696473920506aa626c6f636b5f"
        "73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f6964"
        "7800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c"
        "6f636b52656d6f766564ac626c6f636b5f6861736865739109a66d656469756da3475055a967726f75705f6964"
        "780000"
    ),
    "0.23.0": (
        "93cb3ff8000000000000939cab426c6f636b53746f72656492cfffffffffffffffff07c0940102030402c0a347"
        "5055c09291a473616c74c000ae66756c6c5f617474656e74696f6ec09cab426c6f636b53746f72656491090792"
        "050602c0a3475055c0c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f7665649109a347"
        "50550000"
    ),
}
"""One batch, encoded by the classes of vLLM 0.33.0 and 0.23.0 (`distributed/kv_events.py`)."""


@pytest.mark.parametrize("version", ["0.33.0", "0.24.0", None, "0.23.0", "0.9.2"])
def test_bytes_are_those_of_vllm(version: str | None) -> None:
    tokens = iter([Content([1, 2, 3, 4], "salt"), Content([5, 6])])
    events = KVEvents(2, lambda keys, size: next(tokens), version)
    events.stored(None, [(1 << 64) - 1, (1 << 70) + 7])
    events.stored(7, [9])
    events.removed([9])
    layout = "0.23.0" if version in ("0.23.0", "0.9.2") else "0.33.0"
    assert msgspec.msgpack.encode(events.batch(1.5)).hex() == RECORDED[layout]
    assert events.batch(2.0) is None


def test_an_adapter_stands_in_every_block() -> None:
    contents = iter([Content([1, 2, 3, 4], "salt", "b"), Content([5, 6], "salt", "b")])
    events = KVEvents(2, lambda keys, size: next(contents), loras=["a", "b"])
    events.stored(None, [1, 2])
    events.stored(2, [3])
    batch = events.batch(0)
    assert batch is not None
    first, then = msgspec.to_builtins(batch)[1]
    assert (first["lora_id"], first["lora_name"]) == (2, "b")
    assert [*map(list, first["extra_keys"]), *map(list, then["extra_keys"])] == [
        *(["b", "salt"], ["b"], ["b"])
    ]


class Index:
    """What a consumer knows of a cache: hash → how often, and the tokens of each block."""

    def __init__(self) -> None:
        self.blocks = Counter[int]()
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.removed = 0

    def take(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            hashes = event["block_hashes"]
            if event["type"] == "BlockRemoved":
                self.removed += len(hashes)
                self.blocks.subtract(hashes)
                assert min(self.blocks[each] for each in hashes) >= 0
                self.blocks += Counter()
                continue
            size, parent = event["block_size"], event["parent_block_hash"]
            before = () if parent is None else self.tokens[parent]
            for place, each in enumerate(hashes):
                before += tuple(event["token_ids"][place * size : (place + 1) * size])
                assert self.tokens.setdefault(each, before) == before
            self.blocks.update(hashes)


def test_a_consumer_knows_the_table_after_every_step() -> None:
    trace, session = made_trace(100, 3), Session(read_config(SMALL))
    index, steps, pool = Index(), Counter[str](), session.parts.blocks.gpu
    events = KVEvents(16, session.asked.of)
    assert session.parts.blocks.report(events)

    def compare(*_: Any) -> None:
        if (batch := events.batch(0)) is not None:
            index.take(msgspec.msgpack.encode(batch))
        contents = [pool.content(block) for block in range(1, pool.fresh)]
        held = [pool.keys[content] & (1 << 64) - 1 for content in contents if content]
        assert index.blocks == Counter(held)
        steps["compared"] += 1

    session.steps.listeners.append(compare)
    entries = [session.send(row) for row in trace.rows]
    while session.next_ns < NEVER_NS:
        session.step()
    assert steps["compared"] > 500 and index.removed > 100
    assert sum(entry.request.num_preemptions for entry in entries) > 10
    known = {tokens[:16] for tokens in index.tokens.values()}
    assert known >= {prompt_of(row)[:16] for row in trace.rows[-5:]}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_events_come_over_zmq_and_again_to_who_missed_them() -> None:
    out, again = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    config = events_config(
        f'{{"enable_kv_cache_events": true, "endpoint": "{out}", "replay_endpoint": "{again}",'
        ' "topic": "kv@pod@small"}'
    )
    context = zmq.Context()
    heard = context.socket(zmq.SUB)
    asked = context.socket(zmq.REQ)
    for each in (heard, asked):
        each.setsockopt(zmq.RCVTIMEO, 20_000)
    with serving(speed=inf, kv_events=config) as (url, _):
        heard.connect(out)
        heard.subscribe(b"kv@")
        body = {"prompt": list(range(100)), "max_tokens": 40, "ignore_eos": True}
        httpx.post(url + "/v1/completions", json=body)
        asked.connect(again)
        asked.send((0).to_bytes(8, "big"))
        first = asked.recv_multipart()
        replayed = [first]
        while asked.getsockopt(zmq.RCVMORE):
            replayed.append(asked.recv_multipart())
    context.destroy(linger=0)
    index = Index()
    topic, sequence, payload = first
    index.take(payload)
    assert (topic, sequence) == (b"kv@pod@small", bytes(8))
    assert next(iter(index.tokens.values())) == tuple(range(16))


@pytest.mark.parametrize("text", ["{", '{"publisher": 3}', '{"endpoints": "tcp://*:1"}'])
def test_a_wrong_configuration_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-events-config: .*as in"):
        events_config(text)


def test_an_engine_without_events_is_refused() -> None:
    config = events_config('{"enable_kv_cache_events": true}')
    for further in ({"enable_prefix_caching": False}, {"kv_offloading_size": 0.1}):
        with (
            pytest.raises(ConfigError, match="publishes none"),
            serving(SMALL | further, kv_events=config),
        ):
            pass


def test_tokens_of_known_keys_are_made_up_alike() -> None:
    tokens = made_up_tokens([5, 6, 5], 16).token_ids
    assert len(tokens) == 48 and tokens[:16] == tokens[32:] != tokens[16:32]
