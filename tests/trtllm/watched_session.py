"""Our session over a small model's engine, watched: what it evicts, and what holds after every step."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.weights import ModelWeights
from bpkv_trt.pool.block_pool import BlockPool
from bpkv_trt.trtllm.built_engine import BuiltEngine, EngineLimits
from bpkv_trt.trtllm.network_record import KEY, NetworkRecord
from tests.runtime.masked_reference import NEVER
from tests.trtllm.session_place import SessionPlace

FRESH = ("bpkv_trt.runtime.trtllm_session", "bpkv_trt.runtime.engine_ports")  # they import TensorRT-LLM


def built_engine(place: SessionPlace, kernels: Any = None) -> BuiltEngine:
    """As its folder would give it, with the model's own projections."""
    record = NetworkRecord.from_pretrained({KEY: getattr(place.built.model.config, KEY)}, "this test")
    limits = EngineLimits.model_validate(place.options)
    return BuiltEngine(place.built.settings, limits, record.traits, ModelWeights(place.built.loaded.model), kernels)


def open_session(place: SessionPlace, config: BpkvConfig | None = None, kernels: Any = None, **options: Any) -> Any:
    """A session that is watched; unused rows of its pool are NaN."""
    stock = importlib.import_module(FRESH[0]).BpkvSession

    class Watched(stock):  # type: ignore[misc, valid-type]
        """`evicted_at`: by sequence, [L, Hkv, N], the first position that no longer sees an entry."""

        def _pool(self) -> BlockPool:
            pool = super()._pool()
            self.pool, self.evicted_at = pool, {}
            return pool

        def _get_next_step_shape_buffer(self, *given: Any, **named: Any) -> Any:
            tensors = super()._get_next_step_shape_buffer(*given, **named)
            self.pool.check_integrity()
            [manager] = self.pools_kv_cache_manager._kv_cache_managers
            assert manager.lens == [row + 1 for row in self._batch.rows], "blocks are held for rows that never come"
            for sequence in self.pool.sequences:
                self._note(sequence)
            offsets = self.pools_kv_cache_manager.get_block_offsets(1)
            assert torch.equal(tensors["host_kv_cache_block_offsets"].to_torch().flatten(), offsets.flatten())
            return tensors

        def _note(self, sequence: int) -> None:
            end, shape = self.pool.logical_length(sequence), (self.pool.layers, self.pool.kv_heads)
            known = self.evicted_at.get(sequence, torch.empty(*shape, 0, dtype=torch.int64))
            come = torch.full((*shape, end - known.shape[2]), NEVER)
            known = torch.cat([known, come], dim=2)
            held = torch.zeros_like(known, dtype=torch.bool)
            for layer in range(shape[0]):
                for head in range(shape[1]):
                    held[layer, head, self.pool.positions(sequence, layer, head).long()] = True
            assert not bool((held & (known < NEVER)).any()), "an entry came back"
            self.evicted_at[sequence] = torch.where(~held & (known == NEVER), end, known)

    return place.session(Watched, built=built_engine(place, kernels), config=config, poison=True, **options)


def hidden_from(session: Any, sequence: int, tokens: Sequence[int]) -> Tensor:
    """[L, Hkv, N] of a whole sequence, for `MaskedReference`."""
    known = session.evicted_at[sequence]
    rest = torch.full((*known.shape[:2], len(tokens) - known.shape[2]), NEVER)
    return torch.cat([known, rest], dim=2)
