"""References are found among an answer's tokens, whatever the tokenizer does at their borders."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bpkv_trt.evaluation.tasks import Sample, make_sample, task_names
from bpkv_trt.evaluation.tasks.answer_tokens import answer_tokens

TINY_LLAMA = Path(__file__).resolve().parents[1] / "assets" / "tiny-llama"


def trained(
    model: models.Model, pre: pre_tokenizers.PreTokenizer, decoder: decoders.Decoder
) -> PreTrainedTokenizerFast:
    core = Tokenizer(model)
    core.pre_tokenizer, core.decoder = pre, decoder
    texts = [make_sample(name, seed, 1500, lambda text: len(text.split())) for name in task_names() for seed in (1, 2)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    core.train_from_iterator([f"{t.context} {t.lead}{t.joined}" for t in texts], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    return trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())


@pytest.fixture(scope="module")
def sentencepiece() -> PreTrainedTokenizerFast:
    """Begins every text with a space mark of its own, so that ` 7` alone has two."""
    pre = pre_tokenizers.Metaspace(prepend_scheme="always")
    return trained(models.BPE(unk_token="<unk>"), pre, decoders.Metaspace(prepend_scheme="always"))


@pytest.fixture(scope="module")
def tiny_llama() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY_LLAMA)


def count_of(tokenizer: PreTrainedTokenizerBase):  # type: ignore[no-untyped-def]
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def check(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> None:
    made = answer_tokens(tokenizer, sample.lead, sample.joined, sample.spans)
    assert made.lead_ids == tokenizer(sample.lead, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(made.lead_ids + made.ids).strip() == (sample.lead + sample.joined).strip()
    for (start, end), reference in zip(made.spans, sample.answers, strict=True):
        assert reference in tokenizer.decode(made.ids[start:end])
        inner = tokenizer.decode(made.ids[start + 1 : end]), tokenizer.decode(made.ids[start : end - 1])
        assert not any(reference in text for text in inner), "no token too many"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("name", task_names())
def test_spans_hold_the_references(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    for seed in range(3):
        check(tokenizer, make_sample(name, seed, 6000, count_of(tokenizer)))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_slow_tokenizer_gives_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    fast = request.getfixturevalue(kind)
    slow = SlowOne(fast)
    for name in task_names():
        sample = make_sample(name, 2, 6000, count_of(fast))
        expected = answer_tokens(fast, sample.lead, sample.joined, sample.spans)
        assert answer_tokens(slow, sample.lead, sample.joined, sample.spans) == expected  # type: ignore[arg-type]


class SlowOne:
    """A tokenizer that knows no offsets: it encodes and decodes as another does."""

    is_fast = False

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self._fast = fast

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self._fast(text, add_special_tokens=add_special_tokens)["input_ids"]}

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return str(self._fast.decode(ids, clean_up_tokenization_spaces=clean_up_tokenization_spaces))


def test_the_space_before_a_number_is_not_the_numbers(byte_level: PreTrainedTokenizerFast) -> None:
    """Where a token of its own holds the space; where one token holds both, it is the reference's."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, " ": 1, "7": 2, "8": 3, "is": 4, ".": 5, " ok": 6}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(r" ok", "isolated")
    split = [pre_tokenizers.Split(piece, "isolated") for piece in (" ok", "is", "7", "8", ".")]
    core.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    made = answer_tokens(tokenizer, "is", " 78 ok.", [(1, 3), (4, 6)])
    assert (made.lead_ids, made.ids, made.spans) == ([4], [1, 2, 3, 6, 5], ((1, 3), (3, 4)))


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(task_names()), seed=st.integers(0, 10**6), tokens=st.integers(2000, 4000))
def test_sizes_hold_for_a_real_tokenizer(name: str, seed: int, tokens: int) -> None:
    count = count_of(AutoTokenizer.from_pretrained(TINY_LLAMA))
    sample = make_sample(name, seed, tokens, count)
    parts = [f"{sample.context}\n\n{sample.question}", sample.question_after or "", sample.lead, sample.joined]
    size = sum(map(count, parts))
    assert size <= tokens and (sample.generation or size >= 0.95 * tokens)
