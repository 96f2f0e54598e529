"""The TensorRT-LLM that is installed: whether it is there, and one that engines are built and run by."""

import importlib
import re
from dataclasses import dataclass

from bpkv_trt.errors import BpkvError

OLDEST, FIRST_WITHOUT = (1, 0), (1, 3)  # engines went away in 1.3
INSTALL = "pip install 'bpkv-trt[trtllm]' (tensorrt-llm>=1.0,<1.3)"
GONE = (
    "engines were removed from TensorRT-LLM in 1.3. Install an earlier one with " + INSTALL + ", or use the PyTorch "
    "backend, whose KV-cache compression framework is the place for it there"
)


@dataclass(frozen=True)
class StockPackage:
    """Its version; importing it may take a minute."""

    version: str

    @classmethod
    def find(cls, use: str) -> "StockPackage":
        """Import it. use: what it is needed for, a clause. Raises BpkvError where it is not installed or not loaded."""
        try:
            package = importlib.import_module("tensorrt_llm")
        except (ImportError, OSError, RuntimeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "tensorrt_llm":
                raise BpkvError(
                    f"TensorRT-LLM is not installed, and {use}: install it beside an NVIDIA GPU with {INSTALL}, or use "
                    "NVIDIA's container of it."
                ) from None
            raise BpkvError(
                f"TensorRT-LLM is installed and cannot be imported ({error}): it needs an NVIDIA driver and the "
                "libraries that it was built for. `bpkv doctor` shows what there is."
            ) from None
        return cls(str(getattr(package, "__version__", "of an unknown version")))

    def check_version(self) -> None:
        """Raises BpkvError for one that engines with BP-KV are not written for."""
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        installed = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if installed >= FIRST_WITHOUT:
            raise BpkvError(f"TensorRT-LLM is {self.version}: {GONE}.")
        if installed < OLDEST:
            raise BpkvError(
                f"TensorRT-LLM is {self.version}, which is too old: its models and sessions differ from those of 1.0 "
                f"to 1.2. Install one of these with {INSTALL}."
            )
