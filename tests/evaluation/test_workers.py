"""Interrupts and deaths while several processes measure: nothing is left of them, and nothing hangs."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest

from bpkv_trt.errors import BpkvError
from bpkv_trt.evaluation import workers
from bpkv_trt.evaluation.journal import Key, Record
from tests.evaluation.stand_ins import dying, echo, interrupted

SAMPLES: list[Key] = [("passkey", seed) for seed in range(10_000)]  # more than are done before anything ends


@pytest.fixture
def measured_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Iterator[Record]]]:
    """Records of two processes that do something else; afterwards there are no more processes or threads."""
    comparison: Any = None

    def measured(work: Callable[..., None], samples: list[Key] = SAMPLES) -> Iterator[Record]:
        monkeypatch.setattr(workers, "_work", work)
        return workers.measured(comparison, samples, jobs=2)

    threads = threading.active_count()
    yield measured
    assert multiprocessing.active_children() == [] and threading.active_count() == threads


MeasuredBy = Callable[..., Iterator[Record]]


def test_every_sample_is_measured_once(measured_by: MeasuredBy) -> None:
    for count in (2, 3, 50):
        records = list(measured_by(echo, SAMPLES[:count]))
        assert sorted(record["sample"] for record in records) == SAMPLES[:count]


def test_an_interrupt_means_nothing_to_a_worker(measured_by: MeasuredBy) -> None:
    """However early: a terminal sends it to all, and the parent ends them."""
    assert len(list(measured_by(interrupted, SAMPLES[:9]))) == 9


def test_an_interrupt_while_workers_are_started_leaves_none(
    measured_by: MeasuredBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SpawnProcess.start

    def interrupted_start(process: SpawnProcess) -> None:
        start(process)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted_start)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            next(measured_by(echo))
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("moment", [0.0001 * 1.5**step for step in range(12)])
def test_an_interrupt_at_any_moment_ends_the_workers(
    measured_by: MeasuredBy, monkeypatch: pytest.MonkeyPatch, moment: float
) -> None:
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            for index, _ in enumerate(measured_by(echo)):
                if index == 5:
                    signal.setitimer(signal.ITIMER_REAL, moment)
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_a_worker_that_is_killed_is_told_and_what_it_did_stands(measured_by: MeasuredBy) -> None:
    records = measured_by(dying)
    assert next(records)["sample"] in SAMPLES[:2]
    with pytest.raises(BpkvError, match="ended without a word, probably killed for its memory"):
        list(records)


def test_what_workers_did_stands_though_they_are_dead_when_it_is_read(
    measured_by: MeasuredBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = workers.wait

    def wait_for_ends(connections: Any) -> Any:
        for process in multiprocessing.active_children():
            process.join()
        return ready(connections)

    monkeypatch.setattr(workers, "wait", wait_for_ends)
    done = []
    with pytest.raises(BpkvError, match="ended without a word"):
        for record in measured_by(dying):
            done.append(record["sample"])
    assert sorted(done) == SAMPLES[:2]
