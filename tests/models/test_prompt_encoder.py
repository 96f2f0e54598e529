"""Prompts are encoded as apply_chat_template encodes them, with one BOS at most."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bpkv_trt.errors import InputError, ModelError
from bpkv_trt.models.conversation import Turn, read_turns
from bpkv_trt.models.prompt_encoder import PromptEncoder

WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_BOS = WITH_BOS.replace("{{ bos_token }}", "")
SHOUTING = "{{ bos_token }}{{ messages[-1]['content'] | upper }}<assistant>"
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
    (ids,) = PromptEncoder(core).encode(TEXT, QUESTION)
    assert ids == expected
    assert ids.count(1) == (template == WITH_BOS)


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_text_and_the_question_after_it_are_one_turn(template: str) -> None:
    encoder = PromptEncoder(tokenizer(template))
    text, question = encoder.encode(TEXT, question_after=QUESTION)
    assert [text + question] == encoder.encode(TEXT, QUESTION)
    text, question = encoder.encode(TEXT, FURTHER, QUESTION)
    assert [text + question] == encoder.encode(f"{TEXT} {FURTHER}", QUESTION)


def test_a_template_that_hides_the_text_cannot_be_cut() -> None:
    with pytest.raises(InputError, match="--question-after"):
        PromptEncoder(tokenizer(SHOUTING)).encode(TEXT, question_after=QUESTION)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ broken {% ", "TemplateSyntaxError"),
        ("{{ absent() }}", "'absent' is undefined"),
        ("{{ raise_exception('no\nsystem turn') }}", "no system turn"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("", "leaves the user's text out"),
        ("{{ bos_token }}<assistant>", "leaves the user's text out"),
        ("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", "leaves the user's text out"),
    ],
)
def test_a_template_that_fails_is_named_and_is_no_hindrance_to_raw_text(template: str, words: str) -> None:
    """One that leaves the text out fails too: the model would answer to nothing, as if it had been asked."""
    encoder = PromptEncoder(tokenizer(template))
    for question_after in (None, QUESTION):
        with pytest.raises(ModelError) as caught:
            encoder.encode(TEXT, question_after=question_after)
        message = str(caught.value)
        assert words in message and "\n" not in message
        assert "chat_template.jinja" in message and "--raw" in message
    with pytest.raises(ModelError):
        encoder.encode_answer_start()
    assert encoder.encode(TEXT, QUESTION, raw=True) == PromptEncoder(tokenizer(None)).encode(TEXT, QUESTION)


CONVERSATION = (("system", "g"), ("user", TEXT), ("assistant", " d "), ("user", QUESTION))
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
)


def turns(*said: tuple[str, str]) -> tuple[Turn, ...]:
    return tuple(Turn(role=role, content=content) for role, content in said)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_a_conversation_equals_apply_chat_template(template: str) -> None:
    core = tokenizer(template)
    said = [{"role": role, "content": content} for role, content in CONVERSATION]
    expected = core.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    ids = PromptEncoder(core).encode_turns(turns(*CONVERSATION))
    assert ids == expected and ids.count(1) == (template == WITH_BOS)
    assert [PromptEncoder(core).encode_turns(turns(("user", TEXT)))] == PromptEncoder(core).encode(TEXT)


@pytest.mark.parametrize(
    ("template", "said", "words"),
    [
        (None, (("user", "a"),), "no chat template"),
        ("{{ broken {% ", (("user", "a"),), "TemplateSyntaxError"),
        (ALTERNATING, (("user", "a"), ("user", "b")), "roles must alternate"),
        (WITH_BOS.replace("in messages", "in messages if m['role'] != 'system'"), CONVERSATION, "role system out"),
        ("{{ messages[0]['content'] }}", (("user", "a"), ("assistant", "b")), "role assistant out"),
    ],
)
def test_a_conversation_that_a_template_does_not_take_is_refused(
    template: str | None, said: tuple[tuple[str, str], ...], words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        PromptEncoder(tokenizer(template)).encode_turns(turns(*said))
    assert "\n" not in str(caught.value)


def test_turns_are_read_from_json() -> None:
    said = '[{"role": "system", "content": ""}, {"content": "Grüße\\n\\ud83d\\ude00", "role": "user"}]'
    assert read_turns("m", said) == turns(("system", ""), ("user", "Grüße\n\N{GRINNING FACE}"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "m cannot be used .*JSON"),
        ("[", "m cannot be used .*JSON"),
        ("[" * 100_000, "m cannot be used .*JSON"),
        ("[]", "m cannot be used .*it is empty"),
        ('{"role": "user", "content": "a"}', "m cannot be used"),
        ('"a"', "m cannot be used"),
        ('[{"role": "user", "content": "a"}, 7]', r"m\[1\] cannot"),
        ('[{"role": "user"}]', r"m\[0\].content cannot .*required"),
        ('[{"role": "user", "content": null}]', r"m\[0\].content cannot"),
        ('[{"role": "user", "content": [{"type": "text", "text": "a"}]}]', r"m\[0\].content cannot"),
        ('[{"role": "user", "content": 7}]', r"m\[0\].content cannot"),
        ('[{"role": "user", "content": "\\ud800"}]', "m cannot be used .*JSON"),
        ('[{"role": "tool", "content": "a"}]', r"m\[0\].role cannot .*'system'"),
        ('[{"role": "user", "content": "a", "name": "b"}]', r"m\[0\].name cannot .*not permitted"),
        ('[{"role": "user", "content": "a", "' + "x" * 10_000 + '": "b"}]', "not permitted"),
    ],
)
def test_json_that_is_no_conversation_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        read_turns("m", text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(("template", "raw"), [(None, False), (WITH_BOS, True)])
def test_without_a_template_text_is_raw(template: str | None, raw: bool) -> None:
    core = tokenizer(template)
    encoder = PromptEncoder(core)
    assert encoder.adds_bos
    (ids,) = encoder.encode(TEXT, QUESTION, raw=raw)
    assert words(core, ids) == "<s> a b c d e"
    assert [words(core, part) for part in encoder.encode(TEXT, question_after=QUESTION, raw=raw)] == [
        "<s> a b c",
        "d e",
    ]


def test_bos_is_added_where_the_tokenizer_or_the_family_asks_for_it_and_never_twice() -> None:
    silent = tokenizer(None, adds_bos=False)
    assert words(silent, PromptEncoder(silent).encode_raw(TEXT)) == "a b c"
    assert words(silent, PromptEncoder(silent, always_bos=True).encode_raw(TEXT)) == "<s> a b c"
    assert words(silent, PromptEncoder(silent, always_bos=True).encode_raw("<s>a")) == "<s> a"
