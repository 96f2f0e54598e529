"""The truth that the pool is held to: transformers' own eager attention over everything, evicted entries masked out."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

NEVER = 1 << 30


class Unrounded(TorchFunctionMode):
    """What is float64 stays so in the norms and softmaxes that transformers computes in fp32 whatever the model is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if arg is torch.float32 else arg for arg in args]
            kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return func(*args, **kwargs)


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that rounds nothing further but the angles of RoPE, which the model has in fp32 too."""
    wide = copy.deepcopy(model).double()
    for name, buffer in model.named_buffers():
        wide.get_buffer(name).data = buffer.clone()
    return wide


class MaskedReference:
    """Logits of a whole token sequence in one forward; an entry is hidden from the query on that it was evicted at."""

    def __init__(self, model: PreTrainedModel, sliding: dict[int, int]) -> None:
        """model: an instance of its own, not the host's; sliding: window by layer."""
        model.set_attn_implementation("eager")
        self.model, self.sliding = model, sliding

    @torch.no_grad()
    def logits(self, tokens: list[int], hidden_from: Tensor) -> Tensor:
        """hidden_from: [L, Hkv, N] int, the first query index that no longer sees the entry.

        Returns [N, V] fp32, or float64 where the model is.
        """
        handles = [
            layer.self_attn.register_forward_pre_hook(self._mask_hook(index, hidden_from[index]), with_kwargs=True)
            for index, layer in enumerate(self.model.model.layers)
        ]
        try:
            with Unrounded():
                return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        finally:
            for handle in handles:
                handle.remove()

    def _mask_hook(self, layer: int, hidden_from: Tensor):  # type: ignore[no-untyped-def]
        count = hidden_from.shape[-1]
        query, key = torch.arange(count)[:, None], torch.arange(count)[None]
        visible = (key <= query) & (query < hidden_from[:, None, :])  # [Hkv, N, N]
        if layer in self.sliding:
            visible &= key > query - self.sliding[layer]
        config = self.model.config
        heads = visible.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=0)
        dtype = next(self.model.parameters()).dtype
        mask = torch.zeros(heads.shape, dtype=dtype).masked_fill(~heads, torch.finfo(dtype).min)[None]

        def substitute(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return args, {**kwargs, "attention_mask": mask}

        return substitute
