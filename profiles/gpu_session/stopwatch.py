"""Device time of a launch, from memory rather than from cache."""

import statistics
import time
from collections.abc import Callable

import torch

LEAD = 2_000_000  # clock ticks, about a millisecond: the host is ahead of the device, so that launches are not timed
WARM_UPS = 3


class Stopwatch:
    """Medians over `repeats` runs; a CPU, which rehearses, is timed once by its clock."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.empty(2 * cache, dtype=torch.int8, device=device)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Median device time of a run that the host does not wait within."""
        if self.device.type == "cpu":
            return self.once(run)
        for _ in range(WARM_UPS):
            run()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for start, end in events:
            torch.cuda._sleep(LEAD)
            self.flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in events))

    def once(self, run: Callable[[], object]) -> float:
        """Milliseconds of one run by the host's clock, from an idle device to an idle device."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
