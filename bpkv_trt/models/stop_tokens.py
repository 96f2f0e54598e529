"""The tokens that end an answer."""

from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from bpkv_trt.errors import ModelError, quoted


def stop_tokens_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """Those of the model's generation config, and of the tokenizer where there is one; ModelError as `stop_tokens`."""
    embeddings: Any = model.get_input_embeddings()
    return stop_tokens(model.generation_config, len(embeddings.weight), tokenizer)


def stop_tokens(
    generation_config: GenerationConfig | None, vocabulary: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> frozenset[int]:
    """Those of a generation config, and of the tokenizer where there is one.

    Raises ModelError where the generation config has something that is no token of the model.
    """
    configured: Any = generation_config.eos_token_id if generation_config is not None else None
    ids = [token for token in (configured if isinstance(configured, list) else [configured]) if token is not None]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise ModelError(
                f"The generation configuration of the model has eos_token_id {quoted(token)}, which is none of its "
                f"tokens, 0 to {vocabulary - 1}. Correct it in generation_config.json, or where there is none in "
                "config.json, or fetch the checkpoint again."
            )
    spoken = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(ids if spoken is None else [*ids, spoken])
