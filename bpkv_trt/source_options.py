"""The options that name what a command runs: a model, or an engine of TensorRT-LLM."""

import argparse
from collections.abc import Mapping

from bpkv_trt.errors import ConfigError
from bpkv_trt.options import MODEL_HELP, file_path

OF_ENGINES = ("tokenizer", "plugin_lib", "bounded_cache")  # for nothing else


def add_source_options(group: argparse._ArgumentGroup) -> None:
    """`--model`, `--engine-dir`, and what goes with the latter."""
    group.add_argument("--model", metavar="M", help=MODEL_HELP)
    group.add_argument(
        "--engine-dir", type=file_path, metavar="E", help="or an engine of TensorRT-LLM with BP-KV in it"
    )
    group.add_argument("--tokenizer", metavar="T", help="of the engine's model: Hugging Face directory or id")
    group.add_argument("--plugin-lib", type=file_path, metavar="L", help="the engine's plugin library, if not found")
    group.add_argument(
        "--bounded-cache",
        action="store_const",
        const=True,
        help="of an engine: memory for what compactions leave, and not for every token of prompt and answer",
    )


def check_source(
    options: argparse.Namespace, parser: argparse.ArgumentParser, not_of_engines: Mapping[str, str]
) -> None:
    """Raise ConfigError unless a model or an engine is named, and nothing that is for the other.

    not_of_engines: options of the command that an engine cannot have, and why.
    """
    if (options.model is None) == (options.engine_dir is None):
        what = "Neither --model nor --engine-dir is given" if options.model is None else "Both are given"
        raise ConfigError(f"{what}: name what is to be run, a --model or an engine by its --engine-dir.")
    if options.engine_dir is None:
        if given := [name for name in OF_ENGINES if getattr(options, name) is not None]:
            raise ConfigError(
                f"{flag(given[0])} is for an engine: give --engine-dir in place of --model, or leave it out."
            )
        return
    for name, reason in not_of_engines.items():
        if getattr(options, name) != parser.get_default(name):
            raise ConfigError(f"{flag(name)} cannot be given with --engine-dir: {reason}. Leave it out.")
    if options.tokenizer is None:
        raise ConfigError(
            "--tokenizer is not given, and an engine has none: name the Hugging Face directory or id of its model."
        )


def flag(name: str) -> str:
    """An option as it is typed."""
    return "--" + name.replace("_", "-")
