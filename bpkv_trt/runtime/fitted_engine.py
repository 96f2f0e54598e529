"""An engine for one answer, on a pool that holds it to its end."""

from collections.abc import Sequence

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.policies.registry import settled
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.memory import activation_bytes, pool_bytes, require_memory
from bpkv_trt.runtime.scratch import scratch_rows


def fitted_engine(
    loaded: LoadedModel,
    config: BpkvConfig,
    turns: Sequence[int],
    new_tokens: int,
    trace: Trace,
    *,
    caches: int = 1,
    memory_limit: int | None = None,
) -> Engine:
    """turns: tokens of each. caches: sequences of that size that are held at once.

    Raises InputError, before anything is allocated, where it needs more than `memory_limit` bytes, or than are free.
    """
    prompt, config = sum(turns), settled(config)
    rows = prompt + new_tokens
    scratch = scratch_rows(config, loaded.encoder, turns)
    cache = caches * pool_bytes(loaded, rows, config.page_size) + pool_bytes(loaded, scratch, config.page_size)
    needed = cache + activation_bytes(loaded, prompt, config)
    require_memory(needed, loaded.model.device, memory_limit, caches=caches)
    pool = make_pool(loaded, rows, config.page_size, caches=caches, scratch=scratch)
    return Engine(loaded, config, pool, trace)
