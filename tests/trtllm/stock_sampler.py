"""TensorRT-LLM's dynamic decoder, of one beam: picks the next tokens, and says which sequences have ended."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

END_ID, STOP_WORDS, LENGTH = 1, 2, 4  # bits of what `finished` says of a sequence


@dataclass
class Sampler:
    """Set up for every batch. All that it is told of one is changed in place."""

    config: Any = None
    generators: list[torch.Generator] | None = None

    def setup(self, batch_size: int, config: Any) -> None:
        seed = 0 if config.random_seed is None else int(config.random_seed)
        self.config = config
        self.generators = [torch.Generator().manual_seed(seed) for _ in range(batch_size)]  # each its own, all alike

    def forward(
        self,
        logits: Tensor,
        context_lengths: Tensor,
        sequence_limits: Tensor,
        stop_words: Tensor | None,
        output_ids: Tensor,
        new_tokens: Tensor,
        finished: Tensor,
        sequence_lengths: Tensor,
    ) -> Tensor:
        """Whether all have ended, [1] bool. logits [B, 1, V]; output_ids [B, T]; new_tokens, finished [B, 1].

        stop_words [B, 2, W]: the words' tokens one after another, and where each ends, then -1.

        A sequence that ends with `end_id` does not grow by it, and one that has ended changes no more.
        """
        assert logits.isfinite().all(), "the engine's logits are not finite"
        for row in range(len(logits)):
            if not finished[row]:
                self._extend(row, logits[row, 0], int(context_lengths[row]), output_ids, finished, sequence_lengths)
                if stop_words is not None and ends_with_any(output_ids[row, : sequence_lengths[row]], *stop_words[row]):
                    finished[row] |= STOP_WORDS
            if sequence_lengths[row] >= sequence_limits[row]:
                finished[row] |= LENGTH
            new_tokens[row] = output_ids[row, sequence_lengths[row] - 1]
        return finished.bool().all().reshape(1)

    def _extend(
        self, row: int, logits: Tensor, context: int, output_ids: Tensor, finished: Tensor, sequence_lengths: Tensor
    ) -> None:
        length, end_id = int(sequence_lengths[row]), self.config.end_id
        allowed = logits.clone()
        if length - context < self.config.min_length and 0 <= end_id < len(logits):
            allowed[end_id] = -torch.inf
        token = self._pick(row, allowed)
        output_ids[row, length] = token
        if token == end_id:
            finished[row] |= END_ID
        else:
            sequence_lengths[row] += 1

    def _pick(self, row: int, logits: Tensor) -> int:
        """The likeliest, or one of the top_k whose mass reaches top_p; 0 of either is no bound."""
        config = self.config
        if config.top_k == 1:
            return int(logits.argmax())
        p, order = torch.softmax(logits / config.temperature, -1).sort(descending=True, stable=True)
        p[config.top_k or len(p) :] = 0
        if config.top_p:
            p[p.cumsum(0) - p >= config.top_p] = 0
        assert self.generators is not None
        return int(order[torch.multinomial(p, 1, generator=self.generators[row])])


def ends_with_any(tokens: Tensor, words: Tensor, ends: Tensor) -> bool:
    bounds = [end for end in ends.tolist() if end >= 0]
    listed = [words[start:end].tolist() for start, end in zip([0, *bounds], bounds, strict=False)]
    return any(tokens[-len(word) :].tolist() == word for word in listed if word)
