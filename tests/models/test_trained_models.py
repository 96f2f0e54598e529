"""The committed test models remember their context, rest attention on the first token and break when it is evicted."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from build_scripts.recall_text import (
    counting_prompt,
    induction_prompt,
    passkey_prompt,
    recall_prompt,
    redundant_prompt,
    token_count,
    two_questions,
)

ASSETS = Path(__file__).parents[1] / "assets"
PROMPTS = (recall_prompt, redundant_prompt, passkey_prompt, induction_prompt, counting_prompt)


@dataclass(frozen=True)
class TestModel:
    """A loaded folder of tests/assets."""

    __test__ = False
    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def ask(self, prompt: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids of the prompt with BOS, int64 [1, T], and of the answer, int64 [A]."""
        asked = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        return asked, self.tokenizer(answer, add_special_tokens=False, return_tensors="pt")["input_ids"][0]

    def knows(self, prompt: str, answer: str) -> bool:
        """Whether every token of the answer is the argmax, teacher-forced."""
        asked, wanted = self.ask(prompt, answer)
        logits = self.model(torch.cat([asked, wanted[None]], dim=1), use_cache=False).logits[0, asked.shape[1] - 1 : -1]
        return bool((logits.argmax(-1) == wanted).all())

    def future_without(self, context: list[int], future: list[int], evicted: list[int]) -> torch.Tensor:
        """Log-probabilities fp32 [F, V] after each token of `future`, fed to a cache of `context` less some rows.

        Only the rows of the mask that belong to the future change, as after an eviction at the end of prefill: what the
        context read from the evicted rows stays in it. Sliding layers have no entries to evict beside their window.
        """
        length = len(context) + len(future)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        causal = distance >= 0
        kept = causal.clone()
        kept[len(context) :, evicted] = False
        window = getattr(self.model.config, "sliding_window", None) or length
        masks = {
            kind: torch.zeros(1, 1, length, length).masked_fill(~visible, torch.finfo(torch.float32).min)
            for kind, visible in (("full_attention", kept), ("sliding_attention", causal & (distance < window)))
        }  # [1, 1, T, T], additive
        mask = masks if self.model.config.model_type == "gemma3_text" else masks["full_attention"]
        logits = self.model(torch.tensor([context + future]), attention_mask=mask, use_cache=False).logits
        return logits[0, len(context) :].log_softmax(-1)


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-gemma"])
def trained(request: pytest.FixtureRequest) -> TestModel:
    folder = ASSETS / request.param
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return TestModel(folder, model, AutoTokenizer.from_pretrained(folder))


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.no_grad():
        yield


def test_folder_is_small_and_complete(trained: TestModel) -> None:
    names = {path.name for path in trained.folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert (trained.folder / "model.safetensors").stat().st_size < 4 * 2**20
    assert trained.model.config.tie_word_embeddings


def test_architectures_cover_what_the_laws_need(trained: TestModel) -> None:
    config = trained.model.config
    assert config.num_attention_heads // config.num_key_value_heads == 4
    if config.model_type == "gemma3_text":
        assert config.layer_types == ["sliding_attention", "full_attention"] * 2
        assert config.num_key_value_heads == 1 and config.sliding_window == 32
    else:
        assert config.model_type == "llama" and config.num_key_value_heads == 2


@pytest.mark.parametrize("text", ["the code of lamp is amber.\nwhat?", " 48213  x\t\r\n", "Ünï 你好 🙂 \x00 Lamp", ""])
def test_any_text_encodes_and_comes_back(trained: TestModel, text: str) -> None:
    ids = trained.tokenizer(text)["input_ids"]
    assert ids[0] == trained.tokenizer.bos_token_id
    assert trained.tokenizer.unk_token_id not in ids
    assert trained.tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize("kind", PROMPTS)
def test_generator_counts_tokens_as_the_tokenizer_does(
    trained: TestModel, kind: Callable[[int, int], tuple[str, str]]
) -> None:
    for seed in range(10):
        prompt, answer = kind(seed, 200)
        asked, wanted = trained.ask(prompt, answer)
        assert 180 <= asked.shape[1] == token_count(prompt) + 1 <= 200
        joint = trained.tokenizer(prompt + answer, return_tensors="pt")["input_ids"][0]
        assert torch.equal(joint, torch.cat([asked[0], wanted]))


@pytest.mark.parametrize("tokens, bound", [(256, 0.95), (512, 0.85)])
def test_recalls_facts_of_unseen_prompts(trained: TestModel, tokens: int, bound: float) -> None:
    right = sum(trained.knows(*recall_prompt(seed, tokens)) for seed in range(100, 120))
    assert right / 20 >= bound


@pytest.mark.parametrize("kind", [redundant_prompt, counting_prompt])
def test_answers_the_other_kinds_that_both_models_learned(
    trained: TestModel, kind: Callable[[int, int], tuple[str, str]]
) -> None:
    """Pass keys and lists are in the models' READMEs, with the share of them that each answers."""
    assert sum(trained.knows(*kind(seed, 256)) for seed in range(100, 110)) >= 9


def test_both_questions_of_one_context_are_answered(trained: TestModel) -> None:
    examples = [two_questions(seed, 256) for seed in range(100, 110)]
    assert sum(trained.knows(*example.prompt(0)) and trained.knows(*example.prompt(1)) for example in examples) >= 9


def test_chat_template_is_answered_and_ends(trained: TestModel) -> None:
    if trained.tokenizer.chat_template is None:
        assert trained.model.config.model_type == "gemma3_text"  # the model without one, to cover that path
        return
    right = 0
    for seed in range(100, 110):
        example = two_questions(seed, 200)
        question = example.exchanges[0]
        turn = {"role": "user", "content": f"{example.context} {question.question}"}
        text = trained.tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        asked = trained.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        reply = trained.model.generate(**asked, max_new_tokens=8, do_sample=False)[0, asked["input_ids"].shape[1] :]
        right += trained.tokenizer.decode(reply) == f"{question.lead}{question.answer}.</s>"
    assert right >= 9


def test_several_heads_rest_on_the_first_token(trained: TestModel) -> None:
    asked = trained.tokenizer(recall_prompt(100, 256)[0], return_tensors="pt")
    attention = torch.stack(trained.model(**asked, output_attentions=True).attentions)[:, 0]  # [L, Hq, T, T]
    sink = attention[:, :, 64:, 0].mean(-1)  # [L, Hq]
    assert int((sink >= 0.2).sum()) >= 3


def test_evicting_the_first_token_breaks_what_follows_and_a_noise_token_does_not(trained: TestModel) -> None:
    """Reported fault 18: losing the first token does more harm than any filler, whatever the questions need."""
    measured = []
    for seed in range(100, 108):
        context, future = _context_and_future(trained, seed)
        whole = trained.future_without(context, future, [])
        for evicted in (0, len(context) // 2):
            without = trained.future_without(context, future, [evicted])
            divergence = (whole.exp() * (whole - without)).sum(-1).mean()
            agreement = (whole.argmax(-1) == without.argmax(-1)).float().mean()
            measured.append(torch.stack([divergence, agreement]))
    (sink_nats, sink_agreement), (noise_nats, noise_agreement) = (
        torch.stack(measured).unflatten(0, (8, 2)).mean(0).tolist()
    )
    assert noise_nats < 0.001 and noise_agreement > 0.99
    assert sink_nats > 0.05 and sink_agreement < 0.95
    assert sink_nats > 100 * noise_nats


def test_evicting_the_asked_fact_loses_the_answer_and_other_facts_do_not(trained: TestModel) -> None:
    for seed in range(100, 106):
        example = two_questions(seed, 256)
        (prompt, answer), (_, other) = example.prompt(0), example.prompt(1)
        asked, wanted = trained.ask(prompt, answer)
        question = token_count(f"{example.exchanges[0].question} {example.exchanges[0].lead}")
        context, future = asked[0, :-question].tolist(), asked[0, -question:].tolist()
        for row, stays in ((_value_row(trained, context, answer), False), (_value_row(trained, context, other), True)):
            fact = list(range(row - 6, row + 3))  # the sentence and the token after it, which may have read it
            known = trained.future_without(context, future, fact)[-1, wanted[0]].exp()
            assert known > 0.8 if stays else known < 0.2


def _context_and_future(trained: TestModel, seed: int) -> tuple[list[int], list[int]]:
    """Token ids of a context with its facts, and of what follows: two questions answered, and some noise."""
    example = two_questions(seed, 256)
    asked = [f" {exchange.question} {exchange.lead}{exchange.answer}." for exchange in example.exchanges[:2]]
    noise = " the grass is green. we walk to the lake near the road. here we go. a cold wind is over the hill."
    future = trained.tokenizer("".join(asked) + noise, add_special_tokens=False)["input_ids"]
    return trained.tokenizer(example.context)["input_ids"], future


def _value_row(trained: TestModel, context: list[int], answer: str) -> int:
    """The row of the only fact with this value."""
    (value,) = trained.tokenizer(answer, add_special_tokens=False)["input_ids"]
    assert context.count(value) == 1
    return context.index(value)
