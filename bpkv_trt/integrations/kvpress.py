"""BP-KV, and every other policy that goes by the last positions, as a press of NVIDIA's kvpress."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

try:
    from kvpress import BasePress
    from kvpress.utils import compute_n_kept
except ImportError as error:
    raise ImportError(f"BpkvPress needs kvpress ({error}): pip install 'bpkv-trt[kvpress]'.") from error

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ConfigError, InputError, ModelError, quoted
from bpkv_trt.models.traits_of import traits_of
from bpkv_trt.policies.base import Requirement
from bpkv_trt.policies.registry import policy_class, refuse_idle, settled
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.scratch import scratch_rows

_PRESSED: WeakSet[PreTrainedModel] = WeakSet()  # models within a `with` of ours
logger = logging.getLogger(__name__)

SET_BY_PRESS = ("budget", "generation_budget", "regime", "scope", "layer_table", "interval", "defer", "page_size")
UNSEEN: frozenset[Requirement] = frozenset({"received_attention", "query_moments", "replay"})


@dataclass(frozen=True)
class _PressedModel:
    model: PreTrainedModel
    traits: ModelTraits


@dataclass(init=False)
class BpkvPress(BasePress):  # type: ignore[misc]
    """Keeps the entries without which the next-token distribution at the end of the context would change most.

    Acts once, after the whole prefill and not layer by layer, since an entry is judged by what it does to the logits:
    the cache is copied into a paged pool, up to `lookahead` tokens are drafted behind it, they and the last positions
    are run again over it, and the cache is cut to the rows that the policy keeps. While that lasts, K and V exist
    twice. Heads of a layer keep different rows, all heads of all layers equally many, which is what a DynamicCache can
    hold: kvpress's count, int(T (1 - compression_ratio)), never below the protected tokens. Kept rows stay in the
    order of their positions.

    Parameters
    ----------
    compression_ratio : float, default=0.0
        Share of the entries that goes, in [0, 1).
    **options
        Options of `BpkvConfig`: policy, preset, readout, lookahead, positions, sinks, recent and others. ConfigError
        for those that a press settles (scope, regime, budgets, layer table) and for policies that it cannot serve.

    What is compressed is the first forward pass of an empty cache. What is fed later, a question or the next chunk of a
    context, is kept whole; a pass no shorter than the one that was compressed is warned of, once per `with`.

    `events` holds what was done, one CompactionEvent for every row of the latest batch; every `with` starts it anew.
    """

    compression_ratio: float
    config: BpkvConfig
    events: list[CompactionEvent] = field(repr=False, compare=False)
    _longest: int = field(repr=False, compare=False)  # tokens of a prefill within this `with`

    def __init__(self, compression_ratio: float = 0.0, **options: Any) -> None:
        given = [name for name in SET_BY_PRESS if name in options]
        if given:
            raise ConfigError(
                f"{', '.join(given)} cannot be given to BpkvPress: it compresses a context once, by compression_ratio, "
                "with equal counts in every head and layer, in a pool of its own. Leave it out."
            )
        _check_ratio(compression_ratio)
        self.compression_ratio = compression_ratio
        config = BpkvConfig(**options, regime="prefill", scope="head")
        _check_policy(config.policy)
        self.config = settled(config)
        refuse_idle(options, [self.config])
        self.events, self._longest = [], 0

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """Compress the first forward pass of every empty cache within.

        Raises ModelError for a model that is not covered, ConfigError for a ratio outside [0, 1); from the forward pass
        InputError for a batch or a cache that cannot be compressed, which is then left whole.
        """
        _check_ratio(self.compression_ratio)  # kvpress lets it be set between uses
        pressed = _PressedModel(model, _fitting_traits(model))
        if model in _PRESSED:
            raise ConfigError(
                "Another BpkvPress is in use on this model, and a cache that one has cut the other cannot cut: leave "
                "the outer `with` first, or give one press the whole ratio."
            )
        self.events, self._longest = [], 0
        handle = model.get_submodule("model").register_forward_hook(
            partial(self._after_forward, pressed), with_kwargs=True
        )
        _PRESSED.add(model)
        try:
            yield
        finally:
            _PRESSED.discard(model)
            handle.remove()

    def compress(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What presses around another one call, layer by layer: always a ConfigError."""
        raise ConfigError(
            "BpkvPress judges a whole context after its prefill and not layer by layer, so it cannot be a part of "
            "another press (ComposedPress, PrefillDecodingPress and others): use it by itself, `with press(model):`."
        )

    def forward_hook(self, *_: Any, **__: Any) -> Any:
        """As `compress`: ComposedPress calls it instead."""
        return self.compress()

    def _after_forward(
        self, pressed: _PressedModel, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        candidates = (kwargs.get("past_key_values"), *(output.values() if isinstance(output, dict) else output))
        cache = next((value for value in candidates if isinstance(value, Cache)), None)
        if cache is None or self.compression_ratio == 0:  # no cache: our own replay, among others
            return
        tokens = kwargs.get("input_ids", args[0] if args else None)
        given = kwargs.get("inputs_embeds") if tokens is None else tokens
        if given is None:
            return
        length = given.shape[1]
        if cache.get_seq_length() != length:  # not the prefill: there were rows before
            self._warn_of_chunk(length)
            return
        self._longest = max(self._longest, length)
        layers = _plain_layers(cache)
        whole = [(layer.keys, layer.values) for layer in layers]
        kept = self._kept_rows(pressed, _checked(tokens, kwargs), whole)  # [B, L, Hkv, n]
        for index, layer in enumerate(layers):
            rows = kept[:, index, :, :, None].expand(-1, -1, -1, pressed.traits.head_dim)
            layer.keys, layer.values = layer.keys.gather(2, rows), layer.values.gather(2, rows)

    def _warn_of_chunk(self, length: int) -> None:
        """A question is shorter than its context; what is longer looks like more of the context."""
        if 0 < self._longest <= length:
            logger.warning(
                f"{length} tokens follow the {self._longest} that were compressed, and are kept whole: only the first "
                "forward pass of an empty cache is compressed. Feed a context in one pass."
            )
            self._longest = sys.maxsize  # once is enough

    @torch.inference_mode(False)
    @torch.no_grad()
    def _kept_rows(self, pressed: _PressedModel, tokens: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        """layers: K and V [B, Hkv, T, D] of tokens [B, T] -> [B, L, Hkv, n] int64 rows to keep, ascending."""
        length = tokens.shape[1]
        config = self.config.replace(budget=f"{self._count(length)}t")
        kept, self.events = [], []
        with _attention_restored(pressed.model):
            scratch = scratch_rows(config, None, [length])
            engine = Engine(pressed, config, make_pool(pressed, length, config.page_size, scratch=scratch))
            for row, row_tokens in enumerate(tokens.tolist()):
                sequence = engine.open(length)
                _copy_rows(engine, sequence, row_tokens, [(k[row], v[row]) for k, v in layers])
                event = engine.compactor.on_context_step_end(sequence)
                assert event is not None, "a press compresses after the prefill"
                if event.entries_after == event.entries_before and config.budget.amount < length:
                    logger.warning(event.note)
                self.events.append(event)
                kept.append(engine.pool.view(sequence).position_table().long())
                engine.close(sequence)
        return torch.stack(kept)

    def _count(self, length: int) -> int:
        """Tokens per head to keep of `length`."""
        asked, protected = int(compute_n_kept(length, self.compression_ratio)), self.config.protected
        if asked < min(protected, length):
            logger.warning(
                f"compression_ratio {self.compression_ratio} would leave {asked} of {length} tokens; raised to the "
                f"{min(protected, length)} that are protected (sinks and the recent window)"
            )
        return max(asked, protected)


def _copy_rows(engine: Engine, sequence: int, tokens: list[int], layers: list[tuple[Tensor, Tensor]]) -> None:
    """Let an empty sequence hold what a finished prefill left: K and V [Hkv, T, D] of every layer."""
    engine.pool.extend(sequence, len(tokens))
    for index, (k, v) in enumerate(layers):
        engine.pool.write(sequence, index, k, v)
    engine.host.tokens[sequence] = tokens


@contextmanager
def _attention_restored(model: PreTrainedModel) -> Iterator[None]:
    """Give the model back its attention, which a host replaces by its own."""
    implementation = model.config._attn_implementation
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


def _check_ratio(ratio: float) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise ConfigError(
            f"compression_ratio is {ratio!r}; it is the share of entries that goes, at least 0 and below 1 "
            "(0.8 keeps a fifth)."
        )


def _check_policy(name: str) -> None:
    policy = policy_class(name)
    missing = policy.requires & UNSEEN
    if missing:
        raise ConfigError(
            f"The policy {name} needs {', '.join(sorted(missing))}, which a finished prefill's cache and last tokens "
            "do not tell. Choose another policy, or kvpress's own press of that method."
        )
    if not policy.takes_layer_table or "score_table" in policy.requires:
        raise ConfigError(
            f"The policy {name} keeps more in some layers than in others, and transformers gives all layers of a "
            "DynamicCache one attention mask. Choose another policy, or run it with `bpkv generate`."
        )


def _fitting_traits(model: PreTrainedModel) -> ModelTraits:
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"BpkvPress compresses the cache of a transformers model and was given {quoted(model)}: give it the model "
            "itself, as AutoModelForCausalLM.from_pretrained or load_model(...).model returns it."
        )
    traits = traits_of(model)
    if traits.sliding_layers:
        raise ModelError(
            "BpkvPress cannot compress a model with sliding-window layers: those keep their entries, so layers would "
            "differ in length, and transformers' masks for a DynamicCache would be wrong. Use `bpkv generate`."
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise ModelError(
            f"BpkvPress needs the model on one device and finds it on {', '.join(sorted(devices))}. "
            "Load it without device_map, or onto one device."
        )
    return traits


def _plain_layers(cache: Cache) -> list[Any]:
    """The layers of a cache that can be cut; InputError for any other kind."""
    if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise InputError(
            f"BpkvPress cuts a plain DynamicCache and was given a {type(cache).__name__} (quantised, static, offloaded "
            "or with windows). Pass past_key_values=DynamicCache(), or none."
        )
    return list(cache.layers)


def _checked(tokens: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """The tokens [B, T]; InputError where the cached rows are not theirs at positions 0, 1, 2, ..."""
    if tokens is None:
        raise InputError("BpkvPress runs the last tokens again and so needs input_ids; inputs_embeds do not do.")
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
        raise InputError(
            "The context is padded or has a mask of its own, which BpkvPress cannot compress: padding would count as "
            "entries. Pass contexts one by one, or of equal length, without attention_mask."
        )
    counted = torch.arange(tokens.shape[1], device=tokens.device)
    if positions is not None and not bool((positions.to(tokens.device) == counted).all()):
        raise InputError("BpkvPress needs a context whose position_ids count from 0; leave them out.")
    return tokens
