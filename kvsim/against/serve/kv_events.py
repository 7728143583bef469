"""KV events as vLLM 0.33.0 publishes them: msgpack batches over ZMQ, with replay.

Sources: `distributed/kv_events.py`, `config/kv_events.py`, `v1/core/block_pool.py`. Up to 0.23.0,
an event is an array that begins with its type; from 0.24.0 on, a map. A hash is 64 bits of the key
of a block; consumers that hash anew take the token ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh32_intdigest

from kvsim.errors import ConfigError
from kvsim.settings.versions import release

_64_BITS = (1 << 64) - 1
GPU = "GPU"
_MAPS_SINCE = (0, 24)


class _Stored(msgspec.Struct):
    """Blocks that can be hit from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockStored(_Stored, omit_defaults=True, tag=True):
    """`_Stored`, with two keys more that a single server leaves out of the map."""

    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks whose content is lost."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class StoredArray(_Stored, array_like=True, tag="BlockStored"):
    """`BlockStored` as vLLM 0.23.0 has it."""


class RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    """`BlockRemoved` as vLLM 0.23.0 has it."""


Event = BlockStored | BlockRemoved | StoredArray | RemovedArray


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of one step."""

    ts: float
    """Seconds."""
    events: list[Event]
    data_parallel_rank: int | None = None


class Content(NamedTuple):
    """Of blocks: their token ids, and what else their hashes depend on."""

    token_ids: Sequence[int]
    salt: str | None = None
    """The cache salt of their request."""
    lora: str | None = None
    """The name of its adapter."""


Contents = Callable[[Sequence[int], int], Content]
"""The content of blocks with these keys and so many tokens."""


class KVEvents:
    """What a prefix cache reports (`kvsim.core.blocks.CacheEvents`), as events of vLLM."""

    def __init__(
        self,
        block_size: int,
        contents: Contents,
        vllm_version: str | None = None,
        loras: Sequence[str] = (),
    ) -> None:
        """`vllm_version`: whose layout events have; None: that of the latest. `loras`: adapters, in
        the order in which the server was told of them."""
        self._block_size, self._contents, self._loras = block_size, contents, loras
        maps = vllm_version is None or release(vllm_version) >= _MAPS_SINCE
        self._kinds: Any = (BlockStored, BlockRemoved) if maps else (StoredArray, RemovedArray)
        self._made: list[Event] = []

    def stored(self, parent: int | None, keys: Sequence[int]) -> None:
        """Reports blocks that can be hit from now on."""
        tokens, salt, lora = self._contents(keys, self._block_size)
        names = (lora,) if lora else ()
        # Adapters are in the hash of every block, a salt in that of the first, on which the others
        # depend.
        first = (*names, salt) if salt and parent is None else names
        extra = [first or None, *[names or None] * (len(keys) - 1)]
        self._made.append(
            self._kinds[0](
                [key & _64_BITS for key in keys],
                None if parent is None else parent & _64_BITS,
                list(tokens),
                self._block_size,
                self._loras.index(lora) + 1 if lora else None,
                GPU,
                lora,
                extra if names or salt else None,
                0,
                "full_attention",
            )
        )

    def labelled(self, keys: Sequence[int], first: int) -> None:
        """Reports the blocks from `first` on of a sequence with these leading keys."""
        self.stored(keys[first - 1] if first else None, keys[first:])

    def removed(self, keys: Sequence[int]) -> None:
        """Reports blocks whose content is lost."""
        hashes = [key & _64_BITS for key in keys]
        self._made.append(self._kinds[1](hashes, GPU, 0))

    def batch(self, ts: float) -> Batch | None:
        """The events since the last call; None: there are none."""
        if not self._made:
            return None
        made, self._made = self._made, []
        return Batch(ts, made, 0)


def made_up_tokens(keys: Sequence[int], block_size: int) -> Content:
    """Token ids for blocks of which only the keys are known: equal keys have equal tokens."""
    seeds = [(key & _64_BITS).to_bytes(8, "little") for key in keys]
    # 17 bits, as ids of usual vocabularies have.
    return Content([xxh32_intdigest(s, k) >> 15 for s in seeds for k in range(block_size)])


class KVEventsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`--kv-events-config` of `vllm serve`. Unless an endpoint is given, only this machine is
    served."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


def events_config(given: str | dict[str, Any]) -> KVEventsConfig:
    """Raises `ConfigError`."""
    try:
        table = msgspec.json.decode(given) if isinstance(given, str) else given
        return msgspec.convert(table, KVEventsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--kv-events-config: {error}; give JSON as vllm serve takes it, as in"
            ' \'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\''
        ) from None


class Publisher:
    """Sends batches to whoever subscribes, and those of late again to whoever asks.

    Sending never waits: beyond `hwm` messages, a slow subscriber misses some, as with vLLM.
    """

    END = (-1).to_bytes(8, "big", signed=True)

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises `ConfigError` if an address cannot be had."""
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic, self._number = config.topic.encode(), count()
        self._kept = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)
        self._out = self._socket(zmq.PUB, config.endpoint, config.hwm)
        self.replay: Any = None
        if config.replay_endpoint is not None:
            self.replay = self._socket(
                zmq.ROUTER, config.replay_endpoint, 2 * (config.buffer_steps + 1)
            )

    def publish(self, batch: Batch) -> None:
        """Sends the events of a step."""
        sequence, payload = next(self._number).to_bytes(8, "big"), self._encode(batch)
        self._out.send_multipart((self._topic, sequence, payload), self._zmq.NOBLOCK)
        self._kept.append((sequence, payload))

    def answer(self) -> None:
        """Answers those who ask for what they missed."""
        while self.replay is not None and self.replay.poll(0):
            who, *rest = self.replay.recv_multipart()
            if len(rest) != 2:
                continue
            for sequence, payload in [*self._kept]:
                if sequence >= rest[1]:
                    self.replay.send_multipart((who, b"", self._topic, sequence, payload))
            self.replay.send_multipart((who, b"", b"", self.END, b""))

    def close(self) -> None:
        """Sends what is under way, for a second at most."""
        self._context.destroy(linger=1000)

    def _socket(self, kind: Any, endpoint: str, most: int) -> Any:
        made = self._context.socket(kind)
        made.set_hwm(most)
        try:
            # As vLLM does; but an address of this machine is bound, too.
            binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
            (made.bind if binds or "//127.0.0.1:" in endpoint else made.connect)(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--kv-events-config: {endpoint}: {error}; give another endpoint"
            ) from None
        return made
