"""`bpkv generate --engine-dir`: the main job on an engine of TensorRT-LLM."""

from typing import Any

import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.generation_report import Generation
from bpkv_trt.models.tokenizers import load_tokenizer
from bpkv_trt.profiling import Trace
from bpkv_trt.progress import Progress
from bpkv_trt.request import EngineRequest
from bpkv_trt.runtime.engine_runner import EngineRunner
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.trace_file import traced


def run_generate_on_engine(request: EngineRequest, progress: Progress) -> tuple[BpkvConfig, dict[str, Any]]:
    """Run one request; returns what the cache was compacted with, and the report, as `run_generate` makes it.

    Raises a BpkvError before the prompt is run where prompt, tokenizer, engine and options do not go together.
    """
    with traced(request.trace, torch.cuda.synchronize if torch.cuda.is_available() else None) as trace:
        return _run(request, progress, trace)


def _run(request: EngineRequest, progress: Progress, trace: Trace) -> tuple[BpkvConfig, dict[str, Any]]:
    sampling = SamplingParams(request.max_new_tokens, request.temperature, request.top_p)
    progress.stage("load")
    with trace.range("load"):
        words = load_tokenizer(request.tokenizer)
        (prompt,) = words.encoder.encode(request.prompt, request.question, raw=request.raw)
        runner = EngineRunner.open(request.engine, request.plugin_lib, request.options, trace, request.bounded)
    sampling = sampling.stopping_at(words.stop_tokens(runner.built.traits.vocabulary)).seeded(runner.config.seed)
    progress.stage("prefill and decode", request.max_new_tokens)
    (answer,) = runner.generate([prompt], sampling, lambda _: progress.advance())
    generation = Generation(
        text=words.encoder.decode(answer.tokens),
        model=str(request.engine),
        prompt_tokens=len(prompt),
        generated_tokens=len(answer.tokens),
        config=runner.config,
        events=answer.events,
    )
    return runner.config, generation.report() | {"timings_s": trace.seconds()}
