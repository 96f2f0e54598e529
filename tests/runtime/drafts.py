"""Prompts whose compaction drafts the answer, and what transformers would draft."""

from typing import Any

import torch

from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.event import CompactionEvent
from tests.runtime.random_models import plain_copy, random_tokens

PROMPT, MORE = random_tokens(1, 50), random_tokens(2, 12)
AHEAD = 20
REGIMES = ("prefill", "deferred")
OPTIONS: dict[str, Any] = {"budget": "0.4", "regime": "prefill", "lookahead": AHEAD, "rehearsal": 0}


def greedy(name: str, tokens: list[int], count: int) -> list[int]:
    """transformers' own continuation, without the token that ends it."""
    ids, model = torch.tensor([tokens]), plain_copy(name)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    answer: list[int] = whole[0, len(tokens) :].tolist()
    ends = {model.generation_config.eos_token_id}
    return answer[:-1] if answer[-1] in ends else answer


def compacted(engine: Engine, prompt: list[int]) -> tuple[int, CompactionEvent]:
    """A prompt of its own, encoded and compacted."""
    sequence = engine.open()
    engine.encode([(sequence, prompt)])
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None
    return sequence, event
