"""Samples measured in one process or in several, each with the model loaded once."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
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
    with _workers(comparison, jobs, min(jobs, len(samples))) as workers:
        for outcome in _outcomes(workers, samples):
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome


@contextmanager
def _workers(comparison: Comparison, jobs: int, count: int) -> Iterator[list[Connection]]:
    """Processes that measure the samples they are sent; whatever happens, none of them is left, nor waited for.

    No executor: its threads share locks with this one, and an interrupt leaves the lock held that it falls on.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        with _interrupts_held():
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, comparison, jobs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
        yield connections
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """In this process an interrupt takes effect afterwards, in those that are started meanwhile it never does.

    Else it could find a process that is started and not noted yet, or one that is still importing, with a traceback.
    """
    came: list[int] = []
    resource_tracker.ensure_running()  # starting it lifts the mask
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def _outcomes(workers: Sequence[Connection], samples: Sequence[Key]) -> Iterator[Record | Exception]:
    waiting, busy = deque(samples), set(workers)
    for worker in workers:
        _send_next(worker, waiting)
    while busy:
        ended = False
        for worker in busy.intersection(wait(busy)):
            try:
                outcome = worker.recv()
            except (EOFError, OSError):
                ended = True
                continue
            if waiting:
                _send_next(worker, waiting)
            else:
                busy.remove(worker)
            yield outcome
        if ended:
            raise BpkvError(
                "A process that measured samples has ended without a word, probably killed for its memory: use "
                "fewer --jobs or fewer --tokens."
            )


def _send_next(worker: Connection, waiting: deque[Key]) -> None:
    with suppress(OSError):  # one that has ended is told when nothing more is received from it
        worker.send(waiting.popleft())


def _work(parent: Connection, comparison: Comparison, jobs: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Of several at once none could be read, and their lock would outlive a worker that is ended.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    _set_threads(jobs)
    with suppress(EOFError, OSError):  # the parent has gone
        while True:
            parent.send(_outcome(comparison, parent.recv()))


def _outcome(comparison: Comparison, sample: Key) -> Record | Exception:
    try:
        return _measure(comparison, sample)
    except Exception as error:
        return error


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
