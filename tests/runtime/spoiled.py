"""A compaction in which a forward pass, or a score, goes wrong."""

import itertools
from typing import Any

import pytest
from torch import Tensor, nan, nn

from bpkv_trt.errors import NumericalError
from bpkv_trt.policies.bpkv import Bpkv
from bpkv_trt.runtime.engine import Engine


def assert_compaction_ends_at(engine: Engine, sequence: int, call: int) -> None:
    """The logits of forward pass number `call` of the prompt's compaction are NaN: it is refused, and none follows."""
    calls = itertools.count()

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * nan if next(calls) == call else output

    handle = engine.host.model.lm_head.register_forward_hook(spoil)
    try:
        with pytest.raises(NumericalError, match="NaN or Inf"):
            engine.compactor.on_context_step_end(sequence)
    finally:
        handle.remove()
    assert next(calls) == call + 1


def spoil_scores(monkeypatch: pytest.MonkeyPatch, where: tuple[int | slice, ...], value: float) -> None:
    """The scores of `bpkv` at [layer, KV head, row] are `value`."""
    honest = Bpkv.score

    def spoilt(self: Bpkv, *args: Any) -> Tensor:
        scores = honest(self, *args)
        scores[where] = value
        return scores

    monkeypatch.setattr(Bpkv, "score", spoilt)
