"""e^x - 1 - x and log(1 + x) without the digits that they would lose near 0."""

from bpkv_trt.kernels.language import tl, triton

PHI_LIMIT = tl.constexpr(0.3)  # beyond it e^x - 1 - x loses less than the series would
LOG_LIMIT = tl.constexpr(0.5)


@triton.jit
def phi(x):
    """e^x - 1 - x, to 2e-6 of itself."""
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040)))))
    return tl.where(tl.abs(x) < PHI_LIMIT, series, tl.exp(x) - 1 - x)


@triton.jit
def log1p(x):
    """2 artanh(x / (2 + x)) by its series where log(1 + x) would lose the digits of x; for x > -1/2."""
    s = x / (2 + x)
    t = s * s
    series = 2 * s * (1 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t / 9))))
    return tl.where(x < LOG_LIMIT, series, tl.log(1 + x))
