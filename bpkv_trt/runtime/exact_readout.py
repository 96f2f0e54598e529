"""The exact readout: the true Jacobian of everything after an attention output, read by random Fisher probes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bpkv_trt.core.divergence import FisherDivergence
from bpkv_trt.core.readout import final_readout, fisher_probes
from bpkv_trt.models.modules import decoder_layers
from bpkv_trt.runtime.step import ReplayStep
from bpkv_trt.runtime.torch_host import LayerCall, Replay, TorchHost


class ExactReadout:
    """Vector-Jacobian products of R Fisher probes with each layer's attention output, along each position's own path.

    Keys and values of other positions are constants, as they were cached before the eviction. The backward pass goes
    layer by layer from the last, one batched call for all R, so what autograd saves is one layer's. The rows are kept
    for the second pass of selection: M R G / (2 T) of the cache's bytes in fp32, 3 % at 4,096 tokens with 72
    positions, a probe of each, and a group of 3.
    """

    def __init__(
        self,
        host: TorchHost,
        sequence: int,
        replay: Replay,
        topk_ids: Tensor,
        topk_p: Tensor,
        probes: int,
        seed: int,
        position_weights: Tensor,
    ) -> None:
        """topk_ids, topk_p [M, K]; position weights [M]; `seed` starts a CPU generator of the request's own."""
        self.divergence = FisherDivergence(position_weights)
        self.rows: dict[int, Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        xi = fisher_probes(topk_p, probes, generator)  # [M, R, K]
        head = final_readout(replay.residual, topk_ids, topk_p, host.traits, host.weights)  # [M, K, d]
        cotangent = (xi @ head).transpose(0, 1)[:, None].to(replay.residual.dtype)  # [R, 1, M, d]
        layers = decoder_layers(host.model)
        compactable = set(host.traits.compactable_layers)
        for layer in range(host.traits.layers - 1, min(compactable) - 1, -1):
            step = ReplayStep(host.pool, host.traits, sequence)
            cotangent, rows = _pull_back(layers[layer], layer, replay.layer_calls[layer], step, cotangent)
            if layer in compactable:
                self.rows[layer] = rows

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return iter(self.rows.items())


def _pull_back(
    module: torch.nn.Module, layer: int, call: LayerCall, step: ReplayStep, cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    """cotangent [R, 1, M, d] at the layer's output -> the same at its input, and [M, R, Hq, D] fp32 at its context."""
    hidden = call.hidden.detach().requires_grad_()
    with torch.enable_grad():
        output = module(hidden, *call.args, **{**call.kwargs, "bpkv_step": step})
        output = output[0] if isinstance(output, tuple) else output
        below, rows = torch.autograd.grad(output, (hidden, step.contexts[layer]), cotangent, is_grads_batched=True)
    return below, rows.transpose(0, 1).float()
