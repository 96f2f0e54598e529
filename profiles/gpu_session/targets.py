"""What the kernels are meant to reach, and whether they did."""

from dataclasses import dataclass
from typing import Any

from profiles.gpu_session import floors
from profiles.gpu_session.floors import Ceilings, Shape
from profiles.gpu_session.kernel_times import BATCHES, CHOICES, POSITIONS, REHEARSED, SHAPES, TOP_K
from profiles.gpu_session.part import Record

DELETIONS = 2  # passes of stage 2: the mask of stage 1, and where the choice begins


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
        return self.value >= self.least if self.least is not None else self.value <= (self.most or 0.0)

    def record(self) -> Record:
        return {"target": self.name, "value": self.value, "least": self.least, "most": self.most, "met": self.met}


def ceilings_of(records: list[Record]) -> Ceilings | None:
    """The best of what was measured, if both were."""
    best = {kind: max((each["per_second"] for each in records if each["ceiling"] == kind), default=None)
            for kind in ("flops", "bytes")}  # fmt: skip
    return None if None in best.values() else Ceilings(best["flops"], best["bytes"])


class Times:
    """Milliseconds of the first model's kernels at the first length."""

    def __init__(self, records: list[Record]) -> None:
        first: dict[str, Any] = records[0] if records else {"model": None, "tokens": 0}
        self.shape: Shape | None = next((each for each in SHAPES + REHEARSED[0] if each.name == first["model"]), None)
        self.tokens: int = first["tokens"]
        own = (each for each in records if (each["model"], each["tokens"]) == (first["model"], first["tokens"]))
        self.records = {(each["kernel"], each["batch"]): each for each in own}

    def rate(self, kernel: str, of: str, batch: int = 1) -> float | None:
        """FLOPs or bytes in a second."""
        record = self.records.get((kernel, batch))
        return None if record is None else 1e3 * record[of] / record["ms"]

    def total_ms(self, counts: dict[str, int]) -> float | None:
        """So many runs of each kernel, None where one of them was not timed."""
        found = [(self.records.get((kernel, 1)), count) for kernel, count in counts.items()]
        if any(record is None for record, _ in found):
            return None
        return sum(record["ms"] * count for record, count in found if record is not None)


def judged(ceiling_records: list[Record], time_records: list[Record]) -> list[Target]:
    """All targets, for the first model at the first length."""
    ceilings, times = ceilings_of(ceiling_records), Times(time_records)
    of = f"{times.shape.name if times.shape else 'no model'}, {times.tokens} tokens"
    score = f"score, M {POSITIONS}, K {TOP_K}"

    def share(rate: float | None, ceiling: float | None) -> float | None:
        return None if rate is None or ceiling is None else rate / ceiling

    flops, bytes_ = (None, None) if ceilings is None else (ceilings.flops, ceilings.bytes)
    targets = [
        Target(f"{score}: share of the measured bf16 peak ({of})", share(times.rate(score, "flops"), flops), 0.35),
        Target(
            f"compact: share of the measured copy bandwidth ({of})", share(times.rate("compact", "bytes"), bytes_), 0.7
        ),
    ]
    for batch in BATCHES:
        rate = share(times.rate("decode", "bytes", batch), bytes_)
        targets.append(Target(f"decode of {batch}: share of the measured copy bandwidth ({of})", rate, 0.7))
    every, fifth = (times.records.get((name, BATCHES[-1])) for name in ("decode", "decode, a fifth"))
    faster = None if every is None or fifth is None else every["ms"] / fifth["ms"]
    targets.append(Target(f"decode of {BATCHES[-1]}: times faster over a fifth of the rows ({of})", faster, 4.0))
    for name in sorted(kernel for kernel, _ in times.records if kernel.startswith("choose")) or [chosen(*CHOICES[0])]:
        spent = None if times.shape is None else times.total_ms(one_compaction(times.shape, score, name))
        prefill = None if ceilings is None or times.shape is None else ceilings.floor_ms(
            floors.prefill(times.shape, times.tokens)
        )  # fmt: skip
        targets.append(
            Target(f"scoring, selection ({name}) and compaction: share of the prefill's floor ({of})",
                   share(spent, prefill), most=0.03)
        )  # fmt: skip
    return targets


def chosen(candidates: int, evictions: int) -> str:
    """The name under which a choice was timed."""
    return f"choose {evictions} of {candidates}"


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
