"""TensorRT-LLM's models as far as their networks matter, in a real network: behaviour for the generated package.

Written from what is known of 1.x; it decides nothing about names and arguments, which the contract does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bpkv_trt.trtllm.graph import Graph, Value
from bpkv_trt.trtllm.plugin_library import NAME, NAMESPACE, VERSION
from tests.trtllm.checked_tensorrt import Description
from tests.trtllm.contract.fakes import Fakes, Implementation, implementations_of
from tests.trtllm.network_walk import Feed, NetworkWalk
from tests.trtllm.opaque_layers import Creator, OpaqueLayers, PluginModule, PluginNetwork
from tests.trtllm.paged_memory import PagedMemory
from tests.trtllm.stock_inputs import InputSizes

TYPES = {"float32": torch.float32, "float16": torch.float16}
ATTENTION_TENSORS = (
    "qkv",
    "sequence_length",
    "context_lengths",
    "host_request_types",
    "kv_cache_block_offsets",
    "rotary_cos_sin",
)


@dataclass
class Exchange:
    """A collective: what this rank sends, in which type, and the input by which its result is given."""

    kind: str
    sent: Any
    dtype: str
    received: str


class Stock:
    """One network under construction, and the package `fakes` that builds it from a transformers model.

    Of several ranks, each has its share of the attention's heads and of the head's rows; MLPs are whole on each.
    """

    def __init__(
        self,
        trt: ModuleType,
        described: Description,
        model: PreTrainedModel,
        memory: PagedMemory,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        self.trt, self.model, self.memory, self.ranks, self.rank = trt, model, memory, ranks, rank
        self.builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        self.network = self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self.graph = Graph(self.network, trt)
        self.opaque = OpaqueLayers(trt, self.network)
        self.checked = PluginNetwork(self.opaque, described)
        self.attention_calls: list[dict[str, Any]] = []
        self.profiles: dict[str, Any] = {}
        self.exchanges: list[Exchange] = []
        scores = Creator(self._score_output, memory.score)
        self.tensorrt = PluginModule(trt, described, {(NAME, VERSION, NAMESPACE): scores})
        self.fakes = Fakes(self._implementations(), tensorrt=self.tensorrt)  # type: ignore[arg-type]
        self.plugin_config = self.fakes["tensorrt_llm.plugin.plugin.PluginConfig"](
            paged_kv_cache=True, tokens_per_block=memory.page_size, nccl_plugin=self.dtype
        )

    @property
    def dtype(self) -> str:
        return next(name for name, dtype in TYPES.items() if dtype == self.model.dtype)

    def walk(self, feed: Feed) -> NetworkWalk:
        return self.opaque.walk(feed)

    def outputs(self, feed: Feed) -> dict[str, Tensor]:
        walk = self.walk(feed)
        return {tensor.name: walk[tensor] for tensor in self.marked()}

    def marked(self) -> list[Any]:
        return [self.network.get_output(index) for index in range(self.network.num_outputs)]

    def profile(self, name: str) -> list[tuple[int, ...]]:
        """Least, usual and largest shape of a declared input."""
        ranges = [each[0] if isinstance(each[0], list) else [each[0]] * 3 for each in self.profiles[name].values()]
        return list(zip(*ranges, strict=True))

    def build(self, sizes: Mapping[str, tuple[int, int, int]]) -> bytes | None:
        """An engine of TensorRT-RTX, or None where it refuses the network.

        sizes: least, usual and largest of the dimensions that are known at run time: of an input, `name` or `name/1`.
        """
        config, profile = self.builder.create_builder_config(), self.builder.create_optimization_profile()
        for tensor in map(self.network.get_input, range(self.network.num_inputs)):
            declared = self.profile(tensor.name) if tensor.name in self.profiles else [(None,) * len(tensor.shape)] * 3
            known = [
                (size,) * 3 if size >= 0 else sizes.get(f"{tensor.name}/{axis}", sizes.get(tensor.name, usual))
                for axis, (size, usual) in enumerate(zip(tensor.shape, zip(*declared, strict=True), strict=True))
            ]
            profile.set_shape(tensor.name, *zip(*known, strict=True))
        config.add_optimization_profile(profile)
        plan = self.builder.build_serialized_network(self.network, config)
        return None if plan is None else bytes(plan)

    def config(self, **changes: Any) -> Any:
        """A checkpoint's configuration, with changes."""
        own = self.model.config
        mapping = self.fakes["tensorrt_llm.mapping.Mapping"]
        names = self.fakes.classes
        positions = names["tensorrt_llm.functional.PositionEmbeddingType"]
        given = {
            "architecture": own.architectures[0] if own.architectures else f"{type(self.model).__name__}",
            "dtype": self.dtype,
            "hidden_size": own.hidden_size,
            "num_hidden_layers": own.num_hidden_layers,
            "num_attention_heads": own.num_attention_heads,
            "num_key_value_heads": own.num_key_value_heads,
            "vocab_size": own.vocab_size,
            "norm_epsilon": own.rms_norm_eps,
            "max_position_embeddings": own.max_position_embeddings,
            "position_embedding_type": positions.rope_gpt_neox,  # type: ignore[attr-defined]
            "head_size": own.head_dim,
            "mapping": mapping(tp_size=self.ranks, world_size=self.ranks, rank=self.rank),
        }
        return names["tensorrt_llm.models.modeling_utils.PretrainedConfig"](**given | changes)

    def tensor(self, value: Value) -> Any:
        made = object.__new__(self.fakes["tensorrt_llm.functional.Tensor"])
        made.trt_tensor = value.tensor
        return made

    def value(self, tensor: Any) -> Value:
        return self.graph.value(tensor.trt_tensor)

    def parameter(self, weight: Tensor) -> Any:
        return self.fakes["tensorrt_llm.parameter.Parameter"](value=weight.detach().contiguous().numpy())

    def made(self, dotted: str, **attributes: Any) -> Any:
        made = object.__new__(self.fakes[dotted])
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    def norm(self, module: Any) -> Any:
        dotted = "tensorrt_llm.layers.normalization.RmsNorm"
        return self.made(dotted, weight=self.parameter(module.weight), eps=module.variance_epsilon)

    def linear(self, kind: str, weight: Tensor, bias: Tensor | None = None) -> Any:
        own = None if bias is None else self.parameter(bias)
        return self.made(f"tensorrt_llm.layers.linear.{kind}", weight=self.parameter(weight), bias=own)

    def attention(self, layer: int) -> Any:
        own, config = self.model.model.layers[layer].self_attn, self.model.config
        heads, kv_heads = (count // self.ranks for count in (config.num_attention_heads, config.num_key_value_heads))
        width, names = own.head_dim, self.fakes.classes
        parts = [(own.q_proj, heads), (own.k_proj, kv_heads), (own.v_proj, kv_heads)]
        own_rows = [self._share(each.weight, count * width) for each, count in parts]
        biases = [self._share(each.bias, count * width) for each, count in parts if each.bias is not None]
        norms = {"q_layernorm": own.q_norm, "k_layernorm": own.k_norm} if hasattr(own, "q_norm") else {}
        enumeration = "tensorrt_llm.functional."
        scaling = config.rope_parameters["rope_type"].replace("default", "none")
        return self.made(
            "tensorrt_llm.layers.attention.Attention",
            local_layer_idx=layer,
            num_attention_heads=heads,
            num_attention_kv_heads=kv_heads,
            attention_head_size=width,
            q_scaling=1.0,
            position_embedding_type=names[f"{enumeration}PositionEmbeddingType"].rope_gpt_neox,  # type: ignore[attr-defined]
            rotary_embedding_scale_type=getattr(names[f"{enumeration}RotaryScalingType"], scaling),
            rotary_embedding_scale=4.0 if scaling == "llama3" else 1.0,
            attention_mask_type=names[f"{enumeration}AttentionMaskType"].causal,  # type: ignore[attr-defined]
            rotary_embedding_dim=width,
            use_logn_scaling=False,
            relative_attention=False,
            cross_attention=False,
            is_local=False,
            kv_cache_scaling_factor=None,
            qkv=self.linear(
                "ColumnLinear",
                torch.cat(own_rows),
                torch.cat(biases) if biases else None,
            ),
            dense=self.linear("RowLinear", self._share(own.o_proj.weight.T, heads * width).T, own.o_proj.bias),
            qk_layernorm=bool(norms),
            **{name: self.norm(module) for name, module in norms.items()},
        )

    def _share(self, rows: Tensor, count: int) -> Tensor:
        return rows[self.rank * count : (self.rank + 1) * count]

    def _layer(self, kind: str, layer: int) -> Any:
        own = self.model.model.layers[layer]
        return self.made(
            kind,
            layer_idx=layer,
            input_layernorm=self.norm(own.input_layernorm),
            attention=self.attention(layer),
            post_layernorm=self.norm(own.post_attention_layernorm),
            mlp=self._mlp(own.mlp),
        )

    def _mlp(self, own: Any) -> Callable[[Value], Value]:
        gate, up, down = (
            self.linear("ColumnLinear", each.weight) for each in (own.gate_proj, own.up_proj, own.down_proj)
        )

        def mlp(x: Value) -> Value:
            opened = self._product(x, gate)
            swish = opened * ((opened * 0.5).tanh() + 1.0) * 0.5
            return self._product(swish * self._product(x, up), down)

        return mlp

    def _product(self, x: Value, linear: Any) -> Value:
        return self._biased(x.matmul(self.value(linear.weight.value), transpose=True), linear)

    def _biased(self, y: Value, linear: Any) -> Value:
        return y if linear.bias is None else y + self.value(linear.bias.value).reshape(1, -1)

    def _normed(self, x: Value, norm: Any) -> Value:
        wide = x.cast(self.trt.float32)
        inverse = ((wide * wide).mean() + float(norm.eps)).rsqrt()
        gamma = self.value(norm.weight.value).cast(self.trt.float32).reshape(*[1] * (len(x.shape) - 1), -1)
        return (wide * inverse * gamma).cast(x.dtype)

    def _implementations(self) -> dict[str, Implementation]:
        functional, layers, models = "tensorrt_llm.functional.", "tensorrt_llm.layers.", "tensorrt_llm.models."
        made: dict[str, Implementation] = {
            "tensorrt_llm._common.default_net": lambda: self._default_net(),
            "tensorrt_llm._common.default_trtnet": lambda: self.checked,
            f"{functional}_create_tensor": lambda trt_tensor, producer: self.tensor(self.graph.value(trt_tensor)),
            f"{functional}constant": lambda ndarray: self.tensor(self.graph.constant(ndarray)),
            f"{functional}gpt_attention": self._gpt_attention,
            f"{functional}allgather": self._allgather,
            f"{functional}allreduce": self._allreduce,
            f"{functional}Tensor.__init__": self._declare,
            "tensorrt_llm.module.Module.__call__": lambda self, *args, **kwargs: self.forward(*args, **kwargs),
            "tensorrt_llm.module.ModuleList.__iter__": lambda self: iter(self._modules),
            "tensorrt_llm.module.ModuleList.__len__": lambda self: len(self._modules),
            "tensorrt_llm.module.ModuleList.__getitem__": lambda self, idx: self._modules[idx],
            f"{layers}normalization.RmsNorm.forward": self._norm_forward,
            f"{layers}attention.Attention.forward": self._attention_forward,
            f"{models}modeling_utils.PretrainedConfig.to_dict": _to_dict,
            f"{models}modeling_utils.DecoderModelForCausalLM.forward": self._forward,
            f"{models}modeling_utils.PretrainedModel.prepare_inputs": self._prepare_inputs,
            f"{models}llama.model.LLaMAForCausalLM.__init__": self._construct("llama.model.LLaMA"),
            f"{models}qwen.model.QWenForCausalLM.__init__": self._construct("qwen.model.QWen"),
            f"{models}llama.model.LLaMAModel.forward": self._model_forward,
            f"{models}qwen.model.QWenModel.forward": self._model_forward,
            f"{models}llama.model.LLaMADecoderLayer.forward": self._layer_forward,
            f"{models}qwen.model.QWenDecoderLayer.forward": self._layer_forward,
        }
        return (
            made
            | implementations_of("tensorrt_llm.parameter.Parameter", self._parameter_class())
            | implementations_of("tensorrt_llm.mapping.Mapping", _Mapping)
        )

    def _parameter_class(self) -> type:
        stock = self

        class Parameter:
            def __init__(self: Any, value: Any, shape: Any, dtype: Any, is_buffer: Any, prefer_managed: Any) -> None:
                self._array, self._tensor = value, None

            @property
            def raw_value(self: Any) -> Any:
                return self._array

            @property
            def value(self: Any) -> Any:
                """One constant of the network, however often it is asked for."""
                if self._tensor is None:
                    self._tensor = stock.tensor(stock.graph.constant(self._array))
                return self._tensor

            value = value.setter(lambda self, v: setattr(self, "_array", v))

            def is_inited(self: Any) -> bool:
                return self._array is not None

        return Parameter

    def _default_net(self) -> Any:
        return _Net(self.plugin_config)

    def _declare(self, /, **arguments: Any) -> None:
        """functional.Tensor.__init__: an input of the network."""
        assert arguments["is_network_input"]
        name, shape = arguments["name"], arguments["shape"]
        self.profiles[name] = arguments["dim_range"]
        assert len(arguments["dim_range"]) == len(shape)
        arguments["self"].trt_tensor = self.network.add_input(name, arguments["dtype"], tuple(shape))

    def _construct(self, family: str) -> Callable[..., None]:
        def start(self_: Any, config: Any) -> None:
            dotted = f"tensorrt_llm.models.{family}"
            listed = self.made("tensorrt_llm.module.ModuleList")
            listed._modules = [self._layer(f"{dotted}DecoderLayer", i) for i in range(config.num_hidden_layers)]
            own = self.model.model
            embedding = self.parameter(own.embed_tokens.weight)
            self_.config = config
            self_.transformer = self.made(f"{dotted}Model", layers=listed, ln_f=self.norm(own.norm))
            self_.transformer.vocab_embedding = lambda ids: self.value(embedding.value).gather(self.value(ids))
            head = self.model.lm_head.weight
            self_.lm_head = self.linear("ColumnLinear", self._share(head, len(head) // self.ranks))
            inverse, table = rope_tables(self.model)
            self_.rotary_inv_freq = self.parameter(inverse)
            self_.embed_positions_for_gpt_attention = self.parameter(table)
            self_.position_embedding_type = config.position_embedding_type

        def constructor(self: Any, config: Any) -> None:
            start(self, config)

        return constructor

    def _prepare_inputs(self, /, **arguments: Any) -> dict[str, Any]:
        declare, kinds = self.fakes["tensorrt_llm.functional.Tensor"], self.fakes.classes
        sizes = InputSizes(
            self.model.config.num_hidden_layers,
            self.memory.page_size,
            *(arguments[name] for name in ("max_batch_size", "max_seq_len", "max_num_tokens")),
        )
        declared = {}
        for name, (dtype, dimensions) in sizes.inputs().items():
            ranges = {f"{name}_{axis}": [size] for axis, size in enumerate(dimensions)}
            shape = [-1 if isinstance(size, list) else size for size in dimensions]
            declared[name] = declare(name=name, dtype=getattr(self.trt, dtype), shape=shape, dim_range=ranges)
        given = {"use_cache": True, "attention_mask": None}
        for key, short in (("kv_cache_params", "KeyValueCacheParams"), ("attention_params", "AttentionParams")):
            kind = kinds[f"tensorrt_llm.layers.attention.{short}"]
            given[key] = kind(**{name: declared.pop(name) for name in list(declared) if name in kind.contract})  # type: ignore[attr-defined]
        return given | declared

    def _forward(self, /, **arguments: Any) -> Any:
        model = arguments["self"]
        attention = arguments["attention_params"]
        attention.rotary_inv_freq = model.rotary_inv_freq.value
        attention.embed_positions_for_gpt_attention = model.embed_positions_for_gpt_attention.value
        passed = ("input_ids", "position_ids", "use_cache", "attention_mask", "kv_cache_params", "attention_params")
        hidden, presents = model.transformer.forward(**{name: arguments[name] for name in passed})
        last = self.value(hidden).gather(self.value(arguments["last_token_ids"]) - 1.0)  # they count from 1
        logits = self._product(last, model.lm_head).cast(self.trt.float32).tensor  # of this rank's rows
        logits.name = "logits"
        self.network.mark_output(logits)
        return logits

    def _model_forward(self, /, **arguments: Any) -> Any:
        model = arguments["self"]
        hidden = self.tensor(model.vocab_embedding(arguments["input_ids"]))
        for layer in model.layers:
            hidden, _ = layer(
                hidden,
                use_cache=True,
                kv_cache_params=arguments["kv_cache_params"],
                attention_params=arguments["attention_params"],
            )
        return model.ln_f(hidden), ()

    def _layer_forward(self, /, **arguments: Any) -> Any:
        layer, residual = arguments["self"], self.value(arguments["hidden_states"])
        attended, present = layer.attention(
            layer.input_layernorm(arguments["hidden_states"]),
            use_cache=True,
            kv_cache_params=arguments["kv_cache_params"],
            attention_params=arguments["attention_params"],
        )
        residual = residual + self.value(attended)
        normed = self.value(layer.post_layernorm(self.tensor(residual)))
        return self.tensor(residual + layer.mlp(normed)), present

    def _norm_forward(self_, self: Any, x: Any, normalized_shape: Any) -> Any:  # noqa: N805
        return self_.tensor(self_._normed(self_.value(x), self))

    def _attention_forward(self, /, **arguments: Any) -> Any:
        import tensorrt_llm.layers.attention as module

        attention, cache, params = (arguments[name] for name in ("self", "kv_cache_params", "attention_params"))
        heads, kv_heads = attention.num_attention_heads, attention.num_attention_kv_heads
        qkv = self._product(self.value(arguments["hidden_states"]), attention.qkv)
        if attention.qk_layernorm:
            split = qkv.reshape(-1, heads + 2 * kv_heads, attention.attention_head_size)
            q, k, v = split.part(0, heads, 1), split.part(heads, kv_heads, 1), split.part(heads + kv_heads, kv_heads, 1)
            normed = [self._normed(q, attention.q_layernorm), self._normed(k, attention.k_layernorm), v]
            qkv = self.graph.concatenate(normed, axis=1).reshape(-1, qkv.shape[1])
        context, present = module.gpt_attention(
            qkv=self.tensor(qkv),
            past_key_value=None,
            sequence_length=params.sequence_length,
            host_past_key_value_lengths=None,
            host_max_attention_window_sizes=None,
            host_sink_token_length=None,
            context_lengths=params.context_lengths,
            cache_indirection=None,
            host_request_types=params.host_request_types,
            layer_idx=attention.local_layer_idx,
            num_heads=heads,
            num_kv_heads=kv_heads,
            hidden_size_per_head=attention.attention_head_size,
            q_scaling=attention.q_scaling,
            rotary_embedding_dim=attention.rotary_embedding_dim,
            rotary_embedding_scale_type=attention.rotary_embedding_scale_type,
            rotary_embedding_scale=attention.rotary_embedding_scale,
            position_embedding_type=attention.position_embedding_type,
            rotary_inv_freq=params.rotary_inv_freq,
            rotary_cos_sin=params.embed_positions_for_gpt_attention,
            kv_cache_block_offsets=cache.kv_cache_block_offsets,
        )
        own = self.value(context).matmul(self.value(attention.dense.weight.value), transpose=True)
        output = own if self.ranks == 1 else self.value(self._exchanged("sum", own.tensor, own.shape))
        return self.tensor(self._biased(output, attention.dense)), present

    def _gpt_attention(self, /, **arguments: Any) -> Any:
        self.attention_calls.append(arguments)
        tensors = [arguments[name] for name in ATTENTION_TENSORS]

        def attend(*values: Tensor | None) -> Tensor:
            return self.memory.attend(arguments, dict(zip(ATTENTION_TENSORS, values, strict=True)))

        inputs = [None if tensor is None else tensor.trt_tensor for tensor in tensors]
        width = arguments["num_heads"] * arguments["hidden_size_per_head"]
        layer = self.opaque.add("gpt_attention", inputs, inputs[0].dtype, (-1, width), attend)
        return self.tensor(self.graph.value(layer.get_output(0))), None

    def _allgather(self, tensor: Any, group: Any, gather_dim: Any) -> Any:
        assert gather_dim == -1 and list(group) == list(range(self.ranks))
        shape = tensor.trt_tensor.shape
        return self._exchanged("allgather", tensor.trt_tensor, (*shape[:-1], self.ranks * shape[-1]))

    def _allreduce(self, tensor: Any, group: Any, all_reduce_params: Any) -> Any:
        assert all_reduce_params.strategy.name == "NCCL" and list(group) == list(range(self.ranks))
        return self._exchanged("allreduce", tensor.trt_tensor, tensor.trt_tensor.shape)

    def _exchanged(self, kind: str, sent: Any, shape: Any) -> Any:
        exchange = Exchange(kind, sent, self.plugin_config.nccl_plugin, f"received_{len(self.exchanges)}")
        self.exchanges.append(exchange)
        return self.tensor(self.graph.value(self.network.add_input(exchange.received, sent.dtype, tuple(shape))))

    def _score_output(self, fields: Mapping[str, Any], inputs: Any) -> tuple[Any, tuple[int, ...]]:
        return self.trt.float32, (-1, int(fields["kv_heads"][0]), -1)


def connected_outputs(stocks: Sequence[Stock], feeds: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Those of all ranks, which exchange what they send."""
    walks: list[NetworkWalk] = []

    def received(index: int) -> Tensor:
        sent = [walk[stock.exchanges[index].sent] for walk, stock in zip(walks, stocks, strict=True)]
        return torch.cat(sent, -1) if stocks[0].exchanges[index].kind == "allgather" else torch.stack(sent).sum(0)

    for stock, feed in zip(stocks, feeds, strict=True):
        given = {each.received: partial(received, index) for index, each in enumerate(stock.exchanges)}
        walks.append(stock.walk(dict(feed) | given))
    return [{tensor.name: walk[tensor] for tensor in stock.marked()} for walk, stock in zip(walks, stocks, strict=True)]


class _Net:
    """TensorRT-LLM's Network, of which the package asks for its plugins alone."""

    def __init__(self, plugin_config: Any) -> None:
        self.plugin_config = plugin_config


class _Mapping:
    tp_rank = property(lambda self: self.rank % self.tp_size)
    tp_group = property(lambda self: list(range(self.tp_size)))


def _to_dict(self: Any) -> dict[str, Any]:
    mapping = {name: getattr(self.mapping, name) for name in ("tp_size", "pp_size", "cp_size")}
    plain = {name: value for name, value in vars(self).items() if name not in ("quantization", "mapping")}
    return plain | {"mapping": mapping, "quantization": getattr(self, "quantization", None) or {}}


def rope_tables(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """As TensorRT-LLM makes them for its plugin: inverse frequencies [D / 2] and (cos, sin) pairs [1, P D], fp32.

    From the model's own frequencies, which may be scaled.
    """
    inverse = model.model.rotary_emb.inv_freq.float()
    angles = torch.arange(model.config.max_position_embeddings).float()[:, None] * inverse
    pairs = torch.stack([angles.cos(), angles.sin()], -1)
    return inverse, torch.from_numpy(np.ascontiguousarray(pairs.numpy())).reshape(1, -1)
