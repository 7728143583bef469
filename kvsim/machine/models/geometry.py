"""Geometry of a decoder: its parameters, the bytes of its weights, and what it keeps of a token.

A layer has attention and an MLP. Attention keeps keys and values of all tokens, of the last ones
(a sliding window), a latent vector, or a state of fixed size. The MLP is dense or made of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from kvsim.errors import ConfigError
from kvsim.machine.models.parts import (
    DTYPE_BYTES,
    OF_ANY_BITS,
    Compressed,
    Experts,
    ExpertWeights,
    Heads,
    Indexer,
    KvGroup,
    Latent,
    Layer,
    LayerType,
    Linear,
    Natural,
    Part,
    Positive,
    Quantization,
    quantization,
)

MOST_GPUS = 1024
"""Degrees of parallelism that a message considers."""


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decoder; keys are those of a Hugging Face `config.json` where it has them."""

    name: str
    num_hidden_layers: Annotated[int, Meta(ge=1, le=10_000)]
    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    """Columns of the dense MLP."""
    vocab_size: Positive
    max_position_embeddings: Positive
    """Longest sequence in tokens."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding table."""
    qkv_bias: bool = False
    """Whether query, key and value projections have a bias (Qwen2)."""
    o_bias: bool = False
    """Whether the output projection of attention has a bias (gpt-oss)."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head (Qwen3)."""
    attn_output_gate: bool = False
    """Whether a gate as wide as the queries weighs the output of attention (Qwen3-Next)."""
    attention_sinks: bool = False
    """Whether each head has a learned sink (gpt-oss)."""
    norms_per_layer: Natural = 2
    """Norms over the hidden size in each layer; Gemma 2 and 3 have 4."""
    gated_mlp: bool = True
    """Whether the MLP has gate, up and down projections; otherwise up and down."""
    sliding_window: Positive | None = None
    """Tokens that layers of `sliding_attention` keep."""
    attention_chunk_size: Positive | None = None
    """Tokens of a chunk of layers of `chunked_attention` (Llama 4)."""
    layer_types: tuple[LayerType, ...] = ()
    """Attention of the layers; a shorter list is repeated. Empty: full attention everywhere."""
    mlp_layer_types: tuple[Literal["dense", "sparse", "none"] | Natural, ...] = ()
    """MLP of the layers, a number being the columns of a dense one. Empty: as `experts` says."""
    heads: dict[LayerType, Heads] = {}
    """Heads of the layers of a type, where they are others than those above."""
    v_head_dim: Positive | None = None
    """Size of a head's value; None: `head_dim`."""
    num_kv_shared_layers: Natural = 0
    """Layers at the end that use the keys and values of earlier ones (Gemma 4)."""
    experts: Experts | None = None
    latent: Latent | None = None
    compressed: Compressed | None = None
    linear: Linear | None = None
    """Geometry of the layers of `linear_attention`."""
    indexer: Indexer | None = None
    vision_parameters: Natural = 0
    """Parameters of other towers and their projector; they take memory and nothing else."""
    apart_parameters: Natural = 0
    """Parameters of towers that engines load, and that the family's text model in `transformers`
    does not have (Qwen3.5): part of the weights, not of `parameters`."""
    lookup_parameters: Natural = 0
    """Parameters of further tables of which a token reads a row (Gemma 4's per-layer inputs)."""
    quantization: Quantization | None = None
    """How the weights are stored; None: all in `torch_dtype`."""
    torch_dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    source: str
    """Where the figures come from."""
    remarks: tuple[str, ...] = ()
    """What a reader of these figures should know: defaults taken, names resolved."""

    def __post_init__(self) -> None:
        kinds = set(self.layer_types)
        for kind, key, needed in (
            ("sliding_attention", "sliding_window", self.sliding_window),
            ("chunked_attention", "attention_chunk_size", self.attention_chunk_size),
            ("linear_attention", "linear_num_value_heads", self.linear),
        ):
            if kind in kinds and needed is None:
                raise ValueError(f"{key}: missing, but layer_types has {kind}")
        if kinds and kinds <= {"linear_attention", "none"}:
            raise ValueError(
                "layer_types: no layer keeps keys and values; there is nothing to cache"
            )
        for key in ("layer_types", "mlp_layer_types"):
            entries = len(getattr(self, key))
            if entries > self.num_hidden_layers:
                raise ValueError(f"{key}: {entries} entries for {self.num_hidden_layers} layers")

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.shard(1).parameters

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a run should show where one block table serves all layers: its remarks,
        and what the KV cache leaves out."""
        found = list(self.remarks)
        for group in self.shard(1).kv_groups:
            of = f"{group.layers} of {self.num_hidden_layers} layers"
            if self.compressed is not None and group.window is not None:
                found.append(
                    f"{self.name}: {of} keep the last {group.window:,} tokens besides, and"
                    " states, which the number of blocks leaves out"
                )
            elif group.window is not None:
                found.append(
                    f"{self.name}: {of} need only the last {group.window:,} tokens;"
                    " all layers kept: an upper bound"
                )
            if group.kind == "linear_attention":
                each = self.shard(1).state_bytes
                found.append(
                    f"{self.name}: {of} keep a state instead of keys and values, together"
                    f" {each:,} bytes a sequence, which the number of blocks leaves out"
                )
        return tuple(found)

    @property
    def keeping_layers(self) -> int:
        """Layers at the start that do not use the keys and values of others."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def expert_layers(self) -> int:
        """Layers with experts in place of a dense MLP."""
        return [self.mlp_columns(index) for index in range(self.num_hidden_layers)].count(None)

    def mlp_columns(self, index: int) -> int | None:
        """Columns of the dense MLP of a layer, counted from 0: 0 without any; None: experts."""
        if not self.mlp_layer_types:
            sparse = self.experts is not None and self.experts.in_layer(index)
            return None if sparse else self.intermediate_size
        kind = self.mlp_layer_types[index % len(self.mlp_layer_types)]
        named = {"dense": self.intermediate_size, "sparse": None, "none": 0}
        return kind if isinstance(kind, int) else named[kind]

    @property
    def expert_weights(self) -> ExpertWeights | None:
        """How kernels know the weights of its experts (`Quantization.expert_weights`)."""
        return self.quantization.expert_weights if self.quantization else "bfloat16"

    @property
    def special(self) -> tuple[str, ...]:
        """What sets it apart from a dense 16-bit decoder with full attention, in words.

        Profiles are scaled to a decoder that has none of this.
        """
        kinds = {self.layer_type(index) for index in range(self.num_hidden_layers)}
        features = {
            "experts": self.experts is not None,
            "latent attention": self.latent is not None or self.compressed is not None,
            "sliding windows": "sliding_attention" in kinds,
            "chunked attention": "chunked_attention" in kinds,
            "linear attention": "linear_attention" in kinds,
            "layers of other heads": bool(self.heads),
            "layers without attention or MLP": "none" in kinds or 0 in self.mlp_layer_types,
            "an MLP without gate": not self.gated_mlp,
        }
        stored = [f"{self.quantization.method} weights"] if self.quantization else []
        return (*(words for words, has in features.items() if has), *stored)

    def dtype(self, wanted: str) -> str:
        """Type of unquantised weights and of activations; `auto` is the model's own.

        Of a float32 model, `auto` is float16 (vLLM 0.6.3, vllm/config.py,
        `_get_and_verify_dtype`).
        """
        if wanted != "auto":
            return wanted
        return "float16" if self.torch_dtype == "float32" else self.torch_dtype

    def quantized(self, method: str) -> Model:
        """The model with its weights stored by a method, e.g. `fp8`, `awq` or `gptq`.

        Weights that are stored so already stay as they are, and so do others where the method is a
        format of files with any number of bits. Raises `ConfigError` for an unknown method.
        """
        if self.quantization is not None and method in (self.quantization.method, *OF_ANY_BITS):
            return self
        return replace(self, quantization=quantization(method))

    def weight_bytes(
        self,
        dtype: str,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
    ) -> int:
        """Bytes of the weights on one GPU, of the heaviest stage of a pipeline.

        The first stage holds the embeddings and other towers, the last one the output projection.
        With `expert_parallel_size` above 1, each GPU holds whole experts instead of columns of all
        of them. Raises `ConfigError` for degrees that the model does not allow.
        """
        shard = self.shard(tensor_parallel_size, expert_parallel_size)
        stages = self.stages(pipeline_parallel_size)
        return max(shard.weight_bytes(dtype, stage) for stage in stages)

    def stages(self, pipeline_parallel_size: int) -> list[range]:
        """The layers of each pipeline stage.

        Layers that do not divide evenly go to the stages before the last one, the last of these
        first. Source: vLLM 0.33.0, distributed/utils.py, `get_pp_indices`. Raises `ConfigError`
        for more stages than layers.
        """
        pp = pipeline_parallel_size
        if not 1 <= pp <= self.num_hidden_layers:
            raise ConfigError(
                f"pipeline_parallel_size: {self.name} has {self.num_hidden_layers} layers for {pp}"
                f" stages; use 1 to {self.num_hidden_layers}"
            )
        each, more = divmod(self.num_hidden_layers, pp)
        first_larger = pp - 1 - more
        found, start = [], 0
        for stage in range(pp):
            size = each + (first_larger <= stage < pp - 1)
            found.append(range(start, start + size))
            start += size
        return found

    def layer_type(self, index: int) -> LayerType:
        """The attention of a layer, counted from 0."""
        if not self.layer_types:
            return "full_attention"
        return self.layer_types[index % len(self.layer_types)]

    def heads_of(self, kind: LayerType) -> Heads:
        """The heads of the layers of a type."""
        own = Heads(
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim or self.head_dim,
        )
        return self.heads.get(kind, own)

    def shard(self, tensor_parallel_size: int, expert_parallel_size: int = 1) -> Shard:
        """The share of one of `tensor_parallel_size` GPUs, or a `ConfigError` if none is possible.

        Attention heads and MLP columns are divided; so are key/value heads, or they are replicated
        where there are fewer of them than GPUs: max(1, heads // GPUs) each (vLLM 0.6.3,
        vllm/config.py, `get_num_kv_heads`).
        """
        tp, ep = tensor_parallel_size, expert_parallel_size
        if not self._divides(tp, ep):
            possible = [n for n in range(1, MOST_GPUS + 1) if self._divides(n, ep)]
            columns = " and ".join(map(str, self._columns(ep)))
            raise ConfigError(
                f"tensor_parallel_size: {tp} GPUs cannot share the {self.num_attention_heads}"
                f" attention heads, {self.num_key_value_heads} key/value heads and"
                f" {columns or 'no'} MLP columns of {self.name} evenly;"
                f" use one of {', '.join(map(str, possible))}"
            )
        return Shard(
            model=self,
            tensor_parallel_size=tp,
            expert_parallel_size=ep,
            heads=self.num_attention_heads // tp,
            kv_heads=max(1, self.num_key_value_heads // tp),
            intermediate_size=-(-self.intermediate_size // tp),
            vocab_size=-(-self.vocab_size // tp),
        )

    def _divides(self, tp: int, ep: int) -> bool:
        linear, one = self.linear, self.latent is not None or self.compressed is not None
        shared = [self.num_attention_heads, *self._columns(ep)]
        # The one head of a short convolution stands for all of its columns, which are divided.
        if linear is not None and linear.kind != "short_conv":
            shared += [linear.linear_num_key_heads, linear.linear_num_value_heads]
        kv_heads = {self.num_key_value_heads, *(h.num_key_value_heads for h in self.heads.values())}
        # Heads of keys and values are divided, or stand on several GPUs each; a latent vector is on
        # all.
        replicates = one or all(max(n, tp) % min(n, tp) == 0 for n in kv_heads)
        return replicates and all(count % tp == 0 for count in shared)

    def _columns(self, ep: int) -> list[int]:
        """Columns of the MLPs that tensor parallelism divides."""
        experts = self.experts
        if experts is None:
            return [self.intermediate_size]
        dense = {self.mlp_columns(index) for index in range(self.num_hidden_layers)}
        found = [columns for columns in dense if columns]
        if experts.shared_expert_intermediate_size:
            found.append(experts.shared_expert_intermediate_size)
        if ep == 1:
            found.append(experts.moe_intermediate_size)
        return found


class Shard(Struct, frozen=True):
    """What one GPU holds of a model under tensor parallelism; the whole model for one GPU."""

    model: Model
    tensor_parallel_size: int
    expert_parallel_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    """Columns of each of the gate and up projections of the dense MLP."""
    vocab_size: int
    """Rows of the embedding and output tables."""

    @property
    def linear_parameters(self) -> int:
        """Weights of the matrix products of all layers that every token passes through."""
        return sum(each.attention + each.mlp + each.router for each in self._layers())

    @property
    def expert_parameters(self) -> int:
        """Weights of the routed experts of all layers; a token passes through few of them."""
        return sum(each.experts for each in self._layers())

    @property
    def experts_held(self) -> int:
        """Routed experts of a layer that this GPU holds, whole or in columns."""
        experts = self.model.experts
        return 0 if experts is None else -(-experts.num_experts // self.expert_parallel_size)

    @property
    def expert_columns(self) -> int:
        """Columns of the gate and of the up projection of each of `experts_held`."""
        experts = self.model.experts
        if experts is None:
            return 0
        divided = self.tensor_parallel_size if self.expert_parallel_size == 1 else 1
        return experts.moe_intermediate_size // divided

    @property
    def head_parameters(self) -> int:
        """Weights of the output projection, which every sampled row passes through."""
        return self.vocab_size * self.model.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters in GPU memory; norms are replicated on every GPU."""
        tables = self.head_parameters * (1 if self.model.tie_word_embeddings else 2)
        layers = sum(each.parameters for each in self._layers())
        further = self._further_parameters - self._divided(self.model.apart_parameters)
        # The hidden size is that of the last norm.
        return layers + tables + self.model.hidden_size + further

    @property
    def qkv_size(self) -> int:
        """Elements of the query, key and value of one token."""
        return (self.heads + 2 * self.kv_heads) * self.model.head_dim

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """What the layers keep of a sequence, by groups of layers that keep the same."""
        return self.kv_groups_of(range(self.model.num_hidden_layers))

    def kv_groups_of(self, layers: range) -> tuple[KvGroup, ...]:
        """The groups of these layers alone, e.g. of a pipeline stage."""
        model = self.model
        if model.compressed is not None:
            return tuple(self._compressed_groups(model.compressed, layers))
        # Layers that use the keys and values of earlier ones keep nothing.
        keeping = range(layers.start, min(layers.stop, model.keeping_layers))
        kinds = [model.layer_type(index) for index in keeping]
        found = [self._group(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds)]
        if model.indexer is not None:
            indexed = sum(index not in model.indexer.without for index in keeping)
            found.append(model.indexer.group(indexed))
        return tuple(group for group in found if group.kind != "none")

    def token_bytes(self, kv_dtype: str, layers: range | None = None) -> int:
        """Bytes of the KV cache that one token takes on this GPU, if every layer keeps it.

        `layers` restricts it to a pipeline stage. Sliding windows keep fewer tokens, so it is an
        upper bound for them. A latent vector is on every GPU in full. Linear attention keeps
        nothing of a token. Source: vLLM 0.33.0, v1/kv_cache_interface.py.
        """
        groups = self.kv_groups if layers is None else self.kv_groups_of(layers)
        if self.model.compressed is not None:  # its windows hardly grow with a sequence
            groups = tuple(group for group in groups if group.window is None)
        return ceil(
            sum(group.layers * group.token_bytes(DTYPE_BYTES[kv_dtype]) for group in groups)
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence on this GPU, in all layers of linear attention."""
        return sum(group.layers * group.state_bytes for group in self.kv_groups)

    def linear_bytes(self, dtype: str) -> float:
        """Bytes of `linear_parameters`, which every step reads."""
        attention, mlp = self._bytes_each("attention", dtype), self._bytes_each("mlp", dtype)
        element = DTYPE_BYTES[self.model.dtype(dtype)]
        return sum(
            each.attention * attention + each.mlp * mlp + each.router * element
            for each in self._layers()
        )

    def expert_bytes(self, dtype: str) -> float:
        """Bytes of `expert_parameters`."""
        return self.expert_parameters * self._bytes_each("experts", dtype)

    def weight_bytes(self, dtype: str, layers: range | None = None) -> int:
        """Bytes of the weights of a pipeline stage with these layers; None: of the whole model."""
        model = self.model
        count, element = model.num_hidden_layers, DTYPE_BYTES[model.dtype(dtype)]
        stage = range(count) if layers is None else layers
        first, last = stage.start == 0, stage.stop == count
        # A tied table is on the first and on the last stage, but once where they are one.
        tables = first + last if not model.tie_word_embeddings else first or last
        others = tables * self.head_parameters
        others += model.hidden_size if last else 0
        others += self._further_parameters if first else 0
        return ceil(others * element + self.layer_bytes(dtype, stage))

    def layer_bytes(self, dtype: str, layers: range) -> float:
        """Bytes of the weights of these layers alone."""
        found, element = 0.0, DTYPE_BYTES[self.model.dtype(dtype)]
        parts: tuple[Part, ...] = ("attention", "mlp", "experts")
        sizes = {part: self._bytes_each(part, dtype) for part in parts}
        for index in layers:
            each = self.layer(index)
            found += each.attention * sizes["attention"] + each.mlp * sizes["mlp"]
            found += each.experts * sizes["experts"] + (each.router + each.vectors) * element
        return found

    def layer(self, index: int) -> Layer:
        """The parameters of a layer, counted from 0."""
        model = self.model
        attention, vectors = self._attention(index)
        vectors += model.norms_per_layer * model.hidden_size
        columns = model.mlp_columns(index)
        if columns is not None:
            matrices = 3 if model.gated_mlp else 2
            mlp = matrices * model.hidden_size * -(-columns // self.tensor_parallel_size)
            return Layer(attention, mlp, 0, 0, vectors)
        shared, routed, router, biases = self._experts()
        return Layer(attention, shared, routed, router, vectors + biases)

    def _layers(self) -> list[Layer]:
        return [self.layer(index) for index in range(self.model.num_hidden_layers)]

    def _attention(self, index: int) -> tuple[int, int]:
        """Weights of the products of a layer's attention, of whatever kind, and its vectors."""
        model, kind, tp = self.model, self.model.layer_type(index), self.tensor_parallel_size
        if model.compressed is not None:
            return self._compressed_attention(model.compressed, index)
        if kind == "linear_attention":
            assert model.linear is not None
            products, vectors = model.linear.parameters(model.hidden_size, tp)
        elif kind == "none":
            products, vectors = 0, 0
        elif model.latent is not None:
            products, vectors = self._latent_attention(model.latent)
        else:
            products, vectors = self._full_attention(kind, index >= model.keeping_layers)
        if model.indexer is not None and index not in model.indexer.without:
            query = model.latent and model.latent.q_lora_rank
            products += model.indexer.parameters(model.hidden_size, query or model.hidden_size)
        return products, vectors

    def _full_attention(self, kind: LayerType, shares: bool) -> tuple[int, int]:
        """The same of a layer that attends with keys and values; one that `shares` them has queries
        only."""
        model, tp = self.model, self.tensor_parallel_size
        own = model.heads_of(kind)
        heads, kv_heads = own.num_attention_heads // tp, max(1, own.num_key_value_heads // tp)
        queries, outputs = heads * own.head_dim, heads * own.v_head_dim
        keys = kv_heads * own.head_dim
        values = 0 if own.attention_k_eq_v else kv_heads * own.v_head_dim
        if shares:
            keys = values = 0
        products = model.hidden_size * (queries + keys + values + outputs)
        if model.attn_output_gate:
            products += model.hidden_size * queries
        vectors = queries + keys + values if model.qkv_bias else 0
        vectors += model.hidden_size if model.o_bias else 0
        vectors += 2 * own.head_dim if model.qk_norm else 0
        vectors += heads if model.attention_sinks else 0
        return products, vectors

    def _latent_attention(self, latent: Latent) -> tuple[int, int]:
        """Weights of the products of a latent attention layer, and its vectors.

        The projections into latent vectors are on every GPU in full; those out of them are divided
        by heads (vLLM 0.33.0, model_executor/models/deepseek_v2.py).
        """
        hidden, rank = self.model.hidden_size, latent.q_lora_rank
        query = self.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        value = self.heads * latent.v_head_dim
        out_of = latent.kv_lora_rank * (self.heads * latent.qk_nope_head_dim + value)
        into = hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
        products = hidden * query if rank is None else rank * (hidden + query)
        products += into + out_of + (1 + latent.output_gate) * value * hidden
        return products, latent.kv_lora_rank + (rank or 0)

    def _compressed_attention(self, parts: Compressed, index: int) -> tuple[int, int]:
        """Weights of the products of a layer of compressed attention with its hyper-connections,
        and its vectors (vLLM 0.33.0, models/deepseek_v4/attention.py and compressor.py)."""
        hidden, width, indexer = self.model.hidden_size, self.model.head_dim, self.model.indexer
        outputs, queries = parts.o_groups * parts.o_lora_rank, self.heads * width
        products = hidden * (parts.q_lora_rank + width) + parts.q_lora_rank * queries
        products += queries * parts.o_lora_rank + outputs // self.tensor_parallel_size * hidden
        streams = parts.hc_mult
        vectors = parts.q_lora_rank + width + self.heads
        # Of attention and of the MLP: (2 + s) s outputs, made of s streams.
        vectors += 2 * (2 + streams) * streams * streams * hidden if streams > 1 else 0
        ratio = parts.compress_ratios[index]
        if ratio > 1:
            overlap = 2 if ratio == 4 else 1
            products += 2 * hidden * overlap * width
            vectors += ratio * overlap * width
        if ratio == 4 and indexer is not None:
            products += indexer.parameters(hidden, parts.q_lora_rank)
            products += 3 * hidden * indexer.index_head_dim  # it compresses, too
        return products, vectors

    def _experts(self) -> tuple[int, int, int, int]:
        """Weights of shared experts, of routed experts and of the router; biases."""
        experts, hidden, tp = self.model.experts, self.model.hidden_size, self.tensor_parallel_size
        assert experts is not None
        held, columns = self.experts_held, self.expert_columns
        matrices = 3 if self.model.gated_mlp else 2
        router = hidden * experts.num_experts
        biases = 0
        if experts.bias:
            # Of the router; of an expert's projections into its columns, and of that out of them.
            biases = experts.num_experts + held * ((matrices - 1) * columns + hidden)
        if experts.shared_expert_gate:
            biases += hidden
        shared = matrices * hidden * (experts.shared_expert_intermediate_size // tp)
        width = experts.moe_latent_size or hidden
        # Every token is projected into the latent width and out of it, so this counts as shared.
        if experts.moe_latent_size is not None:
            shared += 2 * hidden * width
        return shared, held * matrices * width * columns, router, biases

    def _compressed_groups(self, parts: Compressed, layers: range) -> Iterator[KvGroup]:
        """What layers of compressed attention keep."""
        model, width = self.model, self.model.head_dim
        entry, pair = parts.vector_bytes(width), 2 * self.heads * width
        ratios = [parts.compress_ratios[layer] for layer in layers]
        group = KvGroup("sliding_attention", len(ratios), 0, 1, model.sliding_window)
        yield group._replace(further_bytes=entry, pair_elements=pair)
        for ratio in sorted({ratio for ratio in ratios if ratio > 1}):
            number, indexer = ratios.count(ratio), model.indexer if ratio == 4 else None
            group = KvGroup("compressed_attention", number, 0, 1, every=ratio, further_bytes=entry)
            chosen = None if indexer is None else indexer.index_topk * ratio
            yield group._replace(pair_elements=pair // ratio, attended=chosen)
            if indexer is not None:
                group = indexer.group(number)
                yield group._replace(pair_elements=group.pair_elements // ratio, every=ratio)

    def _group(self, kind: LayerType, layers: int) -> KvGroup:
        model, tp = self.model, self.tensor_parallel_size
        if kind == "linear_attention":
            linear = model.linear
            assert linear is not None
            element = DTYPE_BYTES[model.dtype("auto")]
            state = DTYPE_BYTES[linear.mamba_ssm_dtype] if linear.mamba_ssm_dtype else element
            token = linear.convolved(tp) * element
            kept = token * (linear.linear_conv_kernel_dim - 1)
            kept += linear.recurrent_elements * state // tp
            return KvGroup(kind, layers, 0, 0, None, state_bytes=kept, draft_bytes=token)
        if model.latent is not None and kind != "none":
            latent = model.latent
            elements = latent.kv_lora_rank + latent.qk_rope_head_dim
            pair = latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim
            group = KvGroup(
                "latent_attention", layers, elements, 1, pair_elements=self.heads * pair
            )
            if latent.fp8_ds_mla:
                group = group._replace(elements=0, further_bytes=latent.fp8_ds_mla_bytes)
            # Of all the tokens that it keeps, attention reads those that an indexer chose.
            chosen = None if model.indexer is None else model.indexer.index_topk
            return group._replace(attended=chosen)
        windows = {
            "sliding_attention": model.sliding_window,
            "chunked_attention": model.attention_chunk_size,
        }
        own = model.heads_of(kind)
        pair = own.head_dim + own.v_head_dim
        elements = max(1, own.num_key_value_heads // tp) * pair
        pairs = own.num_attention_heads // tp * pair
        return KvGroup(kind, layers, elements, 2, windows.get(kind), pair_elements=pairs)

    @property
    def _further_parameters(self) -> int:
        """Other towers and tables are divided like everything else."""
        model = self.model
        further = model.vision_parameters + model.apart_parameters + model.lookup_parameters
        return self._divided(further)

    def _divided(self, parameters: int) -> int:
        return -(-parameters // self.tensor_parallel_size)

    def _bytes_each(self, part: Part, dtype: str) -> float:
        """Bytes of one weight of a part of the layers."""
        stored = self.model.quantization
        if stored is None or part not in stored.parts:
            return DTYPE_BYTES[self.model.dtype(dtype)]
        size = stored.part_bits.get(part, stored.bits) / 8
        experts = self.model.experts
        if part != "experts" or experts is None or "mxfp4" not in stored.method:
            return size
        # The kernel takes columns in multiples of 128 and rows in multiples of 256 (vLLM 0.33.0,
        # quantization/mxfp4.py, Marlin).
        columns, width = self.expert_columns, experts.moe_latent_size or self.model.hidden_size
        padded = -(-columns // 128) * 128 * -(-width // 256) * 256
        return size * (padded / (columns * width))
