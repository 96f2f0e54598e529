"""Google's own SentencePiece library, fed with the tokens, scores and types of a GGUF file."""

import struct

import sentencepiece

from bpkv_trt.models.gguf_file import GgufMetadata
from bpkv_trt.models.gguf_tokenizer import SPACE, USER_DEFINED

BPE = 2  # TrainerSpec.ModelType


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, payload: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(payload)) + payload


def sentencepiece_of(metadata: GgufMetadata) -> sentencepiece.SentencePieceProcessor:
    """A processor for the file's vocabulary; its model is written in protobuf's wire format."""
    tokens, scores, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "token_type"))
    model = bytearray()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        piece = token.replace(" ", SPACE) if kind == USER_DEFINED else token
        entry = _message(1, piece.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _integer(3, kind)
        model += _message(1, entry)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    trainer = _integer(3, BPE) + _integer(35, 1) + _integer(40, unknown)  # model_type, byte_fallback, unk_id
    trainer += b"".join(
        _integer(field, metadata.get(f"tokenizer.ggml.{role}_token_id"))
        for field, role in ((41, "bos"), (42, "eos"), (43, "padding"))
    )
    # NormalizerSpec: no dummy prefix, extra spaces kept, spaces escaped
    identity = _message(1, b"identity") + _integer(3, 0) + _integer(4, 0) + _integer(5, 1)
    model += _message(2, trainer) + _message(3, identity)
    return sentencepiece.SentencePieceProcessor(model_proto=bytes(model))
