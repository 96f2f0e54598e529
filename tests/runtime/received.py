"""A client of a serving loop."""

import threading
from dataclasses import dataclass, field

from bpkv_trt.runtime.serving_request import ServingOutput

PATIENCE = 60.0  # seconds, for what takes a fraction of one


@dataclass
class Received:
    """What one receiver was given."""

    outputs: list[ServingOutput] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, output: ServingOutput) -> None:
        assert not self.ended.is_set(), "an output after the last one"
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.set()

    @property
    def last(self) -> ServingOutput:
        assert self.ended.wait(PATIENCE)
        return self.outputs[-1]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)
