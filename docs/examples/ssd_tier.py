"""An SSD below the CPU tier of vLLM V1's KV offload.

    PYTHONPATH=docs/examples kvsim run --trace traces/agents.jsonl --num-prompts 40 \
        --request-rate 4 --model llama-3.1-8b --hardware h100 --num-gpu-blocks-override 2500 \
        --max-model-len 30000 --kv-offloading-size 3 \
        --set kv_connector_extra_config.spec_name=TieringOffloadingSpec \
        --set 'kv_connector_extra_config.secondary_tiers=[{type = "ssd_tier:Ssd"}]'

4,560 prompt tokens are loaded from CPU memory, and 816 come back from the drive.
"""

from collections import OrderedDict

from kvsim.engines.vllm_v1.storage import Storage


class Ssd(Storage):
    """One NVMe drive of PCIe 4 that keeps what was written last.

    It reads 7.0 GB/s (nominal; Mooncake's report on SSD offload). The report names no figure for
    writes; 5 GB/s is an estimate.
    """

    def __init__(
        self,
        *,
        chunk_bytes: int,
        capacity_gib: float = 1000,
        read_gb_s: float = 7.0,
        write_gb_s: float = 5.0,
    ) -> None:
        self._most = int(capacity_gib * 2**30) // chunk_bytes
        self._read_ns, self._write_ns = chunk_bytes / read_gb_s, chunk_bytes / write_gb_s
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def holds(self, key: int) -> bool:
        return key in self._chunks

    def keep(self, keys: list[int]) -> None:
        self._chunks.update(dict.fromkeys(keys))
        while len(self._chunks) > self._most:
            self._chunks.popitem(last=False)

    def read_ns(self, chunks: int) -> int:
        return round(chunks * self._read_ns)

    def write_ns(self, chunks: int) -> int:
        return round(chunks * self._write_ns)
