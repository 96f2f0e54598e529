"""Tokenizers rebuilt from GGUF files split text as the originals do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpkv_trt.errors import ModelError
from bpkv_trt.models.gguf_file import GgufMetadata
from bpkv_trt.models.gguf_tokenizer import SPLITTERS, rebuild_tokenizer
from tests.models.sentencepiece_truth import sentencepiece_of
from tests.models.small_gguf import small_llama, write_gguf


class Fields(GgufMetadata):
    """Metadata given as a dictionary."""

    def __init__(self, **fields: object) -> None:
        self._values = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}

    def get(self, key: str, default: object = None) -> object:
        return self._values.get(key, default)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> GgufMetadata:
    return GgufMetadata(write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", small_llama()))


def test_best_score_merges_first(metadata: GgufMetadata) -> None:
    tokenizer = rebuild_tokenizer(metadata)
    assert tokenizer.tokenize(" capital") == ["\u2581capital"]
    assert tokenizer.tokenize(" the  it\n\u6f22") == [
        *("\u2581the", "\u2581\u2581", "it", "<0x0A>", "<0xE6>", "<0xBC>", "<0xA2>")
    ]


def test_random_text_is_split_as_sentencepiece_splits_it_and_comes_back(metadata: GgufMetadata) -> None:
    truth, tokenizer = sentencepiece_of(metadata), rebuild_tokenizer(metadata)
    letters = st.text(alphabet="thecapil .\n\u6f22\u00e9\t", max_size=60)

    @settings(max_examples=300, deadline=None)
    @given(letters | st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    def check(text: str) -> None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        if "\u2581" not in text and "\x00" not in text:  # SentencePiece reads these as a space and as an end
            assert ids == truth.encode(text)

    check()


def test_special_tokens_of_the_file(metadata: GgufMetadata) -> None:
    tokenizer = rebuild_tokenizer(metadata)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (
        *(1, 2, 3, 0),
    )
    assert tokenizer("it")["input_ids"][0] == 1
    assert tokenizer("a</s>b", add_special_tokens=False)["input_ids"][1] == 2


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        ("gpt-2", "I'm 2024 ok", ["I", "'m", "\u01202024", "\u0120ok"]),
        ("smollm", "in 2024!", ["in", "\u0120", "2", "0", "2", "4", "!"]),
        ("llama-bpe", "I'M 123456 ok\n\n", ["I", "'M", "\u0120", "123", "456", "\u0120ok", "\u010a\u010a"]),
        ("qwen2", "x  123 ok", ["x", "\u0120", "\u0120", "1", "2", "3", "\u0120ok"]),
    ],
)
def test_text_is_cut_by_the_named_rule(rule: str, text: str, words: list[str]) -> None:
    assert [word for word, _ in SPLITTERS[rule]().pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"model": "t5"}, "'t5'"), ({}, "None"), ({"model": "gpt2", "pre": "tekken", "tokens": ["a"]}, "'tekken'")],
)
def test_unknown_kinds_are_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        rebuild_tokenizer(Fields(**fields))
