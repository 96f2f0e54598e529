"""Samples measured in one process or in several, each with the model loaded once."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from traceback import extract_tb

import torch
from transformers.utils.logging import disable_progress_bar

from bpkv_trt.documents import usable_cores
from bpkv_trt.errors import BpkvError
from bpkv_trt.evaluation.cells import measure_sample
from bpkv_trt.evaluation.comparison import Comparison
from bpkv_trt.evaluation.journal import Key, Record
from bpkv_trt.models.loading import LoadedModel, load_model
from bpkv_trt.models.placement import device_of, dtype_of


def measured(comparison: Comparison, samples: Sequence[Key], jobs: int) -> Iterator[Record]:
    """Measure samples (task, seed), in the order in which they are done.

    Raises BpkvError, naming the sample, where one fails; those already yielded stand. With one job everything happens
    in this process.
    """
    if jobs == 1 or len(samples) < 2:
        _set_threads(jobs)
        yield from (_measure(comparison, sample) for sample in samples)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(jobs,)) as executor:
        try:
            yield from _completed({executor.submit(_measure, comparison, sample): sample for sample in samples})
        except BaseException:  # an interrupt too: what still runs is not waited for
            executor.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _completed(futures: dict[Future[Record], Key]) -> Iterator[Record]:
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            try:
                yield future.result()
            except BrokenProcessPool:
                raise BpkvError(
                    "A process that measured samples has ended without a word, probably killed for its memory: use "
                    "fewer --jobs or fewer --tokens."
                ) from None


def _start_worker(jobs: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Of several at once none could be read, and their lock would outlive a worker that is ended.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    _set_threads(jobs)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _set_threads(jobs: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // jobs))


@cache
def _loaded(model: str, dtype: str, device: str) -> LoadedModel:
    device = device_of(device)
    return load_model(model, dtype=dtype_of(dtype, device), device=device)


def _measure(comparison: Comparison, sample: Key) -> Record:
    loaded = _loaded(comparison.model, comparison.dtype, comparison.device)
    task, seed = sample
    try:
        return measure_sample(loaded, comparison, task, seed)
    except BpkvError as error:
        raise type(error)(f"The task {task} with seed {seed} cannot be measured: {error}") from None
    except Exception as error:
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise BpkvError(
            f"Measuring the task {task} with seed {seed} failed in {where} ({type(error).__name__}: {error}). The run "
            "has stopped; this is a fault of bpkv, please report it with the command."
        ) from error
