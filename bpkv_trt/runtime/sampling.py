"""How the next token is drawn."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bpkv_trt.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """Greedy at temperature 0; `stop_tokens` end the answer and are not part of it."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = field(default_factory=frozenset)

    def stopping_at(self, tokens: frozenset[int]) -> "SamplingParams":
        """The same, ended by these tokens."""
        return replace(self, stop_tokens=tokens)

    def seeded(self, seed: int) -> "SamplingParams":
        """The same, drawn from this seed."""
        return replace(self, seed=seed)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; an answer needs at least 1.")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; give 0 for greedy decoding, or a positive number.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; give a number above 0 and at most 1.")
        if self.top_p < 1 and self.temperature == 0:
            raise ConfigError(
                f"top_p is {self.top_p} and temperature is 0, at which only the most probable token is taken, so it "
                "would change nothing: leave top_p out, or give a temperature."
            )


class Sampler:
    """Draws the tokens of one request with a generator of its own: requests never influence one another."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.generator = torch.Generator().manual_seed(params.seed)

    def next(self, logits: Tensor) -> int:
        """logits [V] fp32 -> a token id."""
        if self.params.temperature == 0:
            return int(logits.argmax())
        logits = logits.cpu().double()
        scaled = (logits - logits.max()) / self.params.temperature  # never +inf
        p, ids = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
        nucleus = p.cumsum(0) - p < self.params.top_p  # the smallest set that holds top_p
        return int(ids[torch.multinomial(p * nucleus, 1, generator=self.generator)])
