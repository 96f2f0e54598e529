"""What the kernels are meant to reach, and whether they did."""

from dataclasses import dataclass
from typing import Any

from profiles.gpu_session import floors
from profiles.gpu_session.floors import Ceilings, Shape
from profiles.gpu_session.kernel_times import BATCHES, POSITIONS, REHEARSED, SHAPES, TOP_K
from profiles.gpu_session.part import Record

DELETIONS = 5  # passes: is stage 1 stable, its shift, its slopes; and at the boundary before and after the choice


@dataclass(frozen=True)
class Target:
    """A number and the bound that it is held to."""

    name: str
    value: float | None  # None where something of it was not measured
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def record(self) -> Record:
        return {"target": self.name, "value": self.value, "least": self.least, "most": self.most, "met": self.met}


def ceilings_of(records: list[Record]) -> Ceilings | None:
    """The best of what was measured, if both were."""
    best = {kind: [each["per_second"] for each in records if each["ceiling"] == kind] for kind in ("flops", "bytes")}
    return Ceilings(max(best["flops"]), max(best["bytes"])) if all(best.values()) else None


class Times:
    """Milliseconds of the first model's kernels at the first length."""

    def __init__(self, records: list[Record]) -> None:
        first: dict[str, Any] = records[0] if records else {"model": None, "tokens": 0}
        self.shape: Shape | None = next((each for each in SHAPES + REHEARSED[0] if each.name == first["model"]), None)
        self.tokens: int = first["tokens"]
        own = (each for each in records if (each["model"], each["tokens"]) == (first["model"], first["tokens"]))
        self.records = {(each["kernel"], each["batch"]): each for each in own}
        self.choices = [kernel for kernel, _ in self.records if kernel.startswith("choose")]

    def share(self, kernel: str, of: str, ceiling: float | None, batch: int = 1) -> float | None:
        """FLOPs or bytes in a second, of a ceiling."""
        record = self.records.get((kernel, batch))
        return None if record is None or not ceiling else 1e3 * float(record[of]) / record["ms"] / ceiling

    def ratio(self, kernel: str, other: str, batch: int) -> float | None:
        """How many times as long one takes as the other."""
        one, two = self.records.get((kernel, batch)), self.records.get((other, batch))
        return None if one is None or two is None else float(one["ms"]) / two["ms"]

    def compaction_ms(self, score: str, choice: str) -> float | None:
        """All kernels of one compaction of a prompt, None where one of them was not timed."""
        if self.shape is None:
            return None
        total = 0.0
        for kernel, count in one_compaction(self.shape, score, choice).items():
            record = self.records.get((kernel, 1))
            if record is None:
                return None
            fit = record.get("layers", self.shape.layers)  # into memory, of those that a launch should hold
            total += count * record["ms"] * self.shape.layers / fit
        return total


def judged(ceiling_records: list[Record], time_records: list[Record]) -> list[Target]:
    """All targets, for the first model at the first length."""
    ceilings, times = ceilings_of(ceiling_records), Times(time_records)
    flops, copied = (ceilings.flops, ceilings.bytes) if ceilings else (None, None)
    prefill = floors.prefill(times.shape, times.tokens) if times.shape else None
    whole = ceilings.floor_ms(prefill) if ceilings and prefill else None
    score, of = (
        f"score, M {POSITIONS}, K {TOP_K}",
        f"({times.shape.name if times.shape else '?'}, {times.tokens} tokens)",
    )
    many = BATCHES[-1]
    targets = [
        Target(f"{score}: of the measured bf16 peak {of}", times.share(score, "flops", flops), least=0.35),
        Target(f"compact: of the measured copy bandwidth {of}", times.share("compact", "bytes", copied), least=0.7),
    ]
    for batch in BATCHES:
        rate = times.share("decode", "bytes", copied, batch)
        targets.append(Target(f"decode of {batch}: of the measured copy bandwidth {of}", rate, least=0.7))
    faster = times.ratio("decode", "decode, a fifth", many)
    targets.append(Target(f"decode of {many}: times as fast over a fifth of the rows {of}", faster, least=4.0))
    for choice in times.choices or ["choose"]:
        spent = times.compaction_ms(score, choice)
        name = f"scoring, selection ({choice}), compaction: of the prefill's floor {of}"
        targets.append(Target(name, spent / whole if spent and whole else None, most=0.03))
    return targets


def one_compaction(shape: Shape, score: str, choice: str) -> dict[str, int]:
    """How often each kernel runs when a prompt is compacted: scores, stage 1, stage 2, the move."""
    of = f"M {POSITIONS}"
    return {
        f"lse, {of}": shape.layers,
        score: shape.layers,
        "rank": 1,
        f"deletion, {of}": DELETIONS * shape.layers,
        f"nomination, {of}": shape.layers,
        choice: 1,
        "compact": 1,
    }
