"""Prompts are encoded as apply_chat_template encodes them, with one BOS at most."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bpkv_trt.errors import InputError
from bpkv_trt.models.prompt_encoder import PromptEncoder

WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_BOS = WITH_BOS.replace("{{ bos_token }}", "")
FORGETFUL = "{{ bos_token }}{{ messages[-1]['content'] }}<assistant>"
TEXT, QUESTION, FURTHER = "a b c", "d e", "f g"


def tokenizer(template: str | None, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """A word tokenizer whose post-processor adds BOS, as Llama's does: the way to a doubled BOS is open."""
    specials = ["<unk>", "<s>", "</s>", "<user>", "<assistant>"]
    words = specials + [*"abcdefg?"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(specials)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def words(core: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return " ".join(core.convert_ids_to_tokens(ids))


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_chat_equals_apply_chat_template(template: str) -> None:
    core = tokenizer(template)
    turns = [{"role": "user", "content": f"{TEXT}\n\n{QUESTION}"}]
    expected = core.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    ids = PromptEncoder(core).encode_chat(TEXT, QUESTION)
    assert ids == expected
    assert ids.count(1) == (template == WITH_BOS)


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
@pytest.mark.parametrize("answer", ["", "e e"])
def test_continuation_is_the_next_turn_of_the_same_conversation(template: str, answer: str) -> None:
    core = tokenizer(template)
    encoder = PromptEncoder(core)
    so_far = encoder.encode_chat(TEXT) + core(answer, add_special_tokens=False)["input_ids"]
    turns = [("user", TEXT), ("assistant", answer), ("user", FURTHER)]
    whole = core.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )["input_ids"]
    assert so_far + encoder.encode_continuation(FURTHER) == whole


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_an_open_turn_and_its_question_are_one_turn(template: str) -> None:
    encoder = PromptEncoder(tokenizer(template))
    in_parts = encoder.encode_open(TEXT) + encoder.encode_continuation(QUESTION, open_turn=True)
    assert in_parts == encoder.encode_chat(TEXT, QUESTION)


def test_a_template_that_hides_answers_cannot_be_continued() -> None:
    with pytest.raises(InputError, match="--question-after"):
        PromptEncoder(tokenizer(FORGETFUL)).encode_continuation(FURTHER)


def test_without_a_template_text_is_raw() -> None:
    core = tokenizer(None)
    encoder = PromptEncoder(core)
    assert not encoder.has_chat_template and encoder.adds_bos
    assert words(core, encoder.encode_raw(TEXT)) == "<s> a b c"
    assert encoder.encode_chat(TEXT) == encoder.encode_raw(TEXT)
    assert words(core, encoder.encode_continuation(FURTHER)) == "f g"
    assert encoder.encode_open(TEXT) == encoder.encode_raw(TEXT)
    assert encoder.encode_continuation(FURTHER, open_turn=True) == encoder.encode_continuation(FURTHER)


def test_bos_is_added_where_the_tokenizer_or_the_family_asks_for_it_and_never_twice() -> None:
    silent = tokenizer(None, adds_bos=False)
    assert words(silent, PromptEncoder(silent).encode_raw(TEXT)) == "a b c"
    assert words(silent, PromptEncoder(silent, always_bos=True).encode_raw(TEXT)) == "<s> a b c"
    assert words(silent, PromptEncoder(silent, always_bos=True).encode_raw("<s>a")) == "<s> a"
