"""Convert a Hugging Face model to a checkpoint of TensorRT-LLM, which engines are built from.

    python build_scripts/convert_checkpoint.py --model DIR --output DIR [--dtype float16] [--tp-size 2]

Needs TensorRT-LLM, whose own conversion it is; a checkpoint is there as a whole or not at all.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # nothing of this package need be installed

from bpkv_trt.errors import BpkvError, ConfigError, InputError, ModelError
from bpkv_trt.input_file import read_file
from bpkv_trt.options import CommandParser, file_path
from bpkv_trt.trtllm.stock_package import StockPackage

LARGEST = 1 << 24  # bytes of a config.json


def parser() -> CommandParser:
    result = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", type=file_path, required=True, metavar="DIR", help="with a config.json")
    result.add_argument("--output", type=file_path, required=True, metavar="DIR", help="made; must not be there yet")
    result.add_argument("--dtype", choices=("auto", "float16", "bfloat16", "float32"), default="auto")
    result.add_argument("--tp-size", type=int, default=1, metavar="N", help="ranks of tensor parallelism (default 1)")
    return result


def architecture_of(model: Path) -> str:
    """The one that a Hugging Face model's configuration names."""
    path = model / "config.json"
    content = read_file(path, LARGEST, "model's configuration", "--model")
    try:
        return str(json.loads(content)["architectures"][0])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise InputError(
            f"The model's configuration {path} names no architecture; give a Hugging Face model."
        ) from None


def convert(model: Path, output: Path, dtype: str, ranks: int) -> None:
    """Write the checkpoint, rank after rank."""
    if ranks < 1:
        raise ConfigError(f"--tp-size is {ranks}; give 1 or more.")
    if output.exists():
        raise InputError(f"The output {output} is there already; give another name, or remove it.")
    architecture = architecture_of(model)
    StockPackage.find("models are converted by it").check_version()
    from tensorrt_llm.mapping import Mapping
    from tensorrt_llm.models import MODEL_MAP

    from bpkv_trt.trtllm.models import CLASSES

    if architecture not in CLASSES:
        raise ModelError(f"The model is of {architecture}, which is not covered; those of {', '.join(CLASSES)} are.")
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        for rank in range(ranks):
            mapping = Mapping(world_size=ranks, rank=rank, tp_size=ranks)
            converted = MODEL_MAP[architecture].from_hugging_face(str(model), dtype, mapping=mapping)
            converted.save_checkpoint(str(scratch), save_config=rank == 0)
            del converted  # before the next one is loaded
        scratch.chmod(0o755)  # a temporary folder is private
        scratch.rename(output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for what the user can mend, 130 when interrupted."""
    try:
        options = parser().parse_args(arguments)
        convert(options.model, options.output, options.dtype, options.tp_size)
    except BpkvError as error:
        print(f"convert_checkpoint.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("convert_checkpoint.py: interrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
