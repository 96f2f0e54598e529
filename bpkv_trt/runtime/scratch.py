"""Rows that a compaction borrows of the pool: what is drafted or rehearsed, or a copy that repeats its context."""

from collections.abc import Sequence

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.policies.registry import policy_class
from bpkv_trt.runtime import rehearsal
from bpkv_trt.runtime.repetition import repetitions


def scratch_rows(config: BpkvConfig, encoder: PromptEncoder | None, turns: Sequence[int]) -> int:
    """Rows per head that a compaction takes of the pool and gives back, for a prompt of turns of so many tokens.

    Those of the lookahead or of a passage of the rehearsal, or of a copy that a policy has replayed, which takes the
    `encoder`. `config` is settled.
    """
    policy = policy_class(config.policy)
    if policy.evicts_nothing:
        return 0
    if "replay" not in policy.requires:
        return max(config.drafted, rehearsal.ROWS if config.rehearsed else 0)
    assert encoder is not None, "a policy that has its context replayed needs the model's tokenizer"
    context = sum(turns) + config.defer if "deferred" in config.regime else turns[0]
    return context + max(len(each.tokens) for each in repetitions(encoder, [0] * context))
