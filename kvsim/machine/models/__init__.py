"""Today's models as geometries: parameters, bytes of the weights, and what the KV cache keeps.

| module | what it does |
|---|---|
| `geometry` | counts parameters and bytes of a model, and of the share of one GPU |
| `parts` | describes experts, latent attention, linear attention, groups of layers |
| `compressed` | counts layers of compressed attention |
| `weights` | says how many bits a quantised weight takes |
| `hugging_face` | reads a `config.json`; `families`, `layouts`, `checkpoint` and `vision` help it |
| `names` | finds the shipped geometry that a spelling means |
| `beside` | counts what a GPU holds beside it: a drafter, and slots for adapters |
| `loading` | gives the model behind a name or a path |
"""

from kvsim.machine.models.geometry import Model, Shard
from kvsim.machine.models.loading import load_model, model_of
from kvsim.machine.models.parts import Experts, KvGroup, Latent, Linear
from kvsim.machine.models.weights import DTYPE_BYTES, Quantization

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
