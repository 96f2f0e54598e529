"""A small Llama with a SentencePiece tokenizer, written as a GGUF file the way llama.cpp converts one."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel

from tests.models.small_models import SIZES, random_model

BYTES = [f"<0x{value:02X}>" for value in range(256)]
WORDS = [*"\u2581the \u2581capital \u2581cap ital it al \u2581c ap \u2581t he \u2581\u2581".split(" ")]
LETTERS = [*"\u2581abcdefghijklmnopqrstuvwxyz.,"]


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types: merged words score better the earlier they stand in WORDS."""
    kinds = gguf.TokenType
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *BYTES, *WORDS, *LETTERS]
    types = [kinds.CONTROL] * 3 + [kinds.UNKNOWN] + [kinds.BYTE] * 256 + [kinds.NORMAL] * (len(WORDS) + len(LETTERS))
    scores = [0.0] * 260 + [-float(rank) for rank in range(len(WORDS) + len(LETTERS))]
    return tokens, scores, [int(kind) for kind in types]


def small_llama() -> PreTrainedModel:
    """The model that `write_gguf` writes by default."""
    return random_model(LlamaConfig(**(SIZES | {"vocab_size": len(vocabulary()[0]), "tie_word_embeddings": False})))


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the rotated pairs of a head adjacent; transformers keeps them half a head apart."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: PreTrainedModel, without: tuple[str, ...] = (), quantised: bool = False) -> Path:
    """Write `model` as GGUF, leaving out the tensors named in `without`; `quantised` stores matrices as Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens, scores, types = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    for role, index in (("bos", 1), ("eos", 2), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_space_prefix(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if target in without:
            continue
        array = tensor.to(torch.float32).numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = permuted(array, heads)
        if quantised and array.ndim == 2 and array.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
