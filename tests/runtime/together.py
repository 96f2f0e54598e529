"""Requests that a serving loop begins together, however long each of them is encoded."""

from typing import Any

from bpkv_trt.runtime.serving_loop import ServingLoop


def add_together(loop: ServingLoop, count: int) -> None:
    """The batch is given the next `count` requests at once, so that none begins before all are there."""
    add, held = loop.batch.add, list[Any]()

    def hold(batched: Any) -> None:
        held.append(batched)
        if len(held) == count:
            del loop.batch.add
            for each in held:
                add(each)

    loop.batch.add = hold  # type: ignore[method-assign]
