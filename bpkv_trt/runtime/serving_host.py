"""What a server runs, by its settings: a model, or an engine of TensorRT-LLM."""

from pathlib import Path
from typing import Any

from bpkv_trt.models.loading import load_model
from bpkv_trt.models.placement import device_of, dtype_of
from bpkv_trt.models.tokenizers import Words, load_tokenizer
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.batch import Batch
from bpkv_trt.runtime.engine_batch import EngineBatch
from bpkv_trt.runtime.engine_runner import EngineRunner
from bpkv_trt.runtime.serving_batch import ServingBatch
from bpkv_trt.serving_settings import ServingSettings


def open_batch(settings: ServingSettings, trace: Trace) -> tuple[Batch[Any], Words]:
    """Load it; raises a BpkvError of the kind that fits where that is not possible."""
    with trace.range("load"):
        return _of_model(settings, settings.model, trace) if settings.model else _of_engine(settings, trace)


def _of_model(settings: ServingSettings, model: str, trace: Trace) -> tuple[Batch[Any], Words]:
    device = device_of(settings.device)
    loaded = load_model(model, dtype=dtype_of(settings.dtype, device), device=device)
    batch = ServingBatch.over(
        loaded,
        settings.config,
        trace,
        pool_bytes=settings.pool_bytes,
        chunk_tokens=settings.chunk_tokens,
        most_running=settings.most_running,
    )
    return batch, loaded


def _of_engine(settings: ServingSettings, trace: Trace) -> tuple[Batch[Any], Words]:
    assert settings.engine is not None and settings.tokenizer is not None
    words = load_tokenizer(settings.tokenizer)  # before the engine, which takes longer
    library = None if settings.plugin_lib is None else Path(settings.plugin_lib)
    runner = EngineRunner.open(Path(settings.engine), library, settings.options, trace, settings.bounded_cache)
    stop_tokens = words.stop_tokens(runner.built.traits.vocabulary)
    return EngineBatch(runner, stop_tokens, most_running=settings.most_running), words
