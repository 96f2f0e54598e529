"""How many rows a sequence comes to hold, where every head holds as many and every compaction takes place."""

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.budget import Budget, resolve
from bpkv_trt.core.traits import ModelTraits


def most_rows(config: BpkvConfig, traits: ModelTraits, itemsize: int, prompt: int, new_tokens: int) -> int:
    """Of a prompt of so many tokens and its answer, per head, at any time.

    itemsize: bytes of one number in the cache. Raises ConfigError where the budget cannot be honoured.
    """

    def kept(budget: Budget, tokens: int, protected: int) -> int:
        heads = {"layers": len(traits.compactable_layers), "kv_heads": traits.kv_heads, "head_dim": traits.head_dim}
        return resolve(budget, tokens=tokens, **heads, itemsize=itemsize, protected=protected).per_head

    seen = prompt + (config.defer if "deferred" in config.regime else 0)  # when the prompt is compacted
    of_prompt = seen if config.regime == ("generation",) else kept(config.budget, seen, config.protected)
    of_answer = max(0, prompt + new_tokens - seen)
    if "generation" in config.regime:
        of_answer = min(of_answer, kept(config.generation_budget, new_tokens, config.recent) + config.interval)
    return max(min(seen, prompt + new_tokens), of_prompt + of_answer)
