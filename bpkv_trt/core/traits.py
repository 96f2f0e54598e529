"""What an architecture adds to the direct path from one attention output to the logits."""

from dataclasses import dataclass
from typing import Literal

FinalNorm = Literal["rms", "layer", "none"]


@dataclass(frozen=True)
class ModelTraits:
    """The architecture terms that scoring must know; one object per model, nothing else is consulted.

    Sliding-window layers hold their own rows in the pool but stand outside the budget.
    """

    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int  # ids >= vocabulary are padding rows of the head and never enter the top-K
    attention_scale: float
    final_norm: FinalNorm = "rms"
    norm_eps: float = 1e-6
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # logits = softcap(logit_scale * head @ normed)
    residual_multiplier: float = 1.0  # what the attention branch is multiplied by before the residual add
    post_attention_norm: bool = False  # RMSNorm between o_proj and the residual add
    qk_norm: bool = False
    sink_logits: bool = False
    tied_head: bool = False
    parallel_block: bool = False
    sliding_window: int | None = None
    sliding_layers: frozenset[int] = frozenset()
    max_positions: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def compactable_layers(self) -> tuple[int, ...]:
        """Layers whose entries the budget counts and an eviction may touch, ascending."""
        return tuple(layer for layer in range(self.layers) if layer not in self.sliding_layers)
