"""What this machine does at best: products in bf16, and bytes copied within its memory."""

from collections.abc import Iterator

import torch

from profiles.gpu_session.part import Record, Session, run_part
from profiles.gpu_session.stopwatch import Stopwatch

PRODUCTS = ((8192, 8192, 8192), (16384, 8192, 8192), (16384, 4096, 14336), (8192, 16384, 4096))  # m, n, k
COPIED = (1 << 30, 1 << 31)  # bytes


def measure(session: Session) -> Iterator[Record]:
    watch = Stopwatch(session.device, repeats=20)
    for m, n, k in ((64, 64, 64),) if session.tiny else PRODUCTS:
        left, right = (torch.randn(shape, dtype=torch.bfloat16, device=session.device) for shape in ((m, k), (k, n)))
        out = torch.empty(m, n, dtype=torch.bfloat16, device=session.device)
        ms = watch.milliseconds(lambda: torch.matmul(left, right, out=out))  # noqa: B023 (run at once)
        yield {"ceiling": "flops", "size": f"{m} x {k} x {n}", "ms": ms, "per_second": 2e3 * m * n * k / ms}
    for size in (1 << 16,) if session.tiny else COPIED:
        source = torch.randint(256, (size,), dtype=torch.uint8, device=session.device)
        target = torch.empty_like(source)
        ms = watch.milliseconds(lambda: target.copy_(source))  # noqa: B023 (run at once)
        yield {"ceiling": "bytes", "size": f"{size} bytes", "ms": ms, "per_second": 2e3 * size / ms}


if __name__ == "__main__":
    run_part(measure)
