"""A sample as tokens: the prompt in its turns, the words given to the answer, and the answer that is known."""

from collections.abc import Sequence
from dataclasses import dataclass

from bpkv_trt.evaluation.tasks import Sample
from bpkv_trt.evaluation.tasks.answer_tokens import answer_tokens
from bpkv_trt.models.loading import LoadedModel


@dataclass(frozen=True)
class EncodedSample:
    """What one measurement is made on."""

    task: str
    variant: str
    seed: int
    turns: Sequence[Sequence[int]]  # the prompt; turns after the first are asked of the compacted cache
    lead: Sequence[int]  # the first tokens of the answer, given; a deferred compaction happens within them
    answer: Sequence[int] = ()  # what should follow the lead
    references: tuple[slice, ...] = ()  # where in `answer` the words stand that only memory can give

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.turns))


def encode_sample(loaded: LoadedModel, sample: Sample) -> EncodedSample:
    """The sample's text under the model's tokenizer and chat template."""
    answer = answer_tokens(loaded.tokenizer, sample.lead, sample.joined, sample.spans)
    return EncodedSample(
        task=sample.task,
        variant=sample.variant,
        seed=sample.seed,
        turns=loaded.encoder.encode(sample.context, sample.question, sample.question_after),
        lead=answer.lead_ids,
        answer=answer.ids,
        references=tuple(slice(start, end) for start, end in answer.spans),
    )
