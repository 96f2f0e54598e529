"""How much noise in one layer's cached values changes the output: RippleKV's layer budgets."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bpkv_trt.errors import InputError
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.runtime.engine import make_pool
from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost

NOISE = 0.1  # of a value's norm: large beside rounding, small enough for the KL to grow with its square in every layer
POSITIONS = 8  # last positions whose next-token distribution is compared, as many as a compaction preserves
LENGTH = 512  # tokens of a sample, at most
SHORTEST = 64  # tokens; below, nearly all of a cache is sinks and recent window
CHARACTERS = 4  # of text taken for every token, about as many as tokenizers put into one
PAGE_SIZE = 32


def calibration_samples(encoder: PromptEncoder, text: str, samples: int, length: int, seed: int) -> list[list[int]]:
    """`samples` stretches of a text at random places, each of about, and at most, `length` tokens.

    Raises InputError where a stretch is too short to tell anything.
    """
    generator, span, result = torch.Generator().manual_seed(seed), length * CHARACTERS, list[list[int]]()
    for _ in range(samples):
        start = int(torch.randint(max(1, len(text) - span + 1), (), generator=generator))
        tokens = encoder.encode_raw(text[start : start + span])[:length]
        if len(tokens) < min(SHORTEST, length):
            raise InputError(
                f"The calibration text gives only {len(tokens)} tokens, and {SHORTEST} are the least from which a "
                "layer's sensitivity can be told; give a longer text."
            )
        result.append(tokens)
    return result


@torch.no_grad()
def layer_sensitivity(
    loaded: LoadedModel, samples: Sequence[Sequence[int]], seed: int, on_layer: Callable[[], None] = lambda: None
) -> tuple[float, ...]:
    """By layer, KL(undisturbed || disturbed) in nats, mean over the last positions of all samples.

    Disturbed: to every cached value v of the layer noise |v| g / 10 / sqrt(D) is added, g standard normal; the last
    positions run again over it, their own keys and values fresh, all other layers' as they were cached. 0 for layers
    with a sliding window, which stand outside the budget. Raises NumericalError where a logit is NaN or Inf.
    """
    pool = make_pool(loaded, max(map(len, samples)), PAGE_SIZE)
    host, generator = TorchHost(loaded, pool, replayed=POSITIONS), torch.Generator().manual_seed(seed)
    divergences = torch.zeros(loaded.traits.layers, dtype=torch.float64)
    for tokens in samples:
        sequence = host.admit(len(tokens))
        host.forward([Chunk(sequence, tokens)])
        full = _log_probabilities(host, sequence)
        for layer in loaded.traits.compactable_layers:
            with _noise(host, sequence, layer, generator):
                disturbed = _log_probabilities(host, sequence)
            divergences[layer] += (full.exp() * (full - disturbed)).sum(-1).mean().cpu()
            on_layer()
        host.release(sequence)
    return tuple((divergences / len(samples)).clamp_min(0).tolist())


def layer_weights(sensitivity: Sequence[float], compactable: Sequence[int]) -> tuple[float, ...]:
    """Sensitivities -> weights exp(s / max s), of mean 1 over the compactable layers; 1 for the others.

    Bounded: the most sensitive layer keeps at most e times as much as one that noise does not touch.
    """
    largest = max((sensitivity[layer] for layer in compactable), default=0.0) or 1.0
    raw = {layer: math.exp(sensitivity[layer] / largest) for layer in compactable}
    mean = sum(raw.values()) / max(len(raw), 1)
    return tuple(raw[layer] / mean if layer in raw else 1.0 for layer in range(len(sensitivity)))


@contextmanager
def _noise(host: TorchHost, sequence: int, layer: int, generator: torch.Generator) -> Iterator[None]:
    heads = [host.pool.heads(sequence, layer).head(head) for head in range(host.traits.kv_heads)]
    k, v = (torch.stack(rows) for rows in zip(*heads, strict=True))  # [Hkv, n, D], copies
    normal = torch.randn(v.shape, generator=generator).to(v.device)
    noise = NOISE * v.float().norm(dim=-1, keepdim=True) * normal / math.sqrt(v.shape[-1])
    host.pool.write(sequence, layer, k, (v.float() + noise).to(v.dtype))
    try:
        yield
    finally:
        host.pool.write(sequence, layer, k, v)


def _log_probabilities(host: TorchHost, sequence: int) -> Tensor:
    # [M, V] float64
    count = min(POSITIONS, len(host.tokens[sequence]))
    return torch.log_softmax(host.replay(sequence, count).logits.double(), dim=-1)
