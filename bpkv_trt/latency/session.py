"""Running a profile in this process: the same work at every budget, in turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bpkv_trt.latency.answer_run import AnswerRun
from bpkv_trt.latency.load_run import LoadRun
from bpkv_trt.latency.profile import Profile
from bpkv_trt.models.loading import load_model
from bpkv_trt.models.placement import device_of, dtype_of
from bpkv_trt.profiling import Trace
from bpkv_trt.progress import Progress

Row = dict[str, Any]


def run_session(profile: Profile, progress: Progress) -> tuple[list[Row], Trace]:
    """Run a profile; returns a row per counted run, and the trace of them all.

    Raises a BpkvError before anything is run where model, prompt, options and memory do not go together.
    """
    device = device_of(profile.device)
    progress.stage("load")
    loaded = load_model(profile.model, dtype=dtype_of(profile.dtype, device), device=device)
    run = AnswerRun(loaded, profile) if profile.serving is None else LoadRun(loaded, profile, profile.serving)
    synchronize = torch.cuda.synchronize if device == "cuda" else None
    progress.stage("warm-up", profile.warmup * len(profile.budgets))
    for _ in range(profile.warmup):
        for budget in profile.budgets:
            run.warm_up(budget, Trace(synchronize))
            progress.advance()
    trace, rows = Trace(synchronize, record=True), list[Row]()
    progress.stage("runs", profile.repeats * len(profile.budgets))
    with _captured(profile):
        for repeat in range(profile.repeats):
            for budget in profile.budgets:  # in turn, so that a machine that slows down does so for all of them
                rows.append({"budget": budget, "repeat": repeat, **run(budget, trace)})
                trace.cache_bytes = None  # which would keep this pool while the next one is made
                progress.advance()
    return rows, trace


@contextmanager
def _captured(profile: Profile) -> Iterator[None]:
    """What a profiler that waits for CUDA's profiling interface records."""
    if profile.nsys.capture_range != "cudaProfilerApi" or not torch.cuda.is_available():
        yield
        return
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
