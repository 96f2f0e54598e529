"""What scores are made of at the scoring positions of an `Attended`, and the core's scores of the same tensors."""

import torch

from bpkv_trt.core.deletion import singleton_scores
from bpkv_trt.core.divergence import FisherDivergence, TopKDivergence


def readings(attended, channels, *, probes=False, readout_scale=1e-2):
    """The exact context, rounded to the type of the queries, a centred readout, its distribution, and weights."""
    count, heads, width = attended.q.shape
    device = attended.q.device
    context = torch.zeros(count, heads, width, dtype=torch.float64)
    for sequence, rows in enumerate(attended.values):
        for head, values in enumerate(rows):
            weights = attended.logits(sequence, head).softmax(-1)  # [G, n, T]
            group = len(weights)
            part = context[attended.sequence(sequence), head * group : (head + 1) * group]
            part[:] = (weights @ (values.double() * attended.laid.cache.value_scale)).transpose(0, 1)
    readout = torch.randn(count, channels, heads, width) * readout_scale
    p = None if probes else torch.rand(count, channels).pow(3)
    weights = torch.rand(count)
    if p is not None:
        p = p / p.sum(-1, keepdim=True)
        readout = readout - torch.einsum("sc,schd->shd", p, readout).unsqueeze(1)
    for sequence in range(len(attended.counts)):
        weights[attended.sequence(sequence)] /= weights[attended.sequence(sequence)].sum()
    return {
        "q": attended.q,
        "context": context.to(attended.q.dtype).to(device),
        "readout": readout.to(attended.q.dtype).to(device),
        "p": None if p is None else p.to(device),
        "weights": weights.to(device),
    }


def truth(attended, given, longest):
    """The core's scores of the same rounded tensors and the error that fp32 may make, [B, Hkv, longest] float64.

    Shifts are differences, dz = sum_g w (G.c - G.v): of a score s whose terms would make u if none cancelled, rounding
    takes a share of sqrt(s u). And 1 - a has as many digits less as a is near 1.
    """
    heads = attended.laid.cache.kv_heads
    group = given["q"].shape[1] // heads
    scores = torch.zeros(len(attended.counts), heads, longest, dtype=torch.float64)
    allowed = torch.zeros_like(scores)
    for sequence, head in ((b, h) for b in range(len(attended.counts)) for h in range(heads)):
        span, columns = attended.sequence(sequence), slice(head * group, (head + 1) * group)
        if span.start == span.stop:
            continue
        weights = given["weights"][span].cpu().double()
        fisher = FisherDivergence(weights)
        p = None if given["p"] is None else given["p"][span].cpu().double()
        a = attended.logits(sequence, head).softmax(-1)
        c = given["context"][span, columns].cpu().double()
        g = given["readout"][span, :, columns].cpu().double()
        v = attended.values[sequence][head].double() * attended.laid.cache.value_scale
        s = singleton_scores(a, c, v, g, fisher if p is None else TopKDivergence(p, weights)).double()
        terms = torch.einsum("mcgd,td->gtmc", g, v).abs() + torch.einsum("mcgd,mgd->gmc", g, c).abs().unsqueeze(1)
        size = torch.einsum("gmt,gtmc->tmc", a / (1 - a), terms)
        u = fisher.of(size if p is None else size * (p * p.shape[-1]).sqrt())
        scores[sequence, head, : len(v)] = s
        allowed[sequence, head, : len(v)] = 5e-6 * (s + (s * u).sqrt()) / (1 - a.amax((0, 1)))
    return scores, allowed
