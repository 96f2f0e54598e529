"""The main job, `bpkv generate --model`: run a long prompt, compact its cache, answer, and report what was kept."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from bpkv_trt.errors import ConfigError, InputError
from bpkv_trt.evaluation.verify import verify
from bpkv_trt.generation_report import Generation
from bpkv_trt.models.loading import LoadedModel, load_model
from bpkv_trt.models.placement import device_of, dtype_of
from bpkv_trt.models.stop_tokens import stop_tokens_of
from bpkv_trt.profiling import Trace
from bpkv_trt.progress import Progress
from bpkv_trt.request import GenerateRequest
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.fitted_engine import fitted_engine
from bpkv_trt.runtime.generator import Generator, Request
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.trace_file import traced

Turns = Sequence[Sequence[int]]


def run_generate(request: GenerateRequest, progress: Progress) -> dict[str, Any]:
    """Run one request on a fresh engine; returns the report, ready to be printed and written as JSON.

    Raises a BpkvError before the prompt is run where prompt, model, configuration and memory do not go together.
    """
    _check_regime(request)
    device = device_of(request.device)
    with traced(request.trace, torch.cuda.synchronize if device == "cuda" else None) as trace:
        return _run(request, progress, trace, device)


def _run(request: GenerateRequest, progress: Progress, trace: Trace, device: str) -> dict[str, Any]:
    sampling = SamplingParams(request.max_new_tokens, request.temperature, request.top_p, request.config.seed)
    progress.stage("load")
    with trace.range("load"):
        loaded = load_model(request.model, dtype=dtype_of(request.dtype, device), device=device)
    turns = _encode(loaded, request)
    sampling = sampling.stopping_at(stop_tokens_of(loaded.model, loaded.tokenizer))
    engine = fitted_engine(
        loaded,
        request.config,
        [len(turn) for turn in turns],
        request.max_new_tokens,
        trace,
        caches=2 if request.verify else 1,  # the full cache stands beside the compacted one
        memory_limit=request.memory_limit,
    )
    answer = _answer(engine, turns, sampling, progress)
    report = _generation(request, loaded, turns, answer, engine).report()
    seconds = trace.seconds()  # before the verification scores and compacts once more
    if request.verify:
        progress.stage("verify", request.max_new_tokens)
        checked = verify(engine, turns, sampling.stop_tokens, request.max_new_tokens, progress.advance)
        report["verify"] = asdict(checked)
    report["timings_s"] = seconds | {"verify": trace.seconds()["verify"]}
    return report


def _check_regime(request: GenerateRequest) -> None:
    """Raise ConfigError where the request has something for a regime that it does not have."""
    if request.question_after is not None and "prefill" not in request.config.regime:
        raise ConfigError(
            f"--question-after is asked of the compacted cache, but with --regime {','.join(request.config.regime)} "
            "nothing is compacted before the question: use --question, or a regime with prefill."
        )


def _encode(loaded: LoadedModel, request: GenerateRequest) -> Turns:
    turns: Turns = loaded.encoder.encode(request.prompt, request.question, request.question_after, raw=request.raw)
    tokens, known = sum(map(len, turns)), loaded.traits.max_positions
    if tokens + request.max_new_tokens > known and not request.allow_extrapolation:
        raise InputError(
            f"The prompt has {tokens} tokens, with {request.max_new_tokens} new ones to come, but {request.model} "
            f"knows {known} positions; beyond them models answer nonsense. Shorten the prompt or the answer, or give "
            "--allow-extrapolation to run it all the same."
        )
    return turns


def _answer(engine: Engine, turns: Turns, sampling: SamplingParams, progress: Progress) -> Request:
    generator = Generator(engine)
    answer = generator.add(turns, sampling)
    progress.stage("prefill and decode", sampling.max_new_tokens)
    generator.generate([answer], lambda _: progress.advance())
    return answer


def _generation(
    request: GenerateRequest, loaded: LoadedModel, turns: Turns, answer: Request, engine: Engine
) -> Generation:
    return Generation(
        text=loaded.encoder.decode(answer.generated),
        model=request.model,
        prompt_tokens=sum(map(len, turns)),
        generated_tokens=len(answer.generated),
        config=engine.compactor.config,
        events=answer.events,
        notes=_notes(request, loaded, turns),
    )


def _notes(request: GenerateRequest, loaded: LoadedModel, turns: Turns) -> list[str]:
    positions, known = sum(map(len, turns)) + request.max_new_tokens, loaded.traits.max_positions
    return [f"run up to position {positions} of a model that knows {known}"] if positions > known else []
