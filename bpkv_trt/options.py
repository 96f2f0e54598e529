"""Options that commands share: of BpkvConfig, of where a model runs, and what is refused before it is loaded."""

import argparse
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import BpkvError, ConfigError
from bpkv_trt.score_table import ScoreTable

MODEL_HELP = "Hugging Face directory or id, GGUF file, smollm2 or gemma3-270m"


class CommandParser(argparse.ArgumentParser):
    """Refuses in words of ours, and takes no abbreviations: a new option must not change what an old script means."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message:.500}; `{self.prog} --help` lists the options.")


def file_path(text: str) -> Path:
    """The type of options that name a file or directory; `Path("")` would be the current directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty, give a name")
    return Path(text)


def add_placement_options(group: argparse._ArgumentGroup) -> None:
    """`--dtype`, `--device` and `--memory-limit`."""
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument(
        "--memory-limit", metavar="SIZE", help="refuse what needs more than this beside the weights, such as 4GiB"
    )


def add_config_options(
    group: argparse._ArgumentGroup,
    without: Collection[str] = (),
    spelt: Callable[[str], Sequence[str]] = lambda name: ["--" + name.replace("_", "-")],
) -> None:
    """`--config` and one option for every field of BpkvConfig, `spelt` as a command spells them.

    Validated by BpkvConfig, so that a command line and a YAML file are refused in the same words.
    """
    group.add_argument(
        *spelt("config"),
        dest="config",
        type=file_path,
        metavar="YAML",
        help="a file with these options; those given here win",
    )
    for name, field in BpkvConfig.model_fields.items():
        if name not in without:
            group.add_argument(*spelt(name), dest=name, help=_help(field), metavar="X", default=argparse.SUPPRESS)


def _help(field: FieldInfo) -> str:
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    shown = "" if default is None else f" (default {default})"
    return f"{field.description}{shown}".replace("%", "%%")


def config_from(options: argparse.Namespace, without: Collection[str] = ()) -> BpkvConfig:
    """The configuration that was given, YAML file first.

    Fields named in `without` mean something else to the command, so that a file that has them is refused.
    """
    given = _given(options, without)
    config = BpkvConfig(**given) if options.config is None else BpkvConfig.from_yaml(options.config, **given)
    if others := [name for name in without if name in config.model_fields_set]:
        raise ConfigError(
            f"The configuration {options.config} has {', '.join(others)}, which this command takes from options of its "
            "own, or sets: leave it out there."
        )
    if config.layer_table is not None:
        ScoreTable.load(config.layer_table)  # refused now, not after the model has been loaded
    return config


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """What was given of a configuration, YAML file first, yet to be validated beside what it is put in place of."""
    in_file = {} if options.config is None else BpkvConfig.options_in(options.config)
    return in_file | _given(options)


def _given(options: argparse.Namespace, without: Collection[str] = ()) -> dict[str, Any]:
    names = BpkvConfig.model_fields.keys() - set(without)
    return {name: value for name, value in vars(options).items() if name in names}


@contextmanager
def importing(command: str, extra: str = "hf") -> Iterator[None]:
    """Around imports that no command makes before it needs them, such as torch; `extra` of ours brings them."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "bpkv_trt":
            raise
        raise BpkvError(
            f"bpkv {command} needs the Python package {error.name}, which is not installed; install what it needs with "
            f"pip install 'bpkv-trt[{extra}]'. `bpkv doctor` shows what else is missing."
        ) from None
