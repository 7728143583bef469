"""Today's models as geometries: parameters, bytes of the weights, and what the KV cache keeps.

| module | what it does |
|---|---|
| `geometry` | counts parameters and bytes of a model, and of the share of one GPU |
| `parts` | describes experts, kinds of attention, groups of layers, bits of a weight |
| `hugging_face` | reads a `config.json`; `families` and `layouts` help it |
| `names` | gives the model behind a name or a path |
"""

from kvsim.machine.models.geometry import Model, Shard
from kvsim.machine.models.names import load_model, model_of
from kvsim.machine.models.parts import DTYPE_BYTES, Experts, KvGroup, Latent, Linear, Quantization

__all__ = [
    "DTYPE_BYTES",
    "Experts",
    "KvGroup",
    "Latent",
    "Linear",
    "Model",
    "Quantization",
    "Shard",
    "load_model",
    "model_of",
]
