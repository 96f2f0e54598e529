"""Whether kernels can be compiled here, asked before anything that needs it is imported."""

from bpkv_trt.errors import BpkvError, ConfigError


def check_compiler() -> None:
    """Raise BpkvError where nothing can be compiled, ConfigError where the environment asks for no compilation."""
    try:
        import torch  # noqa: F401
        import triton
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise BpkvError(f"{error.name} is not installed; install it with pip install 'bpkv-trt[kernels]'.") from None
    if triton.knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET is set, so that kernels are interpreted and not compiled; unset it.")
