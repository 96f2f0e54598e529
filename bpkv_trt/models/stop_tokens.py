"""The tokens that end an answer."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """Those of the generation config, and of the tokenizer where there is one."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    spoken = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(int(token) for token in (*ids, spoken) if token is not None)
