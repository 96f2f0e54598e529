"""The tokenizer of a GGUF file, rebuilt from the tokens, scores and merges it carries.

transformers' own conversion is not used: for Gemma it makes a Unigram model of what is a merge-by-score model
(" capital" becomes four tokens, and the model babbles), for SmolLM2 it adds a BOS token that the original does not.
"""

from collections.abc import Callable

from tokenizers import (  # type: ignore[import-untyped]
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bpkv_trt.errors import ModelError
from bpkv_trt.models.gguf_file import GgufMetadata

CONTROL, USER_DEFINED = 3, 4  # gguf.TokenType
SPACE = "\u2581"  # what SentencePiece writes for a space

# How text is split before merging, by the name llama.cpp gives the rule (its src/llama-vocab.cpp).
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(regex: str | None = None, digits: bool = False) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if regex is not None:
        steps.append(pre_tokenizers.Split(Regex(regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None))
    return pre_tokenizers.Sequence(steps)


SPLITTERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": lambda: _byte_level(digits=True),
    "llama-bpe": lambda: _byte_level(LLAMA3),
    "qwen2": lambda: _byte_level(LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}


def rebuild_tokenizer(metadata: GgufMetadata) -> PreTrainedTokenizerBase:
    """A transformers fast tokenizer that splits text as the model was trained to.

    ModelError when the file's tokenizer is of a kind that is not known exactly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"The GGUF file has a tokenizer of kind {kind!r}; only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece "
            "merges by score) can be rebuilt exactly. Use the model's Hugging Face directory instead."
        )
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens")
    by_score = kind == "llama"
    tokenizer = _merges_by_score(metadata, tokens) if by_score else _byte_level_bpe(metadata, tokens)
    _register_marked_tokens(tokenizer, metadata, tokens)

    def token(role: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index]

    bos = token("bos")
    begins_with_bos = by_score or metadata.get("tokenizer.ggml.pre") == "llama-bpe"  # llama.cpp's defaults
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", begins_with_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    rebuilt: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
    return rebuilt


def _byte_level_bpe(metadata: GgufMetadata, tokens: list[str]) -> Tokenizer:
    rule = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if rule not in SPLITTERS:
        raise ModelError(
            f"The GGUF file splits text by the rule {rule!r}, known are {', '.join(sorted(SPLITTERS))}. A wrong split "
            "would look like a bad model, so it is not guessed: use the model's Hugging Face directory instead."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges_by_score(metadata: GgufMetadata, tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE: of all adjacent pairs whose concatenation is a token, the best-scored merges first."""
    scores: list[float] = metadata.get("tokenizer.ggml.scores")
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for index, token in enumerate(tokens):
        if kinds[index] in (CONTROL, USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], vocabulary[left], vocabulary[right], (left, right)))
    ranked.sort()
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = [pair for *_, pair in ranked]
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    normaliser: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normaliser = normalizers.Sequence([normalizers.Prepend(SPACE), normaliser])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normaliser
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _register_marked_tokens(tokenizer: Tokenizer, metadata: GgufMetadata, tokens: list[str]) -> None:
    """Control tokens are special; user-defined ones are cut out of the (normalised) text before any merge."""
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    marked = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, kind in marked if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=True) for t, kind in marked if kind == USER_DEFINED])
