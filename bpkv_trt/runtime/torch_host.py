"""A Hugging Face causal LM that runs on the pool: its attention reads the pages, and the pool is its only cache."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import NumericalError
from bpkv_trt.models.loading import HostedModel
from bpkv_trt.models.modules import attention_module, decoder_layers, final_norm_module
from bpkv_trt.models.weights import ModelWeights
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.runtime.step import ATTENTION_NAME, AppendStep, Chunk, ReplayStep, Step, paged_attention

AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True)
class Replay:
    """What the last M tokens leave behind when they are run again over the cache."""

    positions: Tensor  # [M] int64, logical
    q: Tensor  # [L, M, Hq, D]
    context: Tensor  # [L, M, Hq, D]
    residual: Tensor  # [M, d]
    logits: Tensor  # [M, V]
    layer_calls: tuple["LayerCall", ...]


@dataclass(frozen=True)
class LayerCall:
    """How the model called one decoder layer, so that the layer can be run again by itself."""

    hidden: Tensor  # [1, M, d]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class TorchHost:
    """Runs one model over many sequences of one pool; packed batches, no padding, no cache of its own."""

    def __init__(self, loaded: HostedModel, pool: PagedKvPool, replayed: int) -> None:
        """`replayed`: how many of the last tokens `replay` will be asked for at most."""
        self.model = loaded.model
        self.traits: ModelTraits = loaded.traits
        self.weights = ModelWeights(loaded.model)
        self.pool = pool
        self.replayed = replayed
        self.tokens: dict[int, list[int]] = {}
        self.model.set_attn_implementation(ATTENTION_NAME)

    @property
    def device(self) -> torch.device:
        return self.pool.keys.device

    def keep_for_replay(self, count: int) -> None:
        """Be ready to `replay` up to `count` tokens of every sequence that is opened from now on."""
        self.replayed = max(self.replayed, count)

    def admit(self, expected_rows: int = 0) -> int:
        """Open an empty sequence; returns its handle."""
        sequence = self.pool.admit(expected_rows)
        self.tokens[sequence] = []
        return sequence

    def fork(self, sequence: int) -> int:
        """Copy a sequence, its rows and its tokens; raises PoolExhausted with nothing changed."""
        return self.adopt(self, sequence)

    def adopt(self, other: "TorchHost", sequence: int) -> int:
        """Copy a sequence of another host of the same model and pool, as `fork` does.

        The other host must have kept, in sliding-window layers, what this one may `replay`.
        """
        assert other.pool is self.pool and other.model is self.model and other.replayed >= self.replayed
        copy = self.pool.fork(sequence)
        self.tokens[copy] = list(other.tokens[sequence])
        return copy

    def retract(self, sequence: int, count: int) -> None:
        """Take back the last `count` tokens of a sequence: those of a draft, or no more than `replay` was promised."""
        if count:
            del self.tokens[sequence][-count:]
            self.pool.retract(sequence, count)

    def release(self, sequence: int) -> None:
        """Close a sequence and give its pages back."""
        del self.tokens[sequence]
        self.pool.release(sequence)

    @torch.no_grad()
    def forward(
        self, chunks: Sequence[Chunk], *, every_token: bool = False, drafting: bool = False, checked: bool = True
    ) -> Tensor:
        """Append the chunks' tokens to their sequences and return the next-token logits [B, V] fp32.

        With `every_token` those after each of the N packed tokens, [N, V]. With `drafting` sliding-window layers drop
        nothing, so that `retract` leaves the sequences as they were.

        Pages for the whole batch are taken before anything runs: PoolExhausted leaves every sequence as it was.
        Raises NumericalError where a logit is NaN or Inf, unless the caller judges each sequence by itself (`finite`)
        and has them not `checked`.
        """
        starts = [self.pool.logical_length(chunk.sequence) for chunk in chunks]
        self.pool.extend_all([(chunk.sequence, len(chunk.tokens)) for chunk in chunks])
        for chunk in chunks:
            self.tokens[chunk.sequence].extend(chunk.tokens)
        positions = [
            torch.arange(start, start + len(chunk.tokens)) for start, chunk in zip(starts, chunks, strict=True)
        ]
        lengths = torch.tensor([len(chunk.tokens) for chunk in chunks])
        keep = torch.arange(int(lengths.sum())) if every_token else lengths.cumsum(0) - 1
        step = self._append_step(chunks)
        needs_rope = any(observer.needs_rope for chunk in chunks for observer in chunk.observers)
        with _rope_kept(self.model, step) if needs_rope else nullcontext():
            logits = self._run(step, [token for chunk in chunks for token in chunk.tokens], torch.cat(positions), keep)
        if not drafting:
            self._drop_outside_window([chunk.sequence for chunk in chunks])
        return finite(logits) if checked else logits

    @torch.no_grad()
    def replay(self, sequence: int, count: int, evicted: Tensor | None = None) -> Replay:
        """Run the last `count` tokens again, each on its own path, all other K and V frozen; the pool is only read.

        `count` is at most `replayed`: sliding-window layers have dropped what earlier positions would need.

        evicted: [L, Hkv, T] bool, rows hidden from attention: the truth that an estimate of their eviction is held to.
        """
        assert count <= self.replayed
        step = ReplayStep(self.pool, self.traits, sequence, evicted)
        tokens = self.tokens[sequence][-count:]
        length = self.pool.logical_length(sequence)
        positions = torch.arange(length - count, length, device=self.device)
        residuals: list[Tensor] = []
        calls: list[LayerCall] = []

        def keep_residual(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            residuals.append(args[0][0])

        def keep_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(LayerCall(args[0], args[1:], kwargs))

        with _watched([final_norm_module(self.model)], keep_residual), _watched(decoder_layers(self.model), keep_call):
            logits = self._run(step, tokens, positions, torch.arange(count))
        layers = range(self.traits.layers)
        return Replay(
            positions=positions,
            q=torch.stack([step.queries[layer] for layer in layers]),
            context=torch.stack([step.contexts[layer] for layer in layers]),
            residual=residuals[0],
            logits=finite(logits),
            layer_calls=tuple(calls),
        )

    def _append_step(self, chunks: Sequence[Chunk]) -> AppendStep:
        if not self.pool.by_kernels or any(len(chunk.tokens) != 1 for chunk in chunks):
            return AppendStep(self.pool, self.traits, chunks)
        from bpkv_trt.runtime.decode_step import DecodeStep

        return DecodeStep(self.pool, self.traits, chunks)

    def _run(self, step: Step, tokens: Sequence[int], positions: Tensor, keep: Tensor) -> Tensor:
        output = self.model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=positions[None].to(self.device),
            use_cache=False,
            logits_to_keep=keep.to(self.device),
            bpkv_step=step,
        )
        return output.logits[0].float()  # type: ignore[no-any-return]

    def _drop_outside_window(self, sequences: Iterable[int]) -> None:
        if self.traits.sliding_window is None:
            return
        for sequence in sequences:
            lengths = self.pool.lengths(sequence)
            for layer in self.traits.sliding_layers:
                beyond = int(lengths[layer, 0]) - self.traits.sliding_window - self.replayed
                if beyond > 0:
                    self.pool.drop_front(sequence, layer, beyond)


@contextmanager
def _watched(modules: Iterable[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rope_kept(model: PreTrainedModel, step: AppendStep) -> AbstractContextManager[None]:
    """Keep each layer's cos and sin in the step as the layer receives them."""

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cos, sin = kwargs["position_embeddings"]
        step.rope[int(module.layer_idx)] = cos[0], sin[0]  # type: ignore[arg-type]

    return _watched([attention_module(layer) for layer in decoder_layers(model)], keep)


def finite(logits: Tensor) -> Tensor:
    """The logits as they are; NumericalError where one is NaN or Inf."""
    if not bool(torch.isfinite(logits).all()):
        raise NumericalError(
            "The model's logits contain NaN or Inf, so no token can be chosen and no eviction judged. "
            "The weights may be damaged, or the dtype too narrow for this model: try --dtype float32."
        )
    return logits
