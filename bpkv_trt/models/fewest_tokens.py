"""How many tokens a text has at least, told without encoding it."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from transformers import PreTrainedTokenizerBase

COMPOSED = 4  # characters that Unicode composes to one, at most: UAX #15 on the expansion of canonical decomposition
LOSSLESS = ("ByteLevel", "Digits", "Metaspace")  # ways to split a text that leave none of it out
ITSELF = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))  # bytes that byte-level vocabularies write so
OTHERS = tuple(byte for byte in range(0x100) if byte not in ITSELF)  # and those that they write by later characters
BYTE_LEVEL = {byte: chr(byte) for byte in ITSELF} | {byte: chr(0x100 + place) for place, byte in enumerate(OTHERS)}
FALLBACK = frozenset(f"<0x{byte:02X}>" for byte in range(0x100))


class FewestTokens:
    """A lower bound from the longest word of the vocabulary.

    It holds where all of a text comes to tokens that spell it out: nothing takes characters away before, none is
    unknown, and no added token swallows the spaces beside it. For tokenizers that do such things it is 0, and so it is
    for characters that a vocabulary without their bytes passes over.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._longest: int | None = None  # characters that a token can stand for
        self._silent: tuple[int, ...] = ()  # bytes that come to no token
        if tokenizer.is_fast:
            self._read(json.loads(tokenizer.backend_tokenizer.to_str()), tokenizer)

    def __call__(self, text: str) -> int:
        if self._longest is None:
            return 0
        encoded = text.encode() if self._silent else b""
        return -(-(len(text) - sum(encoded.count(byte) for byte in self._silent)) // self._longest)

    def _read(self, parts: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
        words, added, core = tokenizer.get_vocab().keys(), parts["added_tokens"], tokenizer.backend_tokenizer
        composed, silent = _composed(parts["normalizer"]), _silent(parts, words)
        swallows = any(token["lstrip"] or token["rstrip"] for token in added)
        if composed is None or silent is None or swallows or (silent and parts["normalizer"] is not None):
            return
        normalized = [core.normalizer.normalize_str(token["content"]) for token in added] if core.normalizer else []
        self._longest, self._silent = composed * max(map(len, [*words, *normalized])), silent


def _composed(normalizer: Mapping[str, Any] | None) -> int | None:
    """The most characters that a normalizer makes one of; None where it may take any number away."""
    match normalizer:
        case None | {"type": "Prepend" | "Lowercase" | "NFD" | "NFKD"}:
            return 1
        case {"type": "NFC" | "NFKC"}:
            return COMPOSED
        case {"type": "Replace", "pattern": {"String": before}, "content": after} if len(before) <= len(after):
            return 1
        case {"type": "Sequence", "normalizers": parts}:
            each = [_composed(part) for part in parts]
            return None if None in each else prod(count for count in each if count is not None)
    return None


def _silent(parts: Mapping[str, Any], words: Any) -> tuple[int, ...] | None:
    """Bytes of which there are no tokens; None where further characters may be left out, or taken for one unknown."""
    model, splitters = parts["model"], _flat(parts["pre_tokenizer"])
    spells = model["type"] in ("BPE", "Unigram") and not model.get("continuing_subword_prefix")
    if not spells or model.get("end_of_word_suffix") or not all(map(_is_lossless, splitters)):
        return None
    if any(splitter["type"] == "ByteLevel" for splitter in splitters):
        missing = tuple(byte for byte, word in BYTE_LEVEL.items() if word not in words)
        passed_over = model["type"] == "BPE" and model["unk_token"] is None
        return missing if passed_over or not missing else None
    return () if model["byte_fallback"] and words >= FALLBACK else None


def _flat(splitter: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if splitter is None:
        return []
    parts = splitter.get("pretokenizers")
    return [splitter] if parts is None else [each for part in parts for each in _flat(part)]


def _is_lossless(splitter: Mapping[str, Any]) -> bool:
    return splitter["type"] in LOSSLESS or (splitter["type"] == "Split" and splitter["behavior"] != "Removed")
