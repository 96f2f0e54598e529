"""TensorRT-LLM's own `trtllm-build`: whether it is there, what it is told, and running it."""

import importlib
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bpkv_trt.errors import BpkvError
from bpkv_trt.trtllm.stock_package import GONE, StockPackage

NAME = "trtllm-build"


@dataclass(frozen=True)
class StockBuild:
    """The command of the installed TensorRT-LLM."""

    module: ModuleType  # tensorrt_llm.commands.build
    package: StockPackage

    @classmethod
    def find(cls) -> "StockBuild":
        """Import it. Raises BpkvError where it is not installed, does not load, or has no engines any more."""
        package = StockPackage.find(f"engines are built by its {NAME}")
        try:
            return cls(importlib.import_module("tensorrt_llm.commands.build"), package)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "tensorrt_llm":
                raise
            raise BpkvError(f"TensorRT-LLM {package.version} has no {NAME}: {GONE}.") from None

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
