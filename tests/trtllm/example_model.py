"""Random weights between an attention output and the logits, as the core reads them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bpkv_trt.core.traits import ModelTraits

POST_EPS = 1e-5


@dataclass
class ExampleModel:
    """`core.readout.ReadoutWeights`, and the rows of one step; tensors are of the engine's type."""

    traits: ModelTraits
    head: Tensor  # [rows, d], more than the vocabulary where it is padded
    gamma: Tensor | None  # [d]
    beta: Tensor | None
    projections: list[Tensor]  # [d, Hq D] each
    bias: Tensor | None  # [d]
    post_gamma: Tensor | None  # [d]
    residual: Tensor  # [S, d]
    context: Tensor  # [L, S, Hq, D]

    def head_rows(self, ids: Tensor) -> Tensor:
        return self.head[ids]

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        assert self.gamma is not None
        return self.gamma, self.beta

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        return self.projections[layer], self.bias

    def post_attention_norm(self, layer: int) -> tuple[Tensor, float] | None:
        return None if self.post_gamma is None else (self.post_gamma, POST_EPS)

    def attention_branch(self, layer: int) -> Tensor:
        """[S, d] W_O times the attention output, plus the bias: what an o_proj module returns."""
        output = self.context[layer].float().flatten(1) @ self.projections[layer].float().T
        return output if self.bias is None else output + self.bias.float()

    def logits(self) -> Tensor:
        """[S, rows] float64, from torch's own norms."""
        x, traits = self.residual.double(), self.traits
        gamma, beta = (None if each is None else each.double() for each in (self.gamma, self.beta))
        if traits.final_norm == "rms":
            x = torch.nn.functional.rms_norm(x, x.shape[-1:], gamma, traits.norm_eps)
        elif traits.final_norm == "layer":
            x = torch.nn.functional.layer_norm(x, x.shape[-1:], gamma, beta, traits.norm_eps)
        z = x @ self.head.double().T * traits.logit_scale
        return z if traits.logit_softcap is None else torch.tanh(z / traits.logit_softcap) * traits.logit_softcap

    def to(self, dtype: torch.dtype) -> "ExampleModel":
        cast = {name: value.to(dtype) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, projections=[each.to(dtype) for each in self.projections], **cast)


def example_model(
    rows: int = 3,
    *,
    layers: int = 2,
    heads: int = 4,
    head_dim: int = 8,
    width: int = 24,
    vocabulary: int = 50,
    padding: int = 0,
    beta: bool = False,
    bias: bool = False,
    **traits: object,
) -> ExampleModel:
    """`rows` scoring rows; values as a trained model has them: a residual off zero, gamma about 1."""
    described = replace(
        ModelTraits("example", layers, heads, heads, head_dim, width, vocabulary, 1.0, norm_eps=1e-5), **traits
    )
    normed = described.final_norm != "none"
    return ExampleModel(
        described,
        head=torch.randn(vocabulary + padding, width) * 0.5,
        gamma=1 + torch.randn(width) * 0.3 if normed else None,
        beta=torch.randn(width) * 0.2 if beta else None,
        projections=[torch.randn(width, heads * head_dim) * 0.3 for _ in range(layers)],
        bias=torch.randn(width) * 0.2 if bias else None,
        post_gamma=1 + torch.randn(width) * 0.3 if described.post_attention_norm else None,
        residual=torch.randn(rows, width) * 2 + 0.5,
        context=torch.randn(layers, rows, heads, head_dim),
    )
