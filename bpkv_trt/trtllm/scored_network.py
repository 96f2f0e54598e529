"""Scores in a network of TensorRT-LLM: the parts put together, and the engine's outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import BpkvError, ConfigError
from bpkv_trt.trtllm.attention_tap import AttentionTap
from bpkv_trt.trtllm.graph import Graph, ITensor
from bpkv_trt.trtllm.network_record import NetworkRecord
from bpkv_trt.trtllm.plugin import ScoreInputs, ScorePlugin
from bpkv_trt.trtllm.ranks import Ranks
from bpkv_trt.trtllm.readout import HeadWeights, Readout
from bpkv_trt.trtllm.scoring_inputs import ScoringInputs


class ScoredNetwork:
    """One network: `build_stock` around the stock forward pass, then `add_scores`.

    Outputs, for every layer l of this rank: `bpkv_scores_{l}` [B, Hkv, T] fp32, `bpkv_q_{l}` and `bpkv_context_{l}`
    [S, Hq, D] in the activations' type; and once `bpkv_topk_ids` [S, K] int32, `bpkv_topk_p` [S, K] and
    `bpkv_covered_mass` [S] fp32, `bpkv_residual` [S, d], and `bpkv_readout` [S, K, d] fp32, what a change of a layer's
    attention branch does to the K logits. T is 0 in a step without scoring rows.
    """

    def __init__(self, model: Any, plugin: ScorePlugin, scoring: ScoringInputs, inputs: dict[str, Any]) -> None:
        """model: a DecoderModelForCausalLM that `coverage` lets pass; inputs: those of its own forward pass."""
        self._model, self._plugin = model, plugin
        self._attentions = [layer.attention for layer in model.transformer.layers]
        self._scoring = ScoringInputs(*(tensor.trt_tensor for tensor in scoring))
        self._inputs = inputs
        self._graph = Graph(plugin.network, plugin.trt)
        self._tap = AttentionTap(
            self._graph,
            rotary_table(model),
            model.rotary_inv_freq.raw_value,
            inputs["position_ids"].trt_tensor,
            self._scoring.bpkv_score_rows,
        )
        self._residual: ITensor | None = None

    @contextmanager
    def build_stock(self) -> Iterator[None]:
        """The model's forward pass runs inside; its attention and the input of its final norm are tapped."""
        norm = self._model.transformer.ln_f
        stock = norm.forward

        def keep(x: Any, *given: Any, **named: Any) -> Any:
            self._residual = x.trt_tensor
            return stock(x, *given, **named)

        norm.forward = keep
        try:
            with self._tap.in_place():
                yield
        finally:
            vars(norm).pop("forward")

    def add_scores(self, ranks: Ranks) -> None:
        """Raises BpkvError for a forward pass that went by other ways, ConfigError for weights that are quantised."""
        layers = range(len(self._attentions))
        if self._residual is None or sorted(self._tap.attended) != list(layers):
            raise BpkvError(
                f"The forward pass of {type(self._model).__name__} did not call the attention plugin once for each of "
                f"{len(layers)} layers and then its final norm: this TensorRT-LLM is not one that BP-KV knows. Use 1.0 "
                "to 1.2, and report this together with its version."
            )
        rows = self._graph.value(self._scoring.bpkv_score_rows)
        with self._graph.part("residual"):
            residual = self._graph.value(self._residual).gather(rows).tensor
        readout = self._readout(residual, ranks)
        for layer in layers:
            self._add_layer(layer, self._attentions[layer], readout)
        self._mark("topk_ids", readout.topk_ids)
        self._mark("topk_p", readout.p)
        self._mark("covered_mass", readout.covered_mass)
        self._mark("residual", residual)
        self._mark("readout", readout.final)

    def record(self) -> NetworkRecord:
        """What a session of the engine needs to know; after `add_scores`."""
        model, scale = self._model, self._tap.attended[0].scale
        traits = network_traits(model.config, model.transformer.ln_f, self._attentions[0], scale)
        scales = tuple(map(self._scale, range(len(self._attentions)))) if self._quantised else None
        return NetworkRecord(traits, scales)

    @property
    def _quantised(self) -> bool:
        return self._plugin.kernels.configuration.cache.itemsize == 1

    def _scale(self, layer: int) -> float:
        return cache_scale(layer, self._attentions[layer]) if self._quantised else 1.0

    def _readout(self, residual: ITensor, ranks: Ranks) -> Readout:
        model = self._model
        weights = HeadWeights(model.lm_head.weight.value.trt_tensor, model.transformer.ln_f.weight.value.trt_tensor)
        k = self._plugin.kernels.configuration.channels
        return Readout(self._plugin.network, self._plugin.trt, residual, weights, self.record().traits, k, ranks)

    def _add_layer(self, layer: int, attention: Any, readout: Readout) -> None:
        attended, scale = self._tap.attended[layer], self._scale(layer)
        scores = self._plugin.add_layer(
            ScoreInputs(
                q=attended.q,
                context=attended.context,
                readout=readout.layer(layer, attention.dense.weight.value.trt_tensor),
                p=readout.p,
                weights=self._scoring.bpkv_score_weights,
                offsets=self._scoring.bpkv_score_offsets,
                block_offsets=self._inputs["kv_cache_params"].kv_cache_block_offsets.trt_tensor,
                lengths=self._inputs["attention_params"].sequence_length.trt_tensor,
                pool_addresses=self._scoring.bpkv_pool_pointers,
            ),
            name=f"bpkv/score/layer_{layer}",
            layer_in_pool=layer,
            scale=attended.scale,
            key_scale=scale,
            value_scale=scale,
        )
        self._mark(f"scores_{layer}", scores)
        self._mark(f"q_{layer}", attended.q)
        self._mark(f"context_{layer}", attended.context)

    def _mark(self, name: str, tensor: ITensor) -> None:
        tensor.name = f"bpkv_{name}"
        self._plugin.network.mark_output(tensor)


def rotary_table(model: Any) -> Any:
    """[P, D / 2, 2] fp32: cos and sin at every logical position, as the stock attention plugin would get them."""
    pairs = model.rotary_inv_freq.raw_value.size
    return model.embed_positions_for_gpt_attention.raw_value.reshape(-1, pairs, 2)


def cache_scale(layer: int, attention: Any) -> float:
    """What a number of the quantised pool is multiplied by. ConfigError where the checkpoint does not say."""
    factor = attention.kv_cache_scaling_factor
    if factor is None or not factor.is_inited():
        raise ConfigError(
            f"The checkpoint has no kv_cache_scaling_factor for layer {layer}, which scores of its quantised KV cache "
            "need. Quantise it again with calibration, or build from a checkpoint with weights."
        )
    return float(factor.raw_value.reshape(-1)[0])


def network_traits(config: Any, norm: Any, attention: Any, scale: float) -> ModelTraits:
    """Of the checkpoint's configuration, the final norm and an attention layer; heads are those of this rank."""
    return ModelTraits(
        architecture=config.architecture,
        layers=config.num_hidden_layers,
        query_heads=attention.num_attention_heads,
        kv_heads=attention.num_attention_kv_heads,
        head_dim=attention.attention_head_size,
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        attention_scale=scale,
        norm_eps=norm.eps,
        residual_multiplier=getattr(config, "residual_multiplier", 1.0),
        qk_norm=attention.qk_layernorm,
        max_positions=config.max_position_embeddings or 0,
    )
