"""What `bpkv generate` reports of a run, whichever host it ran on."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bpkv_trt.config import BpkvConfig
from bpkv_trt.runtime.event import CompactionEvent


@dataclass(frozen=True)
class Generation:
    """One prompt and what came of it."""

    text: str
    model: str  # as the user named it; of an engine, its folder
    prompt_tokens: int
    generated_tokens: int
    config: BpkvConfig
    events: Sequence[CompactionEvent]  # one at least: a compaction that did not happen is one too
    notes: Sequence[str] = ()  # what holds for the whole run; what holds for one compaction is told by its event

    def report(self) -> dict[str, Any]:
        """Ready to be printed and written as JSON, but for its timings."""
        config = self.config
        of_prompt = [event for event in self.events if event.regime != "generation"]
        main = of_prompt[0] if of_prompt else self.events[-1]
        budget = config.budget if of_prompt else config.generation_budget
        return {
            "text": self.text,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "policy": config.policy,
            "regime": list(config.regime),
            "scope": config.scope,
            "readout": config.readout,
            "budget": {
                "requested": str(budget),
                "entries_total": main.entries_before,
                "entries_kept": main.entries_after,
                "fraction": main.entries_after / main.entries_before if main.entries_before else 1.0,
                "clamped": main.clamped,
            },
            "pool": {
                "page_size": config.page_size,
                "bytes_before": main.bytes_before,
                "bytes_after": main.bytes_after,
                "pages_freed": main.pages_freed,
            },
            "events": [asdict(event) for event in self.events],
            "notes": list(self.notes),
        }
