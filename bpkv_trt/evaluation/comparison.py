"""A comparison as everything that can be known before a model is loaded."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError, InputError
from bpkv_trt.evaluation.arm import Arm
from bpkv_trt.evaluation.tasks import Sample, make_sample

SHORTEST_LEAD = 16  # tokens of an answer that are given, if no regime needs more


@dataclass(frozen=True)
class Comparison:
    """Which contenders are measured on which samples, and how long."""

    model: str
    tasks: tuple[str, ...]
    seeds: range
    tokens: int  # of a sample: its prompt with the chat template, the lead and the known answer
    horizon: int  # tokens of the full cache's own continuation that are measured
    arms: tuple[Arm, ...]
    common: BpkvConfig  # what all contenders share
    masks: int = 0  # random masks of each kind per sample
    dtype: str = "auto"
    device: str = "auto"
    memory_limit: int | None = None  # bytes

    @property
    def samples(self) -> tuple[tuple[str, int], ...]:
        """(task, seed), in the order in which they are run: every task gets its first sample early."""
        return tuple((task, seed) for seed in self.seeds for task in self.tasks)

    @property
    def regimes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arm.regime for arm in self.arms))

    @property
    def budgets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arm.budget for arm in self.arms))

    @property
    def contenders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arm.contender for arm in self.arms))

    @property
    def untouched(self) -> int:
        """Decoded tokens before which some regime of the comparison has not compacted yet."""
        intervals = [arm.config.interval for arm in self.arms if "generation" in arm.config.regime]
        return max([self._deferred, *intervals])

    @property
    def lead_tokens(self) -> int:
        """The least tokens of an answer's lead, so that a deferred compaction happens within it."""
        return max(SHORTEST_LEAD, self._deferred + 1)

    @property
    def decoded(self) -> int:
        """Tokens that the full cache continues a sample by: what no regime has touched yet, then the horizon."""
        return self.horizon + max(0, self.untouched + 1 - self.lead_tokens)

    @property
    def _deferred(self) -> int:
        return max((arm.config.defer for arm in self.arms if "deferred" in arm.config.regime), default=0)

    def settings(self) -> dict[str, Any]:
        """All that decides what is measured on a sample: results of other settings are not comparable.

        Tasks and seeds are not among them, so that a comparison may grow by either.
        """
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "tokens": self.tokens,
            "horizon": self.horizon,
            "untouched": self.untouched,
            "masks": self.masks,
            "protected": {"sinks": self.common.sinks, "recent": self.common.recent},  # by the random masks
            "arms": [
                {
                    "contender": arm.contender,
                    "regime": arm.regime,
                    "budget": arm.budget,
                    "config": arm.config.model_dump(mode="json"),
                    "layer_table": _digest(arm.config.layer_table),
                }
                for arm in self.arms
            ],
        }

    def check(self) -> None:
        """Raise BpkvError where sizes, tasks and regimes do not go together."""
        samples = self.seeds.stop - self.seeds.start
        for name, value in (("samples", samples), ("tokens", self.tokens), ("horizon", self.horizon)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, and nothing can be measured; give 1 or more.")
        for name, value in (("masks", self.masks), ("seed", self.seeds.start)):
            if value < 0:
                raise ConfigError(f"{name} is {value} and cannot be negative; give 0 or more.")
        if len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"tasks is {','.join(self.tasks)}; give every task once.")
        for task in self.tasks:
            _check_task(_outline(task), task, self.arms)


def _digest(path: Path | None) -> str | None:
    """What a file holds, whatever it is called."""
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _outline(task: str) -> Sample:
    """What a task is like, whatever the model: a sample counted in words."""
    return make_sample(task, 0, 4096, lambda text: len(text.split()))


def _check_task(sample: Sample, task: str, arms: Sequence[Arm]) -> None:
    for arm in arms:
        regimes = arm.config.regime
        if sample.question_after is not None and "prefill" not in regimes:
            raise InputError(
                f"The task {task} asks its question of the compacted cache, but with the regime {arm.regime} nothing "
                "is compacted before the question: use --regime prefill, or leave the task out."
            )
        if sample.generation and "generation" not in regimes:
            raise InputError(
                f"The task {task} is a short prompt with a long answer, which the regime {arm.regime} never compacts: "
                "use --regime generation, or leave the task out."
            )
        if not sample.generation and regimes == ("generation",):
            raise InputError(
                f"The task {task} is a long prompt with a short answer, and the regime generation compacts answers "
                "only: use --regime prefill or deferred, or leave the task out."
            )
