"""Scoring positions one at a time through transformers' own eager attention: the truth for what the host replays.

Every position is a forward of its single token over a cache of the tokens before it, so that whatever is changed at
the position reaches the logits along its own path only.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from bpkv_trt.models.modules import decoder_layers, final_norm_module, output_projection_module
from tests.runtime.random_models import plain_copy, wrapped

SPY = "eager_spied"


@dataclass
class Observation:
    """What one forward of n tokens showed."""

    q: dict[int, Tensor] = field(default_factory=dict)  # by layer [Hq, n, D], post-RoPE
    unrotated: dict[int, Tensor] = field(default_factory=dict)  # by layer [Hq, n, D], the queries before RoPE
    weights: dict[int, Tensor] = field(default_factory=dict)  # by layer [Hq, n, T]
    context: dict[int, Tensor] = field(default_factory=dict)  # by layer [n, Hq D], input of o_proj
    residual: Tensor = field(default_factory=lambda: torch.empty(0))  # [n, d]
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # [n, V]


_observed = Observation()


def _spy(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any, **kwargs: Any) -> Any:
    # *_: the dropout, by position where kvpress has wrapped the function
    eager = sys.modules[type(module).__module__].eager_attention_forward
    output, weights = eager(module, query, key, value, mask, **kwargs)
    _observed.q[module.layer_idx], _observed.weights[module.layer_idx] = query[0], weights[0]
    return output, weights


AttentionInterface.register(SPY, _spy)


class OwnPath:
    """One token sequence over a random-weight model."""

    def __init__(self, name: str, tokens: list[int], hidden_from: Tensor | None = None) -> None:
        """hidden_from [L, Hkv, N]: the first query that no longer sees an entry, as in `MaskedReference`."""
        self.model, self.traits, self.tokens = plain_copy(name), wrapped(name).traits, tokens
        self.model.set_attn_implementation(SPY)
        shape = self.traits.layers, self.traits.kv_heads, len(tokens)
        self.hidden_from = torch.full(shape, len(tokens)) if hidden_from is None else hidden_from
        self.cache = DynamicCache()
        with torch.no_grad():
            self.whole = self._run(0, len(tokens), self.cache, torch.zeros(shape, dtype=torch.bool))

    def at(self, position: int, evicted: Tensor | None = None, shifts: dict[int, Tensor] | None = None) -> Observation:
        """One position's own path. evicted [L, Hkv, N] bool by token; shifts by layer [Hq D] are added to contexts."""
        cache = DynamicCache()
        for layer, rows in enumerate(self.cache.layers):
            cache.update(rows.keys[:, :, :position], rows.values[:, :, :position], layer)
        evicted = torch.zeros_like(self.hidden_from, dtype=torch.bool) if evicted is None else evicted
        return self._run(position, position + 1, cache, evicted, shifts or {})

    def _run(
        self, start: int, stop: int, cache: DynamicCache, evicted: Tensor, shifts: dict[int, Tensor] | None = None
    ) -> Observation:
        global _observed
        _observed = Observation()
        with self._hooks(start, stop, evicted, shifts or {}):
            positions = torch.arange(start, stop)
            output = self.model(
                input_ids=torch.tensor([self.tokens[start:stop]]),
                position_ids=positions[None],
                cache_position=positions,
                past_key_values=cache,
                use_cache=True,
            )
        _observed.logits = output.logits[0]
        return _observed

    @contextmanager
    def _hooks(self, start: int, stop: int, evicted: Tensor, shifts: dict[int, Tensor]) -> Iterator[None]:
        def keep_residual(module: nn.Module, args: tuple[Any, ...]) -> None:
            _observed.residual = args[0][0]

        handles = [final_norm_module(self.model).register_forward_pre_hook(keep_residual)]
        for index, layer in enumerate(decoder_layers(self.model)):
            mask = self._mask(index, start, stop, evicted[index])

            def masked(module: nn.Module, args: Any, kwargs: Any, mask: Tensor = mask) -> Any:
                return args, {**kwargs, "attention_mask": mask}

            def shifted(module: nn.Module, args: Any, index: int = index) -> Any:
                context = args[0] + shifts[index] if index in shifts else args[0]
                _observed.context[index] = context[0]
                return (context,)

            def keep_query(module: nn.Module, args: Any, output: Tensor, index: int = index) -> None:
                by_head = output[0].view(stop - start, -1, self.traits.head_dim) if output.dim() == 3 else output[0]
                heads_first = by_head.shape[0] == self.traits.query_heads
                _observed.unrotated[index] = by_head if heads_first else by_head.transpose(0, 1)

            attention = layer.self_attn
            handles.append(getattr(attention, "q_norm", attention.q_proj).register_forward_hook(keep_query))
            handles.append(attention.register_forward_pre_hook(masked, with_kwargs=True))
            handles.append(output_projection_module(layer).register_forward_pre_hook(shifted))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mask(self, layer: int, start: int, stop: int, evicted: Tensor) -> Tensor:
        query, key = torch.arange(start, stop)[:, None], torch.arange(stop)[None]
        visible = (key <= query) & (query < self.hidden_from[layer, :, None, :stop]) & ~evicted[:, None, :stop]
        if layer in self.traits.sliding_layers:
            assert self.traits.sliding_window is not None
            visible &= key > query - self.traits.sliding_window
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        return mask.repeat_interleave(self.traits.group, dim=0)[None]
