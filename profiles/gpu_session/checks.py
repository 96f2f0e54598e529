"""Every kernel against the core in float64, on fresh random inputs.

Pages lie in random order, rows that nobody holds are NaN, and so is what a launcher allocates before a kernel has
written it. An error is relative to the sizes of what was added up to make a number, so that it tells what the kernel
did and not how much of it cancelled.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from bpkv_trt.core.candidates import CandidatePool
from bpkv_trt.core.candidates import choose as core_choose
from bpkv_trt.core.deletion import DeletionStatistics, HeadAttention, retained
from bpkv_trt.core.deletion import singleton_scores as core_scores
from bpkv_trt.core.divergence import Divergence, FisherDivergence, TopKDivergence, position_weights
from bpkv_trt.kernels.compact import compact
from bpkv_trt.kernels.decode import paged_decode_attention
from bpkv_trt.kernels.deletion import deletion_statistics, nomination
from bpkv_trt.kernels.lse import log_sum_exp
from bpkv_trt.kernels.paged import PagedCache
from bpkv_trt.kernels.refinement import choose
from bpkv_trt.kernels.score import singleton_scores
from profiles.gpu_session.part import Record, Session, run_part
from tests.kernels.attended import Attended

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FP8, INT8 = torch.float8_e4m3fn, torch.int8
SCALES = {"key_scale": 0.3, "value_scale": 0.2}
CASES: list[dict[str, Any]] = [
    {"cache": BF16, "queries": BF16, "group": 4, "head_dim": 128, "page_size": 32},
    {"cache": FP16, "queries": FP16, "group": 3, "head_dim": 96, "page_size": 64, "options": {"softcap": 5.0}},
    {"cache": FP8, "queries": BF16, "group": 1, "head_dim": 64, "page_size": 32, "shared_pages": True, **SCALES},
    {"cache": INT8, "queries": FP16, "group": 8, "head_dim": 128, "page_size": 128, **SCALES},
    {"cache": FP32, "queries": FP32, "group": 2, "head_dim": 64, "page_size": 16, "options": {"window": 77}},
    {"cache": BF16, "queries": BF16, "group": 2, "head_dim": 256, "page_size": 32, "shared_pages": True,
     "options": {"softcap": 3.0, "window": 130}},
    {"cache": FP8, "queries": FP16, "group": 16, "head_dim": 128, "page_size": 64, "shared_pages": True, **SCALES},
    {"cache": BF16, "queries": BF16, "group": 7, "head_dim": 128, "page_size": 16},
]  # fmt: skip
CHOICES: list[dict[str, Any]] = [  # P, S, G, M, C, evictions; the floor that binds
    {"kind": "top K", "candidates": 500, "heads": 32, "group": 4, "positions": 16, "channels": 32, "steps": 100},
    {"kind": "probes", "candidates": 777, "heads": 5, "group": 7, "positions": 40, "channels": 1, "steps": 150},
]
HEADS = 2  # KV heads of every case
FEW = 5  # positions of queries in fp32: products of more, without tensor cores, take minutes to compile
CHANNELS = 5  # of the readout; probes have 2
LEAST = 0.2  # mass that a head must retain, in `nomination`
DIGITS = 0.01  # of a value that is subtracted from one close to it, what counts as its size: fp32 has so many digits
# 2^-24 times the numbers in fp32 that follow one another (a logit's product, exp, the sum): ten times what was seen.
TOLERANCE = 2e-5
TINY = torch.finfo(torch.float64).tiny
LARGEST = torch.finfo(torch.float32).max

Check = tuple[str, float, float]  # what, its largest error, and the tolerance


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """torch.empty is NaN within, as it is beside deterministic algorithms: an element that no kernel wrote shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def error_of(ours: Tensor, truth: Tensor, size: Tensor | float) -> float:
    """Largest |ours - truth| / size; infinite for a NaN, and for any difference where the size is 0."""
    if ours.numel() == 0:
        return 0.0
    difference = (ours.to(truth) - truth).abs()
    same = ours.to(truth) == truth  # infinities and the largest number are what they are
    error = torch.where(same, 0.0, difference / torch.as_tensor(size).to(truth).clamp_min(TINY))
    return error.nan_to_num(nan=torch.inf).max().item()


@dataclass
class Head:
    """One KV head of one sequence, in float64."""

    sequence: int
    head: int
    at: tuple[slice, slice]  # of its positions and query heads in [S, Hq]
    logits: Tensor  # [G, n, T]
    values: Tensor  # [T, D]

    @property
    def a(self) -> Tensor:
        return self.logits.softmax(-1)

    @property
    def place(self) -> tuple[int, int, slice]:
        """Of its rows in [B, Hkv, T]."""
        return self.sequence, self.head, slice(len(self.values))


class Problem:
    """Random sequences of unequal heads, one of a single row, and what they attend to."""

    def __init__(self, case: dict[str, Any], session: Session) -> None:
        rows, most = ((30, 70), 5) if session.tiny else ((1000, 5000), 40)
        if case["queries"] == FP32:
            most = FEW
        self.device = session.device
        lengths = [[_odd(*rows), _odd(*rows)], [1, 1], [_odd(*rows), _odd(*rows)]]
        counts = [most, 1, int(torch.randint(2, most, (1,)))]
        self.attended = Attended.random(lengths, counts, device=self.device, sharpness=2.0, common=0.5, **case)
        self.cache = self.attended.laid.cache
        self.q, self.offsets, self.options = self.attended.q, self.attended.offsets, self.attended.options
        self.longest = max(map(max, lengths)) + 3
        self.weights = torch.cat([position_weights(count) for count in counts]).to(self.device)
        group = self.q.shape[1] // HEADS
        self.heads = [
            Head(
                sequence,
                head,
                (self.attended.sequence(sequence), slice(head * group, (head + 1) * group)),
                self.attended.logits(sequence, head).to(self.device),
                self.attended.values[sequence][head].double().to(self.device) * self.cache.value_scale,
            )
            for sequence in range(len(lengths))
            for head in range(HEADS)
        ]
        self.lse = log_sum_exp(self.q, self.offsets, self.cache, **self.options)
        self.context = torch.empty(self.q.shape, device=self.device)
        self.centre = torch.empty(len(lengths), HEADS, self.q.shape[2], device=self.device)
        self.evict = torch.rand(len(lengths), HEADS, self.longest, device=self.device) < 0.5
        for each in self.heads:
            self.context[each.at] = (each.a @ each.values).transpose(0, 1).float()
            self.centre[each.sequence, each.head] = each.values.mean(0).float()

    def gone(self, each: Head) -> Tensor:
        """[T] bool."""
        return self.evict[each.place]

    def away(self, each: Head) -> tuple[Tensor, Tensor]:
        """[T, D] values less the centre that the kernels are given, and the sizes of what that is made of."""
        away = each.values - self.centre[each.sequence, each.head].double()
        return away, away.abs() + DIGITS * each.values.abs()


def _odd(low: int, high: int) -> int:
    # no multiple of a page or a tile
    return int(torch.randint(low // 2, high // 2, (1,))) * 2 + 1


def check_lse(problem: Problem) -> list[Check]:
    ours = log_sum_exp(problem.q, problem.offsets, problem.cache, **problem.options)
    errors = [error_of(ours[each.at], each.logits.logsumexp(-1).T, 1.0) for each in problem.heads]
    return [("lse", max(errors), TOLERANCE)]


def check_score(problem: Problem, probes: bool) -> list[Check]:
    """Of a score s whose terms would make u if none cancelled, rounding takes a share of sqrt(s u); see the kernel."""
    rows, heads, width = problem.q.shape
    channels = 2 if probes else CHANNELS
    readout = 1e-2 * torch.randn(rows, channels, heads, width, device=problem.device)
    p = None if probes else torch.softmax(2 * torch.randn(rows, channels, device=problem.device), -1)
    if p is not None:
        readout = readout - torch.einsum("sc,schd->shd", p, readout).unsqueeze(1)
    readout = readout.to(problem.q.dtype)
    ours = singleton_scores(
        problem.q, problem.context, readout, p, problem.weights, problem.offsets, problem.cache, problem.lse,
        longest=problem.longest, **problem.options,
    )  # fmt: skip
    truth = torch.zeros(ours.shape, dtype=torch.float64, device=problem.device)
    size = torch.zeros_like(truth)
    for each in problem.heads:
        span, columns = each.at
        g, c, a = readout[span, :, columns].double(), problem.context[each.at].double(), each.a
        weights = problem.weights[span].double()
        fisher = FisherDivergence(weights)
        divergence: Divergence = fisher if p is None else TopKDivergence(p[span].double(), weights)
        s = core_scores(a, c, each.values, g, divergence).double()
        shares = torch.ones(channels).to(g) if p is None else (p[span].double() * channels).sqrt()
        terms = _unsigned_shift(a, c, each.values, g)
        u = fisher.of(terms * shares)
        truth[each.place] = s
        alone = s == LARGEST
        size[each.place] = torch.where(alone, 0.0, (s + (s * u).sqrt()) / (1 - a.amax((0, 1))))
    return [(f"score, {'probes' if probes else 'top K'}", error_of(ours, truth, size), TOLERANCE)]


def _unsigned_shift(a: Tensor, c: Tensor, v: Tensor, g: Tensor) -> Tensor:
    # [T, M, C]: the shift of each entry if all that it is made of had one sign
    weights = a / (1 - a).clamp_min(TINY)
    of_values = torch.einsum("gmt,gtmc->tmc", weights, torch.einsum("mcgd,td->gtmc", g, v).abs())
    return of_values + torch.einsum("gmt,gmc->tmc", weights, torch.einsum("mcgd,mgd->gmc", g, c).abs())


def check_deletion(problem: Problem) -> list[Check]:
    """Both sides' mass and values, and the shift of the context as the core has it, relative to what the mask took."""
    sums = deletion_statistics(
        problem.q, problem.evict, problem.centre, problem.offsets, problem.cache, problem.lse, **problem.options
    )
    errors = {"mass": 0.0, "values": 0.0, "shift": 0.0}
    for each in problem.heads:
        a, gone, (away, sizes) = each.a, problem.gone(each), problem.away(each)
        for mass, total, side in ((sums.gone_mass, sums.gone_sum, gone), (sums.kept_mass, sums.kept_sum, ~gone)):
            weights = (a * side).transpose(0, 1)  # [n, G, T]
            errors["mass"] = max(errors["mass"], error_of(mass[each.at], weights.sum(-1), weights.sum(-1)))
            errors["values"] = max(errors["values"], error_of(total[each.at], weights @ away, weights @ sizes))
        state = retained(HeadAttention(a, (a @ each.values).transpose(0, 1), each.values), gone)
        whole = state.mass > 0  # of a head that keeps nothing there is no shift
        parts = (sums.gone_mass, sums.gone_sum, sums.kept_mass, sums.kept_sum)
        ours = DeletionStatistics(*(field[each.at].transpose(0, 1) for field in parts)).retained().shift
        size = ((a * gone) @ sizes + (a * gone).sum(-1, keepdim=True) * (a @ sizes)) / state.mass.unsqueeze(-1)
        errors["shift"] = max(errors["shift"], error_of(ours[whole], state.shift[whole], size[whole]))
    return [(f"deletion, {what}", error, TOLERANCE) for what, error in errors.items()]


def check_nomination(problem: Problem) -> list[Check]:
    """The derivative of each entry, where its head would retain anything; and the epsilon rule, where clear."""
    slopes = torch.randn(problem.q.shape, device=problem.device)
    mass, contexts = torch.empty_like(problem.lse), torch.empty_like(slopes)
    for each in problem.heads:
        kept = (each.a * ~problem.gone(each)).transpose(0, 1)
        mass[each.at] = kept.sum(-1).float()
        contexts[each.at] = (kept @ problem.away(each)[0] / kept.sum(-1, keepdim=True).clamp_min(TINY)).float()
    least = torch.full(problem.cache.lengths.shape, LEAST, device=problem.device)
    first_order, admissible = nomination(
        problem.q, problem.evict, problem.centre, mass, contexts, slopes, least, problem.offsets, problem.cache,
        problem.lse, **problem.options,
    )  # fmt: skip
    error, wrong = 0.0, admissible[:, :, problem.longest - 3 :].sum().item()
    for each in problem.heads:
        a, gone, (away, sizes) = each.a.transpose(0, 1), problem.gone(each), problem.away(each)  # a [n, G, T]
        slope, context = slopes[each.at].double(), contexts[each.at].double()
        left = mass[each.at].double().unsqueeze(-1) + torch.where(gone, a, -a)
        pulls = (slope * context).sum(-1, keepdim=True), slope @ away.T
        truth = (a / left * (pulls[0] - pulls[1])).sum((0, 1))
        unsigned = (slope.abs() * context.abs()).sum(-1, keepdim=True) + slope.abs() @ sizes.T
        size = (a / left * unsigned / left.clamp(1e-3, 1)).sum((0, 1))
        margin = left.amin((0, 1))
        compared = margin > 0.01
        error = max(error, error_of(first_order[each.place][compared], truth[compared], size[compared]))
        clear = (margin - LEAST).abs() > 1e-4
        wrong += (admissible[each.place] != (margin >= LEAST))[clear].sum().item()
    return [("nomination, first order", error, TOLERANCE), ("nomination, admissible", float(wrong), 0.0)]


def check_decode(problem: Problem) -> list[Check]:
    """The last position of every sequence alone; attention weights are rounded to the type of the queries."""
    last = problem.offsets[1:].long() - 1
    options = {name: value for name, value in problem.options.items() if name != "positions"}
    context, lse = paged_decode_attention(problem.q[last], problem.cache, **options)
    rounding = 0.0 if problem.q.dtype == FP32 else torch.finfo(problem.q.dtype).eps
    errors = {"context": 0.0, "lse": 0.0}
    for each in problem.heads:
        logits, columns = each.logits[:, -1], each.at[1]
        truth = logits.softmax(-1) @ each.values
        size = logits.softmax(-1) @ each.values.abs()
        errors["context"] = max(errors["context"], error_of(context[each.sequence, columns], truth, size))
        errors["lse"] = max(errors["lse"], error_of(lse[each.sequence, columns], logits.logsumexp(-1), 1.0))
    return [("decode, context", errors["context"], rounding + TOLERANCE), ("decode, lse", errors["lse"], TOLERANCE)]


def check_compact(problem: Problem) -> list[Check]:
    """Random bytes, packed in place by the kernel and, in a copy, row by row; the number of bytes that differ."""
    cache, (keys, values) = problem.cache, problem.attended.laid.memory
    held = [keys] if cache.shared_pages else [keys, values]  # one pool of both, or two with the positions beside them
    positions = None if cache.shared_pages else torch.empty(keys.shape[0], cache.page_size, dtype=torch.int32)
    positions = None if positions is None else positions.to(problem.device)
    arrays = held if positions is None else [*held, positions]
    for array in arrays:
        array.view(torch.uint8).random_(0, 256)
    before = [array.view(torch.uint8).cpu().view(keys[..., 0].numel(), -1).clone() for array in arrays]  # [rows, bytes]
    expected = [array.clone() for array in before]
    kept = [(torch.rand(len(each.values)) < 0.3).nonzero().squeeze(1) for each in problem.heads]
    for each, rows in zip(problem.heads, kept, strict=True):
        for kind, table in enumerate((cache.key_pages, cache.value_pages)):
            source, target = (_places(cache, table, each, row) for row in (rows, torch.arange(len(rows))))
            for number in (0,) if cache.shared_pages else ((0, 2), (1,))[kind]:
                expected[number][target] = before[number][source]
    offsets = torch.tensor([0, *map(len, kept)]).cumsum(0)
    compact(torch.cat(kept).int().to(problem.device), offsets.to(problem.device), cache, positions)
    ours = [array.view(torch.uint8).cpu().view_as(truth) for array, truth in zip(arrays, expected, strict=True)]
    wrong = sum(int((mine != truth).sum()) for mine, truth in zip(ours, expected, strict=True))
    return [("compact, bytes that differ", float(wrong), 0.0)]


def _places(cache: PagedCache, table: Tensor, each: Head, rows: Tensor) -> Tensor:
    # Of rows of a head, counted in rows of the memory; table [B, Hkv or 1, P].
    page = table[each.sequence, 0 if cache.shared_pages else each.head].cpu().long() + cache.first_page
    place = page[rows // cache.page_size] * cache.page_heads + (each.head if cache.shared_pages else 0)
    return place * cache.page_size + rows % cache.page_size


def check_choose(choice: dict[str, Any], device: torch.device) -> list[Check]:
    """The divergence that the choice causes: of two candidates that differ in rounding alone, either may leave."""
    sizes = {name: choice[name] for name in ("candidates", "heads", "group", "positions", "channels")}
    pool, base = candidate_pool(**sizes, device=device), 0.1 * torch.randn(sizes["positions"], sizes["channels"])
    unit, floor = pool.owner % 3, torch.full(pool.owner.shape, 0.3, device=device)
    shares = torch.full((3,), choice["steps"] // 3, device=device)
    weights = position_weights(sizes["positions"], [0.5])
    p = torch.softmax(2 * torch.randn(base.shape), -1)

    def run(function: Callable[..., Any], dtype: torch.dtype) -> tuple[Tensor, float]:
        held = {each.name: getattr(pool, each.name).clone() for each in fields(pool)}
        own = CandidatePool(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in held.items()})
        pair = p.to(device, dtype), weights.to(device, dtype)
        divergence: Divergence = TopKDivergence(*pair) if choice["kind"] == "top K" else FisherDivergence(pair[1])
        chosen, shift = function(own, base.to(device, dtype), unit, shares, floor.to(dtype), divergence)
        exact = tuple(each.double() for each in pair)
        judge: Divergence = TopKDivergence(*exact) if choice["kind"] == "top K" else FisherDivergence(exact[1])
        return torch.bincount(unit[chosen], minlength=3), judge.of(shift.double()).item()

    (ours, reached), (theirs, least) = run(choose, FP32), run(core_choose, torch.float64)
    counts = float((ours - theirs).abs().sum())
    return [
        (f"choose, {choice['kind']}, divergence", abs(reached - least) / least, TOLERANCE),
        (f"choose, {choice['kind']}, counts", counts, 0.0),
    ]


def candidate_pool(
    *, candidates: int, heads: int, group: int, positions: int, channels: int, device: torch.device
) -> CandidatePool:
    """Random candidates in ascending heads, each with up to 0.08 of its attention."""
    owner = torch.randint(heads, (candidates,), device=device).sort().values
    return CandidatePool(
        layer=owner,
        head=torch.zeros_like(owner),
        row=torch.arange(candidates, device=device),
        owner=owner,
        a=0.08 * torch.rand(candidates, group, positions, device=device) ** 2,
        values=torch.randn(candidates, positions, channels, group, device=device),
        mass=torch.ones(heads, group, positions, device=device),
        contexts=torch.randn(heads, positions, channels, group, device=device),
    )


CHECKS: list[Callable[[Problem], list[Check]]] = [
    check_lse,
    lambda problem: check_score(problem, probes=False),
    lambda problem: check_score(problem, probes=True),
    check_deletion,
    check_nomination,
    check_decode,
    check_compact,  # last: it spoils the cache
]


def told(case: dict[str, Any]) -> str:
    """A case in a few words."""
    words = [str(value).removeprefix("torch.") if name in ("cache", "queries") else f"{name} {value}"
             for name, value in case.items() if name != "options" and value is not True]  # fmt: skip
    words += [f"{name} {value}" for name, value in case.get("options", {}).items()]
    return ", ".join(words + (["shared pages"] if case.get("shared_pages") else []))


def measure(session: Session) -> Iterator[Record]:
    torch.set_num_threads(2)  # other processes check other cases meanwhile
    for number in range(len(CASES) + len(CHOICES))[session.share :: session.shares]:
        for turn in range(1 if session.tiny else 3):
            torch.manual_seed(session.seed + 1000 * number + turn)
            for case, check in outcomes(number, session):
                what, error, tolerance = check
                yield {"check": what, "case": case, "turn": turn, "error": error, "tolerance": tolerance,
                       "passed": error <= tolerance}  # fmt: skip


def outcomes(number: int, session: Session) -> Iterator[tuple[str, Check]]:
    """(case, check) of one of the cases, or, after them, of the choices."""
    if number < len(CASES):
        problem = Problem(CASES[number], session)
        for run in CHECKS:
            with poisoned_allocations():
                checks = run(problem)
            yield from ((told(CASES[number]), check) for check in checks)
        return
    choice = CHOICES[number - len(CASES)]
    if session.tiny:
        choice = choice | {"candidates": 30, "heads": 3, "positions": 3, "steps": 6}
    with poisoned_allocations():
        checks = check_choose(choice, session.device)
    yield from ((told(choice), check) for check in checks)


if __name__ == "__main__":
    run_part(measure)
