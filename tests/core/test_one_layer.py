"""One attention layer without MLP: the direct path is exact up to the final nonlinearities, a second-order error."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bpkv_trt.core.attention import attention_weights
from bpkv_trt.core.evidence import mask_shift
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.readout import DirectReadout
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.topk import topk_distribution
from bpkv_trt.core.traits import ModelTraits

WIDTH, HEADS, KV, SIZE, VOCABULARY, TOKENS, POSITIONS = 32, 4, 2, 8, 30, 40, 3

VARIANTS = {
    "plain": {},
    "layer norm": {"final_norm": "layer"},
    "no final norm": {"final_norm": "none"},
    "logit softcap": {"logit_softcap": 3.0},
    "logit scale": {"logit_scale": 0.5},
    "residual multiplier": {"residual_multiplier": 0.22},
    "post-attention norm": {"post_attention_norm": True},
    "attention softcap": {"attention_softcap": 2.0},
    "sink": {"sink_logits": True},
    "everything": {
        "final_norm": "layer", "logit_softcap": 3.0, "logit_scale": 2.0, "residual_multiplier": 0.5,
        "post_attention_norm": True, "attention_softcap": 2.0, "sink_logits": True,
    },
}  # fmt: skip


@dataclass
class OneLayerModel:
    """Embedding, one attention layer, final norm, head; float64, every row attended one query at a time."""

    traits: ModelTraits

    def __post_init__(self) -> None:
        self.embedding = torch.randn(TOKENS, WIDTH).double()
        self.q, self.k, self.v = (torch.randn(n * SIZE, WIDTH).double() * 0.3 for n in (HEADS, KV, KV))
        self.o, self.bias = torch.randn(WIDTH, HEADS * SIZE).double() * 0.3, torch.randn(WIDTH).double() * 0.1
        self.gamma, self.beta = 1 + torch.randn(WIDTH).double() * 0.2, torch.randn(WIDTH).double() * 0.1
        self.post_gamma = 1 + torch.randn(WIDTH).double() * 0.2
        self.head = torch.randn(VOCABULARY, WIDTH).double() * 0.4
        self.sink = torch.randn(HEADS).double() if self.traits.sink_logits else None

    def heads_of(self, matrix: Tensor) -> Tensor:
        return (self.embedding @ matrix.T).unflatten(-1, (-1, SIZE))  # [T, heads, D]

    def context(self, bias: Tensor) -> Tensor:
        """[M, Hq, D] with `bias` [Hkv, T] added to the logits: -inf evicts, log(1 - s) takes a share s away."""
        q, k, v = self.heads_of(self.q), self.heads_of(self.k), self.heads_of(self.v)
        result = torch.zeros(POSITIONS, HEADS, SIZE).double()
        for m in range(POSITIONS):
            own = TOKENS - POSITIONS + m
            for head in range(HEADS):
                group = head // (HEADS // KV)
                logits = k[: own + 1, group] @ q[own, head] * self.traits.attention_scale
                if self.traits.attention_softcap is not None:
                    logits = torch.tanh(logits / self.traits.attention_softcap) * self.traits.attention_softcap
                logits = logits + bias[group, : own + 1]
                if self.sink is not None:
                    logits = torch.cat([logits, self.sink[head : head + 1]])
                result[m, head] = torch.softmax(logits, 0)[: own + 1] @ v[: own + 1, group]
        return result

    def residual(self, context: Tensor) -> Tensor:
        branch = context.flatten(1) @ self.o.T + self.bias
        if self.traits.post_attention_norm:
            branch = torch.nn.functional.rms_norm(branch, (WIDTH,), self.post_gamma, 1e-6)
        return self.embedding[-POSITIONS:] + branch * self.traits.residual_multiplier

    def logits(self, residual: Tensor) -> Tensor:
        if self.traits.final_norm == "rms":
            residual = torch.nn.functional.rms_norm(residual, (WIDTH,), self.gamma, 1e-6)
        elif self.traits.final_norm == "layer":
            residual = torch.nn.functional.layer_norm(residual, (WIDTH,), self.gamma, self.beta, 1e-6)
        z, cap = residual @ self.head.T * self.traits.logit_scale, self.traits.logit_softcap
        return z if cap is None else torch.tanh(z / cap) * cap

    def head_rows(self, ids: Tensor) -> Tensor:
        return self.head[ids]

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        return self.gamma, self.beta if self.traits.final_norm == "layer" else None

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        return self.o, self.bias

    def post_attention_norm(self, layer: int) -> tuple[Tensor, float] | None:
        return (self.post_gamma, 1e-6) if self.traits.post_attention_norm else None

    def keys(self, layer: int, head: int) -> Tensor:
        return self.heads_of(self.k)[:, head].float()

    def values(self, layer: int, head: int) -> Tensor:
        return self.heads_of(self.v)[:, head].float()

    def statistics(self) -> ForwardStatistics:
        context = self.context(torch.zeros(KV, TOKENS).double())
        residual = self.residual(context)
        ids, p, covered = topk_distribution(self.logits(residual), VOCABULARY, VOCABULARY)
        return ForwardStatistics(
            q=self.heads_of(self.q)[-POSITIONS:].float()[None],
            context=context.float()[None],
            residual=residual.float(),
            topk_ids=ids,
            topk_p=p,
            covered_mass=covered,
            positions=torch.arange(TOKENS - POSITIONS, TOKENS),
            readout=DirectReadout.of(context[None], residual, ids, p, self.traits, self),
            sink_logits=None if self.sink is None else self.sink.float()[None],
        )


def one_layer(variant: str) -> OneLayerModel:
    plain = ModelTraits("one layer", 1, HEADS, KV, SIZE, WIDTH, VOCABULARY, SIZE**-0.5)
    return OneLayerModel(replace(plain, **VARIANTS[variant]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_error_falls_by_four_when_the_perturbation_is_halved(variant):
    model = one_layer(variant)
    statistics = model.statistics()
    evict = torch.zeros(1, KV, TOKENS, dtype=torch.bool)
    evict[0, 0, 3:20], evict[0, 1, 10:25] = True, True
    full = model.context(torch.zeros(KV, TOKENS).double())
    moved = model.context(torch.zeros(KV, TOKENS).double().masked_fill(evict[0], -torch.inf)) - full
    shift = mask_shift(EvidenceSource(statistics, model, model.traits), evict).double()  # first order, all of `moved`
    z = model.logits(model.residual(full)).gather(1, statistics.topk_ids)
    p = torch.softmax(z, -1)
    errors = []
    for share in (2**-4, 2**-5, 2**-6):
        dz = model.logits(model.residual(full + share * moved)).gather(1, statistics.topk_ids) - z
        dz = dz - (p * dz).sum(-1, keepdim=True)
        errors.append(float((dz - share * shift).norm() / (share * shift).norm()))
    if variant in ("no final norm", "residual multiplier") and max(errors) < 1e-5:
        return  # linear all the way: nothing to halve
    # The relative error is linear in the share, so the error itself is quadratic.
    assert errors[0] < 0.2
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.15) and errors[1] / errors[2] == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_estimated_kl_of_a_small_mask_is_that_of_the_masked_forward(variant):
    model = one_layer(variant)
    statistics = model.statistics()
    weights = torch.stack([
        attention_weights(
            statistics.q[0, :, head * 2 : head * 2 + 2], model.keys(0, head), model.traits.attention_scale,
            softcap=model.traits.attention_softcap,
        ).sum((0, 1)) for head in range(KV)
    ])  # fmt: skip
    evict = torch.zeros(1, KV, TOKENS, dtype=torch.bool)
    evict[0].scatter_(1, weights[:, :-POSITIONS].topk(1, largest=False).indices, True)
    estimate = float(
        statistics.readout.divergence.of(mask_shift(EvidenceSource(statistics, model, model.traits), evict))
    )
    full = torch.zeros(KV, TOKENS).double()
    log_p = torch.log_softmax(model.logits(model.residual(model.context(full))), -1)
    masked = model.context(full.masked_fill(evict[0], -torch.inf))
    log_q = torch.log_softmax(model.logits(model.residual(masked)), -1)
    true = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert true > 1e-9
    assert estimate == pytest.approx(true, rel=0.1)
