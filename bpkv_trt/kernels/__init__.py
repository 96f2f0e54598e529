"""GPU kernels in Triton; the interpreter runs the same source on a CPU."""
