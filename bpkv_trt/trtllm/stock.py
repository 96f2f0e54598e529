"""TensorRT-LLM's own `trtllm-build`: whether it is there, what it is told, and running it."""

import importlib
import re
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bpkv_trt.errors import BpkvError

NAME = "trtllm-build"
OLDEST, FIRST_WITHOUT = (1, 0), (1, 3)  # engines went away in 1.3
INSTALL = "pip install 'bpkv-trt[trtllm]' (tensorrt-llm>=1.0,<1.3)"
GONE = (
    "engines were removed from TensorRT-LLM in 1.3. Install an earlier one with " + INSTALL + ", or use the PyTorch "
    "backend, whose KV-cache compression framework is the place for it there"
)


@dataclass(frozen=True)
class StockBuild:
    """The command of the installed TensorRT-LLM."""

    module: ModuleType  # tensorrt_llm.commands.build
    version: str

    @classmethod
    def find(cls) -> "StockBuild":
        """Import it. Raises BpkvError where it is not installed, does not load, or has no engines any more."""
        try:
            package = importlib.import_module("tensorrt_llm")
        except (ImportError, OSError, RuntimeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "tensorrt_llm":
                raise BpkvError(
                    f"TensorRT-LLM is not installed, and engines are built by its {NAME}: install it beside an NVIDIA "
                    f"GPU with {INSTALL}, or use NVIDIA's container of it."
                ) from None
            raise BpkvError(
                f"TensorRT-LLM is installed and cannot be imported ({error}): it needs an NVIDIA driver and the "
                "libraries that it was built for. `bpkv doctor` shows what there is."
            ) from None
        version = str(getattr(package, "__version__", "of an unknown version"))
        try:
            return cls(importlib.import_module("tensorrt_llm.commands.build"), version)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "tensorrt_llm":
                raise
            raise BpkvError(f"TensorRT-LLM {version} has no {NAME}: {GONE}.") from None

    def check_version(self) -> None:
        """Raises BpkvError for one that the networks with BP-KV are not written for."""
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        installed = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if installed >= FIRST_WITHOUT:
            raise BpkvError(f"TensorRT-LLM is {self.version}: {GONE}.")
        if installed < OLDEST:
            raise BpkvError(
                f"TensorRT-LLM is {self.version}, which is too old: its models differ from those of 1.0 to 1.2. "
                f"Install one of these with {INSTALL}."
            )

    def options(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What the command would understand; ends this process, as the command itself would, where it would not."""
        return vars(self._parser().parse_args(arguments))

    def help(self) -> str:
        return self._parser().format_help()

    def _parser(self) -> ArgumentParser:
        parser: ArgumentParser = self.module.parse_arguments()
        parser.prog = NAME
        return parser

    def run(self, arguments: Sequence[str]) -> None:
        """Run it in this process, as if it had been typed; raises what it raises, SystemExit for its exit code."""
        before = sys.argv
        sys.argv = [NAME, *arguments]
        try:
            code = self.module.main()
        finally:
            sys.argv = before
        if code:
            raise SystemExit(code)
