"""The weights between an attention output and the logits."""

from torch import Tensor
from transformers import PreTrainedModel

from bpkv_trt.models.families import family_of
from bpkv_trt.models.modules import decoder_layers, final_norm_module, output_head, output_projection_module


class ModelWeights:
    """A supported transformers model as the core's `ReadoutWeights`: views of its parameters, nothing is copied.

    A norm's gamma is what multiplies the normalised vector: weight, or 1 + weight in Gemma.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._family = family_of(model.config)
        self._layers = decoder_layers(model)
        self._head = output_head(model)
        self._norm = final_norm_module(model)

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows of the output head, [M, K, d] in the weights' type, for token ids [M, K]."""
        return self._head.weight[ids]

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        """Gamma [d] and beta [d] of the norm before the output head (no covered architecture has a beta)."""
        return self._gamma(self._norm.get_parameter("weight")), None

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """W_O [d, Hq * D] of a layer and its bias [d]."""
        projection = output_projection_module(self._layers[layer])
        return projection.weight, projection.bias

    def post_attention_norm(self, layer: int) -> tuple[Tensor, float] | None:
        """Gamma [d] and eps of the RMSNorm between W_O and the residual add, None where there is none."""
        if self._family.post_attention_norm is None:
            return None
        norm = self._layers[layer].get_submodule(self._family.post_attention_norm)
        return self._gamma(norm.get_parameter("weight")), float(getattr(norm, "eps"))  # noqa: B009 (typed as Tensor)

    def _gamma(self, weight: Tensor) -> Tensor:
        return weight.float() + self._family.norm_offset if self._family.norm_offset else weight
