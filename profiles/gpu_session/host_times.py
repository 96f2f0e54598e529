"""The whole host on this GPU: a random model of a 1B's shape, its prefill, a compaction by stages, its decoding."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from profiles.gpu_session.part import Missing, Record, Session, run_part

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

    from bpkv_trt.config import BpkvConfig
    from bpkv_trt.core.traits import ModelTraits
    from bpkv_trt.models.traits_of import traits_of
    from bpkv_trt.profiling import Trace
    from bpkv_trt.runtime.engine import Engine, make_pool
    from bpkv_trt.runtime.scratch import scratch_rows
except ImportError as error:
    absent: str | None = str(error)
else:
    absent = None

MODEL: dict[str, Any] = {  # Llama 3.2 1B
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
REHEARSED: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 1024,
}  # fmt: skip
RUNS = ((16384, 1), (32768, 1), (16384, 8), (32768, 8))  # tokens of the prompt, sequences
STEPS = 16  # decoded, for the median
POOLS: dict[str, dict[str, Any]] = {"kernels": {"kernels": True}, "torch": {"kernels": False}}  # for `make_pool`
BUDGET: dict[str, Any] = {"regime": "prefill", "budget": "0.2"}
SMALL: dict[str, Any] = {
    "sinks": 2, "recent": 8, "positions": 4, "lookahead": 2, "rehearsal": 16, "refine": 4, "page_size": 8,
}  # fmt: skip
KL_LIMIT = 0.02  # nats: bf16 rounds logits of about 1 by 2^-9, and attention on the way to them


@dataclass(frozen=True)
class Hosted:
    """A model as an engine takes it; see `HostedModel`."""

    model: "PreTrainedModel"
    traits: "ModelTraits"


def random_model(session: Session) -> Hosted:
    """Random weights, so attention is nearly even: times are those of any model of this shape."""
    torch.manual_seed(session.seed)
    config = LlamaConfig(**(REHEARSED if session.tiny else MODEL), tie_word_embeddings=True)
    with torch.device(session.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    return Hosted(model, traits_of(model))


class Host:
    """One engine over a pool for some copies of a prompt."""

    def __init__(self, hosted: Hosted, session: Session, tokens: int, sequences: int, **pool: Any) -> None:
        self.wait = torch.cuda.synchronize if session.device.type == "cuda" else (lambda: None)
        config = BpkvConfig(**BUDGET, **(SMALL if session.tiny else {}))
        self.steps = 2 if session.tiny else STEPS
        rows = tokens + STEPS + 1
        scratch = scratch_rows(config, None, [tokens])
        held = make_pool(hosted, rows, config.page_size, caches=sequences + 1, scratch=scratch, **pool)
        self.engine = Engine(hosted, config, held, Trace(synchronize=self.wait))
        generator = torch.Generator().manual_seed(session.seed)
        self.prompt = torch.randint(3, hosted.traits.vocabulary, (tokens,), generator=generator).tolist()
        self.rows, self.sequences = rows, sequences

    def prefill(self) -> tuple[int, Tensor, float]:
        """(a sequence that holds the prompt, next-token logits [V], seconds)."""
        sequence = self.engine.open(self.rows)
        self.wait()
        start = time.perf_counter()
        logits = self.engine.encode([(sequence, self.prompt)])
        self.wait()
        return sequence, logits[0], time.perf_counter() - start

    def compact(self, sequence: int) -> Any:
        """The compaction's event; its `seconds` are by stage."""
        event = self.engine.compactor.on_context_step_end(sequence)
        if event is None or event.note is not None:
            raise RuntimeError(f"nothing was compacted: {event}")
        return event

    def step_seconds(self, sequence: int) -> float:
        """Median of a decoding step of as many copies of a sequence as were asked for; they are closed after it."""
        batch = [sequence, *(self.engine.fork(sequence) for _ in range(self.sequences - 1))]
        seconds = []
        for _ in range(self.steps):
            self.wait()
            start = time.perf_counter()
            self.engine.decode([(each, self.prompt[:1]) for each in batch])
            self.wait()
            seconds.append(time.perf_counter() - start)
        for each in batch:
            self.engine.close(each)
        return median(seconds)


def timed(name: str, hosted: Hosted, session: Session, tokens: int, sequences: int) -> Record:
    host = Host(hosted, session, tokens, sequences, **POOLS[name])
    host.engine.close(host.prefill()[0])  # warms up
    sequence, _, prefill = host.prefill()
    whole = host.engine.fork(sequence)
    event = host.compact(sequence)
    return {
        "pool": name, "tokens": tokens, "sequences": sequences, "prefill_s": prefill,
        "compaction_s": event.seconds, "kept": event.entries_after / event.entries_before,
        "decode_full_s": host.step_seconds(whole), "decode_kept_s": host.step_seconds(sequence),
    }  # fmt: skip


def answers(name: str, hosted: Hosted, session: Session, tokens: int) -> tuple[list[Tensor], Tensor]:
    """(next-token logits after the prompt and after one more token of the compacted cache; what stayed, as flags)."""
    host = Host(hosted, session, tokens, 1, **POOLS[name])
    sequence, logits, _ = host.prefill()
    host.compact(sequence)
    table = host.engine.pool.view(sequence).position_table().long()  # [L, Hkv, T], -1 past a head's end
    kept = torch.zeros(*table.shape[:2], tokens + 1, dtype=torch.bool).scatter_(2, table % (tokens + 1), True)
    after = host.engine.decode([(sequence, host.prompt[:1])])[0]
    return [logits, after], kept[..., :tokens]


def compared(hosted: Hosted, session: Session, tokens: int) -> Record:
    """The two pools on one prompt: KL of the next token, in nats, and whether as many entries stay."""
    ours, theirs = (answers(name, hosted, session, tokens) for name in POOLS)
    kl = [_kl(*pair) for pair in zip(theirs[0], ours[0], strict=True)]
    counts = [int(kept.sum()) for _, kept in (ours, theirs)]
    common = int((ours[1] & theirs[1]).sum()) / counts[1]
    return {"compared": list(POOLS), "tokens": tokens, "kl_full": kl[0], "kl_kept": kl[1], "entries": counts,
            "in_common": common, "passed": max(kl) < KL_LIMIT and counts[0] == counts[1]}  # fmt: skip


def _kl(p: Tensor, q: Tensor) -> float:
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def measure(session: Session) -> Iterator[Record]:
    if absent is not None:
        raise Missing(f"the host cannot be imported ({absent})")
    hosted = random_model(session)
    runs = ((100, 2),) if session.tiny else RUNS
    yield compared(hosted, session, runs[0][0])
    for name in POOLS:
        for tokens, sequences in runs:
            yield timed(name, hosted, session, tokens, sequences)


if __name__ == "__main__":
    run_part(measure)
