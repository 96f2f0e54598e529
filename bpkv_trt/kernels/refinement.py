"""Stage 2's greedy choice on the device: `core.candidates.choose` without a word to the host between its steps."""

import torch
from torch import Tensor

from bpkv_trt.core.candidates import CandidatePool
from bpkv_trt.core.divergence import Divergence, FisherDivergence, TopKDivergence
from bpkv_trt.core.stability import LEAST_MASS
from bpkv_trt.kernels.arguments import aligned, expect
from bpkv_trt.kernels.language import tl, triton
from bpkv_trt.kernels.launch import launch
from bpkv_trt.kernels.lse import INFINITY
from bpkv_trt.kernels.rounding import ceil_div, next_power_of_2
from bpkv_trt.kernels.series import log1p, phi

TILE = 16  # candidates of a program
CHANNELS_AT_A_TIME = 64  # of all positions, for each of them: what the registers of 4 warps hold
ELEMENTS = 1024  # of the tiles' results, then of the one head that a step changes, at a time
MOST_CHANNELS = 128  # of one position, for TILE candidates, in the registers of 4 warps
EVERY_HEAD = tl.constexpr(-1)  # in place of the head that the last step changed
NO_HEAD = tl.constexpr(-2)
OVERFLOW_LIMIT = tl.constexpr(60.0)  # as the core's


def choose(
    pool: CandidatePool, base: Tensor, unit: Tensor, shares: Tensor, floor: Tensor, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """Greedily evict `shares[u]` candidates of each unit, always the one with the smallest increment at base [M, C].

    Same arguments, rules and result as `core.candidates.choose`: chosen [P] bool, short of the shares where none was
    left to take, and the shift [M, C]; ties go to the lowest index; the pool's mass and contexts become those of the
    mask. unit [P] and shares [U] int64, floor [P] and base fp32, all contiguous. One read of the shares, then
    sum(shares) steps of two launches, none of which the host waits for; a step that finds no candidate changes nothing.
    Raises TypeError and ValueError for arguments that do not fit and shares below 0, TypeError for a divergence that is
    neither `TopKDivergence` nor `FisherDivergence`. Owners below S and units below U are the caller's to provide: these
    values on the device are not read back to be checked.

    Floor of a step for P candidates: their shifts, 4 P M C bytes, and 26 P for what else there is of each; the entries
    of the one head that changed, 4 (1 + C) P G M / S bytes on average. P 8,192 in S 256 heads of G 4, on an H200:
    1.6 MB and 0.3 us for 40 positions and 1 probe, 17 MB and 3.6 us for 16 positions and 32 logits (less from L2, into
    which both fit); 4,096 steps are 1.4 and 15 ms. The launches bind: 8,192 of them, at some 10 us each, are 80 ms.
    """
    if not isinstance(divergence, TopKDivergence | FisherDivergence):
        raise TypeError(f"divergence is a {type(divergence).__name__}; expected a TopKDivergence or FisherDivergence.")
    _check(pool, base, unit, shares, floor, divergence)
    steps = _steps(shares)
    candidates, group, positions = pool.a.shape
    channels = base.shape[1]
    device = base.device
    base, remaining = base.clone(), shares.clone()
    p = aligned(divergence.p) if isinstance(divergence, TopKDivergence) else None
    weights = aligned(divergence.weights)
    least = floor.clamp_min(LEAST_MASS)
    chosen, stable = (torch.zeros(candidates, dtype=torch.bool, device=device) for _ in range(2))
    shifts = torch.empty(candidates, positions, channels, dtype=torch.float32, device=device)
    blocks = ceil_div(candidates, TILE)
    lowest = torch.empty(blocks, dtype=torch.float32, device=device)
    cheapest = torch.empty(blocks, dtype=torch.int32, device=device)
    changed = torch.full((1,), EVERY_HEAD.value, dtype=torch.int64, device=device)
    width = next_power_of_2(channels)
    for _ in range(steps if candidates else 0):
        launch(
            weigh_candidates,
            (blocks,),
            pool.a,
            pool.values,
            pool.mass,
            pool.contexts,
            pool.owner,
            unit,
            least,
            p,
            weights,
            base,
            remaining,
            chosen.view(torch.uint8),
            changed,
            candidates,
            positions,
            shifts,
            stable.view(torch.uint8),
            lowest,
            cheapest,
            CHANNELS=channels,
            WIDTH=width,
            GROUP=group,
            BLOCK=max(1, CHANNELS_AT_A_TIME // width),  # however few positions: nothing waits for the empty lanes
            TILE=TILE,
            warps=4,
        )
        launch(
            evict_cheapest,
            (1,),
            pool.a,
            pool.values,
            pool.owner,
            unit,
            shifts,
            lowest,
            cheapest,
            blocks,
            positions,
            pool.mass,
            pool.contexts,
            base,
            remaining,
            chosen.view(torch.uint8),
            changed,
            CHANNELS=channels,
            GROUP=group,
            TILE=ELEMENTS,
            warps=8,
        )
    return chosen, base


def _steps(shares: Tensor) -> int:
    # Of tensors on `meta` nothing is known, and one step has every launch.
    if shares.is_meta:
        return 1
    counts = shares.tolist()
    if min(counts, default=0) < 0:
        raise ValueError(f"shares has {min(counts)}; expected 0 or more of every unit.")
    return sum(counts)


def _check(
    pool: CandidatePool,
    base: Tensor,
    unit: Tensor,
    shares: Tensor,
    floor: Tensor,
    divergence: TopKDivergence | FisherDivergence,
) -> None:
    expect("pool.a", pool.a, (None, None, None), [torch.float32], None)
    candidates, group, positions = pool.a.shape
    device = pool.a.device
    expect("base", base, (positions, None), [torch.float32], device)
    channels = base.shape[1]
    if not 1 <= channels <= MOST_CHANNELS:
        raise ValueError(f"base has {channels} channels; expected 1 to {MOST_CHANNELS}.")
    expect("pool.values", pool.values, (candidates, positions, channels, group), [torch.float32], device)
    expect("pool.mass", pool.mass, (None, group, positions), [torch.float32], device)
    heads = pool.mass.shape[0]
    if candidates and not (heads and group):
        raise ValueError(f"pool.mass has shape {tuple(pool.mass.shape)}; expected a head and a query head at least.")
    expect("pool.contexts", pool.contexts, (heads, positions, channels, group), [torch.float32], device)
    expect("pool.owner", pool.owner, (candidates,), [torch.int64], device)
    expect("unit", unit, (candidates,), [torch.int64], device)
    expect("shares", shares, (None,), [torch.int64], device)
    expect("floor", floor, (candidates,), [torch.float32], device)
    expect("divergence.weights", divergence.weights, (positions,), [torch.float32], device)
    if isinstance(divergence, TopKDivergence):
        expect("divergence.p", divergence.p, (positions, channels), [torch.float32], device)


@triton.jit
def weigh_candidates(
    a,  # [P, G, M] fp32
    values,  # [P, M, C, G] fp32
    mass,  # [S, G, M] fp32
    contexts,  # [S, M, C, G] fp32
    owner,  # [P] int64
    unit,  # [P] int64
    least,  # [P] fp32
    p,  # [M, C] fp32, or None: the channels are probes
    weights,  # [M] fp32
    base,  # [M, C] fp32
    remaining,  # [U] int64
    chosen,  # [P] uint8
    changed,  # [1] int64, the head that the last step changed
    candidates,  # P
    positions,  # M
    shifts,  # [P, M, C] fp32, renewed for the changed head
    stable,  # [P] uint8, whether the head would retain enough; likewise
    lowest,  # [blocks] fp32, the smallest increment; infinite where no candidate is left
    cheapest,  # [blocks] int32, the candidate that has it
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # positions at a time
    TILE: tl.constexpr,
):
    """One tile of candidates: what each would add to the divergence at base. The floor is that of `choose`."""
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = index < candidates
    head = tl.load(owner + index, mask=exists, other=0)
    last = tl.load(changed)
    touched = exists & ((head == last) | (last == EVERY_HEAD))
    if tl.max(touched.to(tl.int32), axis=0) > 0:
        floor = tl.load(least + index, mask=exists, other=0.0)
        remains = renew_shifts(
            a, values, mass, contexts, index, head, floor, touched, positions, shifts,
            CHANNELS, WIDTH, GROUP, BLOCK, TILE,
        )  # fmt: skip
        tl.store(stable + index, remains.to(tl.uint8), mask=touched)
        tl.debug_barrier()  # they are read back below, by other threads

    increment = tl.zeros([TILE], tl.float32)
    for start in range(0, positions, BLOCK):
        position, place, inside = channels_of(start, positions, CHANNELS, WIDTH, BLOCK)
        wide = exists[:, None, None] & inside[None, :, :]
        shift_place = index.to(tl.int64)[:, None, None] * (positions * CHANNELS) + place[None, :, :]
        shift = tl.load(shifts + shift_place, mask=wide, other=0.0)
        at = tl.load(base + place, mask=inside, other=0.0)[None, :, :]
        if p is None:
            added = tl.sum(shift * (at + shift / 2), axis=2) / CHANNELS
        else:
            added = top_k_increment(tl.load(p + place, mask=inside, other=0.0)[None, :, :], at, shift)
        weight = tl.load(weights + position, mask=position < positions, other=0.0)
        increment += tl.sum(added * weight[None, :], axis=1)

    open_unit = tl.load(remaining + tl.load(unit + index, mask=exists, other=0)) > 0
    free = (tl.load(chosen + index, mask=exists, other=1) == 0) & (tl.load(stable + index, mask=exists, other=0) != 0)
    increment = tl.where(free & open_unit & (tl.abs(increment) < INFINITY), increment, INFINITY)
    tl.store(lowest + tl.program_id(0), tl.min(increment, axis=0))
    tl.store(cheapest + tl.program_id(0), tl.program_id(0) * TILE + tl.argmin(increment, axis=0))


@triton.jit
def renew_shifts(
    a,
    values,
    mass,
    contexts,
    index,  # [T]
    head,  # [T]
    floor,  # [T]
    touched,  # [T] bool: others stay as they are
    positions,
    shifts,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write sum_g a / (s - a) (g.c' - g.v) of the touched candidates. Returns [T] bool: every s - a >= floor."""
    index, head = index.to(tl.int64), head.to(tl.int64)
    short = tl.zeros([TILE], tl.int32)
    for start in range(0, positions, BLOCK):
        position, place, inside = channels_of(start, positions, CHANNELS, WIDTH, BLOCK)
        present = touched[:, None] & (position < positions)[None, :]
        wide = touched[:, None, None] & inside[None, :, :]
        shift = tl.zeros([TILE, BLOCK, WIDTH], tl.float32)
        for member in tl.static_range(GROUP):
            pair = member * positions + position[None, :]
            weight = tl.load(a + index[:, None] * (GROUP * positions) + pair, mask=present, other=0.0)
            left = tl.load(mass + head[:, None] * (GROUP * positions) + pair, mask=present, other=INFINITY) - weight
            short += tl.sum((~(left >= floor[:, None])).to(tl.int32), axis=1)
            read = place[None, :, :] * GROUP + member
            size = positions * CHANNELS * GROUP
            context = tl.load(contexts + head[:, None, None] * size + read, mask=wide, other=0.0)
            value = tl.load(values + index[:, None, None] * size + read, mask=wide, other=0.0)
            shift += (weight / left)[:, :, None] * (context - value)
        tl.store(shifts + index[:, None, None] * (positions * CHANNELS) + place[None, :, :], shift, mask=wide)
    return short == 0


@triton.jit
def channels_of(start, positions, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] positions from `start` on; where their channels lie in [M, C], and which exist: [BLOCK, WIDTH]."""
    position, channel = start + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside = (position < positions)[:, None] & (channel < CHANNELS)[None, :]
    return position, position[:, None] * CHANNELS + channel[None, :], inside


@triton.jit
def top_k_increment(p, base, shift):
    """`TopKDivergence.increment` of one position: p, base [1, M, C] and shift [T, M, C] give [T, M]."""
    tilt = centred(p, base)
    tilt -= log_mean_exp(p, tilt)[:, :, None]
    tilted = p * tl.exp(tilt)
    shift = centred(tilted, shift)
    linear = tl.sum(shift * p * (phi(tilt) + tilt), axis=2)  # (p' - p).shift, not by subtraction
    return log_mean_exp(tilted, shift) + linear


@triton.jit
def centred(p, x):
    """x less its mean under p; 0 where p is, so that padding takes no part."""
    return tl.where(p > 0, x - tl.sum(p * x, axis=2)[:, :, None], 0.0)


@triton.jit
def log_mean_exp(p, x):
    """log sum p e^x over the last axis, for x centred under p, whose largest is therefore no less than 0."""
    largest = tl.max(x, axis=2)
    small = log1p(tl.sum(p * phi(tl.where(x > OVERFLOW_LIMIT, OVERFLOW_LIMIT, x)), axis=2))
    total = tl.sum(p * tl.exp(x - largest[:, :, None]), axis=2)
    large = largest + tl.log(tl.where(total == 0, 1.0, total))  # 0 at positions that are padding
    return tl.where(largest > OVERFLOW_LIMIT, large, small)


@triton.jit
def evict_cheapest(
    a,  # [P, G, M] fp32
    values,  # [P, M, C, G] fp32
    owner,  # [P] int64
    unit,  # [P] int64
    shifts,  # [P, M, C] fp32
    lowest,  # [blocks] fp32
    cheapest,  # [blocks] int32
    blocks,
    positions,  # M
    mass,  # [S, G, M] fp32; this and what follows is updated
    contexts,  # [S, M, C, G] fp32
    base,  # [M, C] fp32
    remaining,  # [U] int64
    chosen,  # [P] uint8
    changed,  # [1] int64
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: the cheapest candidate of all leaves, as in `CandidatePool.evict`."""
    smallest, place = tl.full([], INFINITY, tl.float32), 0
    for start in range(0, blocks, TILE):
        block = start + tl.arange(0, TILE)
        increment = tl.load(lowest + block, mask=block < blocks, other=INFINITY)
        least = tl.min(increment, axis=0)
        place = tl.where(least < smallest, start + tl.argmin(increment, axis=0), place)
        smallest = tl.minimum(smallest, least)
    if smallest == INFINITY:
        tl.store(changed, NO_HEAD)
        return
    index = tl.load(cheapest + place).to(tl.int64)
    head = tl.load(owner + index)
    size, pairs = positions * CHANNELS, positions * GROUP
    for start in range(0, size * GROUP, TILE):
        element = start + tl.arange(0, TILE)
        inside = element < size * GROUP
        pair = element % GROUP * positions + element // (CHANNELS * GROUP)
        weight = tl.load(a + index * pairs + pair, mask=inside, other=0.0)
        left = tl.load(mass + head * pairs + pair, mask=inside, other=1.0) - weight
        context = tl.load(contexts + head * size * GROUP + element, mask=inside)
        value = tl.load(values + index * size * GROUP + element, mask=inside)
        moved = context + weight / left * (context - value)
        tl.store(contexts + head * size * GROUP + element, moved, mask=inside)
    for start in range(0, size, TILE):
        element = start + tl.arange(0, TILE)
        inside = element < size
        shift = tl.load(shifts + index * size + element, mask=inside)
        tl.store(base + element, tl.load(base + element, mask=inside) + shift, mask=inside)
    tl.debug_barrier()  # every thread has read the mass
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        inside = pair < pairs
        weight = tl.load(a + index * pairs + pair, mask=inside)
        left = tl.load(mass + head * pairs + pair, mask=inside) - weight
        tl.store(mass + head * pairs + pair, left, mask=inside)
    share = remaining + tl.load(unit + index)
    tl.store(share, tl.load(share) - 1)
    tl.store(chosen + index, 1)
    tl.store(changed, head)
