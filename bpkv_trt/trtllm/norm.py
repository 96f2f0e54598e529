"""A norm of the model at the scoring rows, in fp32: its output and its transposed Jacobian."""

from bpkv_trt.trtllm.graph import Value


class Norm:
    """An RMSNorm, or a LayerNorm where the mean is subtracted, at rows x; `core.readout.norm_adjoint` as layers."""

    def __init__(
        self, x: Value, gamma: Value, eps: float, *, beta: Value | None = None, subtract_mean: bool = False
    ) -> None:
        """x [S, d]; gamma and beta [d], of any float type; gamma is the factor applied."""
        fp32 = x.graph.trt.float32
        x = x.cast(fp32)
        self.subtract_mean = subtract_mean
        self.x = x - x.mean() if subtract_mean else x
        self.inverse = ((self.x * self.x).mean() + eps).rsqrt()  # [S, 1]
        self.gamma = gamma.cast(fp32).reshape(1, -1)
        self.beta = None if beta is None else beta.cast(fp32).reshape(1, -1)

    def output(self) -> Value:
        """[S, d] fp32."""
        normed = self.x * self.inverse * self.gamma
        return normed if self.beta is None else normed + self.beta

    def adjoint(self, rows: Value) -> Value:
        """rows [S, K, d] fp32 -> [S, K, d] fp32.

        Sums over d are products and reductions, not matrix products, which TensorRT may compute in TF32.
        """
        width = rows.shape[-1]
        x, inverse = self.x.reshape(0, 1, width), self.inverse.reshape(0, 1, 1)
        scaled = rows * self.gamma.reshape(1, 1, width)
        along = (scaled * x).mean()  # [S, K, 1]
        adjoint = (scaled - x * (along * (inverse * inverse))) * inverse
        return adjoint - adjoint.mean() if self.subtract_mean else adjoint
