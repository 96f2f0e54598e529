"""The direct readout: how a shift of an attention output moves the top-K logits along the residual path alone."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from bpkv_trt.core.divergence import Divergence, TopKDivergence
from bpkv_trt.core.traits import ModelTraits


class BranchWeights(Protocol):
    """What takes a layer's attention output to the residual stream."""

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """W_O [d, Hq D] and its bias [d]."""

    def post_attention_norm(self, layer: int) -> tuple[Tensor, float] | None:
        """Gamma [d] and eps of an RMSNorm between W_O and the residual add."""


class ReadoutWeights(BranchWeights, Protocol):
    """The few weights between an attention output and the logits.

    A norm's gamma is the factor it applies: 1 + w where a Gemma checkpoint stores w.
    """

    def head_rows(self, ids: Tensor) -> Tensor:
        """[M, K] token ids -> [M, K, d] rows of the output head."""

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        """Gamma [d] and beta [d]; not asked of a model without final norm."""


def final_readout(residual: Tensor, ids: Tensor, p: Tensor, traits: ModelTraits, weights: ReadoutWeights) -> Tensor:
    """J^T w_k: how a change of the final residual moves each of the top-K logits, to first order, centred under p.

    residual [M, d] input of the final norm; ids, p [M, K]. Returns [M, K, d] fp32. Covers RMSNorm, LayerNorm or no
    final norm, the logit scale, and the final softcap z = c tanh(z'/c), whose derivative is 1 - (z/c)^2.
    """
    x = residual.float()
    rows = weights.head_rows(ids).float() * traits.logit_scale  # [M, K, d]
    gamma, beta = _final_norm(traits, weights)
    if traits.logit_softcap is not None:
        normed = x if gamma is None else _normalised(x, gamma, beta, traits.norm_eps, traits.final_norm == "layer")
        capped = torch.tanh(torch.einsum("mkd,md->mk", rows, normed) / traits.logit_softcap)
        rows = rows * (1 - capped.square()).unsqueeze(-1)
    if gamma is not None:
        rows = norm_adjoint(rows, x, gamma, traits.norm_eps, subtract_mean=traits.final_norm == "layer")
    return rows - torch.einsum("mk,mkd->md", p.float(), rows).unsqueeze(1)


def _final_norm(traits: ModelTraits, weights: ReadoutWeights) -> tuple[Tensor | None, Tensor | None]:
    if traits.final_norm == "none":
        return None, None
    gamma, beta = weights.final_norm()
    return gamma.float(), None if beta is None else beta.float()


def _normalised(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, subtract_mean: bool) -> Tensor:
    if subtract_mean:
        x = x - x.mean(-1, keepdim=True)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma
    return normed if beta is None else normed + beta


def norm_adjoint(rows: Tensor, x: Tensor, gamma: Tensor, eps: float, *, subtract_mean: bool = False) -> Tensor:
    """The transposed Jacobian of an RMSNorm (or LayerNorm, `subtract_mean`) at x, applied to rows.

    rows [M, K, d], x [M, d], gamma [d]. With r = sqrt(mean x^2 + eps): gamma w / r - x (x . gamma w) / (d r^3); a
    LayerNorm does this to the centred x and takes the mean off the result as well.
    """
    if subtract_mean:
        x = x - x.mean(-1, keepdim=True)
    scaled = rows * gamma
    inverse = torch.rsqrt(x.square().mean(-1) + eps)[:, None, None]  # [M, 1, 1] 1 / r
    along = torch.einsum("mkd,md->mk", scaled, x).unsqueeze(-1) / x.shape[-1]
    adjoint = (scaled - x.unsqueeze(1) * (along * inverse.square())) * inverse
    return adjoint - adjoint.mean(-1, keepdim=True) if subtract_mean else adjoint


class DirectReadout:
    """The published approximation: W_O, the final norm's JVP and the head; later layers see nothing."""

    def __init__(
        self,
        context: Tensor,
        final: Tensor,
        p: Tensor,
        traits: ModelTraits,
        weights: BranchWeights,
        position_weights: Tensor | None = None,
    ) -> None:
        """context [L, M, Hq, D]; final [M, K, d] fp32, how a change of an attention branch moves the top-K logits,
        centred; p [M, K]; position weights [M]."""
        self.context, self.final = context, final
        self.traits, self.weights = traits, weights
        self.divergence: Divergence = TopKDivergence(p.float(), position_weights)

    @classmethod
    def of(
        cls,
        context: Tensor,
        residual: Tensor,
        ids: Tensor,
        p: Tensor,
        traits: ModelTraits,
        weights: ReadoutWeights,
        position_weights: Tensor | None = None,
    ) -> "DirectReadout":
        """From the input of the final norm. residual [M, d]; ids [M, K]; see `ForwardStatistics`."""
        final = final_readout(residual, ids, p, traits, weights).mul_(traits.residual_multiplier)
        return cls(context, final, p, traits, weights, position_weights)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """(layer, [M, K, Hq, D] fp32), one layer at a time."""
        for layer in self.traits.compactable_layers:
            yield layer, self._rows(layer)

    def _rows(self, layer: int) -> Tensor:
        projection, bias = self.weights.output_projection(layer)
        projection = projection.float()  # [d, Hq D]
        rows, norm = self.final, self.weights.post_attention_norm(layer)
        assert (norm is not None) == self.traits.post_attention_norm, "the weights contradict the traits"
        if norm is not None:
            output = self.context[layer].float().flatten(1) @ projection.T  # [M, d]
            output = output if bias is None else output + bias.float()
            rows = norm_adjoint(rows, output, norm[0].float(), norm[1])
        return (rows @ projection).view(*rows.shape[:2], self.traits.query_heads, self.traits.head_dim)


def fisher_probes(p: Tensor, probes: int, generator: torch.Generator) -> Tensor:
    """Random directions whose second moment is the Fisher matrix diag(p) - p p^T: xi = p^1/2 e - p (p^1/2 . e).

    p [M, K] fp32; `generator` lives on the CPU so that a CPU and a GPU draw the same. Returns [M, R, K], where p is.
    """
    noise = torch.randn(p.shape[0], probes, p.shape[1], generator=generator).to(p.device)
    scaled = noise * p.sqrt().unsqueeze(1)
    return scaled - p.unsqueeze(1) * scaled.sum(-1, keepdim=True)
