"""The direct readout as layers of a TensorRT network: `core.readout` for an engine."""

from dataclasses import dataclass

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ConfigError
from bpkv_trt.trtllm.graph import Graph, ITensor, Module, Network, Value
from bpkv_trt.trtllm.norm import Norm
from bpkv_trt.trtllm.ranks import Ranks
from bpkv_trt.trtllm.topk import TopK, topk_distribution

ALONE = Ranks()


@dataclass(frozen=True)
class HeadWeights:
    """What stands between the final residual and the logits, as tensors of the network.

    head [V, d] fp16, bf16 or fp32: the output head, or the embedding where they are tied; of several ranks, this
    rank's equal share of the rows. gamma and beta [d], whole on every rank: those of the final norm, where there is
    one; gamma is the factor applied, 1 + w where a Gemma checkpoint stores w.
    """

    head: ITensor
    gamma: ITensor | None = None
    beta: ITensor | None = None


@dataclass(frozen=True)
class PostAttentionNorm:
    """An RMSNorm between W_O and the residual add, at one layer's scoring rows.

    output [S, d]: what goes into the norm, which is W_O times the attention output, plus its bias, summed over ranks.
    gamma [d] is the factor applied.
    """

    output: ITensor
    gamma: ITensor
    eps: float


class Readout:
    """G[s, k, h] = W_O[h]^T J^T w_k, centred under p: `DirectReadout` at the S scoring rows of a step.

    The final norm, its adjoint and every sum over d or K are in fp32, whatever TF32 may do to matrix products. Only
    the head and W_O are multiplied in the weights' own type, so that no second copy of a weight is kept; of the head,
    the K rows that a scoring row gathers become fp32. S may be 0, and then nothing is computed.

    Traits of the attention itself (its softcap, QK norm, sinks, a block parallel to the MLP) leave this path as it is.
    """

    def __init__(
        self,
        network: Network,
        trt: Module,
        residual: ITensor,
        weights: HeadWeights,
        traits: ModelTraits,
        k: int,
        ranks: Ranks = ALONE,
    ) -> None:
        """Add what all layers share to a strongly typed network; trt is the module that the network is of.

        residual [S, d], the input of the final norm. ConfigError for weights of another type, and for a K that
        TensorRT cannot select; ValueError for a head whose ranks hold less than the vocabulary.
        """
        assert (weights.gamma is not None) == (traits.final_norm != "none"), "the weights contradict the traits"
        self.traits = traits
        self.ranks = ranks
        self._graph = Graph(network, trt)
        self._head = self._weight("the output head", weights.head)
        if self._head.shape[0] * ranks.count < traits.vocabulary:
            raise ValueError(f"head has {self._head.shape[0]} rows; {ranks.count} such are less than the vocabulary.")
        with self._graph.part("readout/final_norm"):
            x = self._graph.value(residual).cast(trt.float32)
            norm = self._final_norm(x, weights)
            normed = x if norm is None else norm.output()
        with self._graph.part("readout/topk"):
            self._topk = topk_distribution(self._graph, self._logits(normed), k, traits.vocabulary, ranks)
        with self._graph.part("readout/final"):
            self._final = self._final_readout(normed, norm, self._topk)

    @property
    def topk_ids(self) -> ITensor:
        """[S, K] int32, of the whole vocabulary, descending in probability; the same on every rank."""
        return self._topk.ids.tensor

    @property
    def p(self) -> ITensor:
        """[S, K] fp32, renormalised over the K."""
        return self._topk.p.tensor

    @property
    def covered_mass(self) -> ITensor:
        """[S] fp32, what the K hold of the full distribution; NaN where the logits hold a NaN or +inf."""
        return self._topk.covered_mass.tensor

    @property
    def final(self) -> ITensor:
        """[S, K, d] fp32: how a change of a layer's attention branch moves the K logits; centred."""
        return self._final.tensor

    def layer(self, layer: int, projection: ITensor, post_norm: PostAttentionNorm | None = None) -> ITensor:
        """[S, K, Hq, D] in the projection's type: the readout of one layer. Rounding to it may undo some centring.

        projection: W_O [d, Hq D]; of several ranks, the columns of this rank's heads, and Hq is their number. `final`
        is rounded to its type, too: in fp16 what is below 6e-5 loses digits. The layer's index is for names.
        ConfigError for a projection of another type than fp16, bf16 or fp32.
        """
        assert (post_norm is not None) == self.traits.post_attention_norm, "the weights contradict the traits"
        w = self._weight(f"the output projection of layer {layer}", projection)
        k, width = self._final.shape[1:]
        with self._graph.part(f"readout/layer_{layer}"):
            rows = self._final
            if post_norm is not None:
                output, gamma = self._graph.value(post_norm.output), self._graph.value(post_norm.gamma)
                rows = Norm(output, gamma, post_norm.eps).adjoint(rows)
            read = rows.cast(w.dtype).reshape(-1, width).matmul(w)
            return read.reshape(-1, k, w.shape[1] // self.traits.head_dim, self.traits.head_dim).tensor

    def _weight(self, name: str, tensor: ITensor) -> Value:
        trt = self._graph.trt
        if tensor.dtype not in (trt.float32, trt.float16, trt.bfloat16):
            raise ConfigError(
                f"The readout needs {name} in fp32, fp16 or bf16 and it is {tensor.dtype}. Build the engine from a "
                "checkpoint that leaves it unquantised."
            )
        return self._graph.value(tensor)

    def _final_norm(self, x: Value, weights: HeadWeights) -> Norm | None:
        if weights.gamma is None:
            return None
        beta = None if weights.beta is None else self._graph.value(weights.beta)
        gamma, layer = self._graph.value(weights.gamma), self.traits.final_norm == "layer"
        return Norm(x, gamma, self.traits.norm_eps, beta=beta, subtract_mean=layer)

    def _logits(self, normed: Value) -> Value:
        """normed [S, d] fp32 -> [S, V of this rank] fp32, from a product in the head's type as the model's own is."""
        product = normed.cast(self._head.dtype).matmul(self._head, transpose=True)
        z = product.cast(self._graph.trt.float32) * self.traits.logit_scale
        cap = self.traits.logit_softcap
        return z if cap is None else (z * (1 / cap)).tanh() * cap

    def _final_readout(self, normed: Value, norm: Norm | None, top: TopK) -> Value:
        width = self.traits.width
        rows = self._head_rows(top.ids).cast(self._graph.trt.float32) * self.traits.logit_scale
        if self.traits.logit_softcap is not None:
            capped = ((rows * normed.reshape(0, 1, width)).sum() * (1 / self.traits.logit_softcap)).tanh()
            rows = rows * (1.0 - capped * capped)
        rows = rows if norm is None else norm.adjoint(rows)
        k = top.p.shape[-1]
        mean = (rows * top.p.reshape(0, k, 1)).sum(axis=1)  # [S, 1, d]
        return (rows - mean) * self.traits.residual_multiplier

    def _head_rows(self, ids: Value) -> Value:
        """[S, K] ids -> [S, K, d] in the head's type; of several ranks, one gives the row and the others add 0."""
        if self.ranks.count == 1:
            return self._head.gather(ids)
        assert self.ranks.all_reduce is not None
        count, k = self._head.shape[0], ids.shape[-1]
        local = ids - self.ranks.rank * count
        inside = local.clamp(0, count - 1)
        rows = self._head.gather(inside).where(inside.equals(local).reshape(0, k, 1), 0.0)
        return self._graph.value(self.ranks.all_reduce(rows.tensor))
