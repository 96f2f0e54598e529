"""Which range is inside which."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from bpkv_trt.errors import InputError
from bpkv_trt.latency.recording import Span, Track


class Nesting:
    """The ranges of every track as a tree; of equal ranges the one that is given first is around the other."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """Raises InputError where two ranges of a track overlap and neither is inside the other."""
        self.spans = sorted(spans, key=lambda span: (span.track, span.start_ns, -span.end_ns))
        self.inside_ns = [0] * len(self.spans)  # what the ranges directly inside one take of it
        self.parents: list[int | None] = []
        self._starts = defaultdict[Track, list[int]](list)
        self._first: dict[Track, int] = {}
        around: list[int] = []
        for place, span in enumerate(self.spans):
            self._first.setdefault(span.track, place)
            self._starts[span.track].append(span.start_ns)
            while around and not _reaches(self.spans[around[-1]], span):
                around.pop()
            parent = around[-1] if around else None
            if parent is not None:
                self._require_inside(span, self.spans[parent])
                self.inside_ns[parent] += span.end_ns - span.start_ns
            self.parents.append(parent)
            around.append(place)

    @staticmethod
    def _require_inside(span: Span, parent: Span) -> None:
        if span.end_ns > parent.end_ns:
            raise InputError(
                f"The ranges {parent.name} and {span.name} of thread {span.track.thread} overlap, and neither is "
                "inside the other, so the trace was not written by bpkv, or is damaged: record it again."
            )

    @property
    def covered_ns(self) -> int:
        """Time within any range, over all tracks."""
        return sum(
            span.end_ns - span.start_ns for span, parent in zip(self.spans, self.parents, strict=True) if parent is None
        )

    def innermost(self, track: Track, time_ns: int) -> Span | None:
        """The range that was open last on a track at a moment; its end is outside of it."""
        if track not in self._first:
            return None
        place: int | None = self._first[track] + bisect_right(self._starts[track], time_ns) - 1
        if place is not None and place < self._first[track]:
            return None
        while place is not None and self.spans[place].end_ns <= time_ns:
            place = self.parents[place]
        return None if place is None else self.spans[place]


def _reaches(span: Span, later: Span) -> bool:
    return span.track == later.track and span.end_ns > later.start_ns
