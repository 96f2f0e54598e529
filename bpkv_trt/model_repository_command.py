"""The options of `bpkv model-repository`."""

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.budget import parse_bytes
from bpkv_trt.documents import check_destination
from bpkv_trt.errors import ConfigError
from bpkv_trt.model_repository import check_output, write_repository
from bpkv_trt.models.catalogue import CATALOGUE
from bpkv_trt.options import MODEL_HELP, add_config_options, config_from, file_path, importing
from bpkv_trt.serving_settings import ServingSettings

LIMITS = {  # of ServingSettings: what the option says, and its type
    "queue_limit": ("requests that may wait for pages; more are refused", int),
    "most_running": ("requests that share a step", int),
    "chunk_tokens": ("tokens of prompts that one step runs beside the running answers", int),
    "most_text_bytes": ("of a request's text and question", int),
    "most_new_tokens": ("that a request may ask for", int),
    "timeout_s": ("seconds that a request may take, waiting included", float),
}


def add_model_repository(parser: argparse.ArgumentParser) -> None:
    """`bpkv model-repository`."""
    what = parser.add_argument_group("what to serve")
    what.add_argument("--output", required=True, type=file_path, metavar="DIR", help="the repository; DIR/bpkv is made")
    what.add_argument("--model", help=MODEL_HELP)
    what.add_argument("--engine-dir", type=file_path, metavar="E", help="refused: engines are not served yet")
    what.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default=ServingSettings.dtype)
    what.add_argument("--device", choices=("auto", "cpu", "cuda"), default=ServingSettings.device)
    trace = "when the server ends, write there when each range ran, in Chrome's format"
    what.add_argument("--trace", type=file_path, metavar="OUT", help=trace)
    limits = parser.add_argument_group("limits")
    limits.add_argument("--pool-size", metavar="SIZE", help="of keys and values, all requests together (default 1GiB)")
    for name, (meaning, kind) in LIMITS.items():
        default = getattr(ServingSettings, name)
        flag = "--" + name.replace("_", "-")
        limits.add_argument(flag, type=kind, default=default, metavar="N", help=f"{meaning} (default {default})")
    add_config_options(parser.add_argument_group("what to keep, where a request says nothing else"))
    parser.set_defaults(run=_model_repository)


def _model_repository(options: argparse.Namespace) -> None:
    if options.engine_dir is not None:
        raise ConfigError(
            f"--engine-dir is {options.engine_dir}, but engines are not served through Triton yet; give --model, or "
            "run the engine by itself."
        )
    if options.model is None:
        raise ConfigError("--model is missing; `bpkv model-repository --help` lists the options.")
    config = config_from(options)
    check_output(options.output)
    if options.trace is not None:
        inputs = ("--config", options.config), ("--layer-table", config.layer_table)
        check_destination(options.trace, inputs, flag="--trace")
    limits = {name: getattr(options, name) for name in LIMITS}
    if options.pool_size is not None:
        limits["pool_bytes"] = parse_bytes(options.pool_size, "--pool-size")
    place = {"dtype": options.dtype, "device": options.device, "trace": options.trace and str(options.trace.absolute())}
    settings = ServingSettings(options.model, _rooted(config), **place, **limits)
    with importing("model-repository"):
        from bpkv_trt.models.source import ModelSource
        from bpkv_trt.policies.registry import refuse_idle, settled
    refuse_idle(config.model_fields_set, [settled(config)])
    ModelSource(options.model).find()
    folder = write_repository(options.output, _placed(settings))
    Console().print(f"Wrote {folder}. Start a server on it with runtime/launch.sh {options.output}", soft_wrap=True)


def _rooted(config: BpkvConfig) -> BpkvConfig:
    """The configuration as a server reads it, which is started in another directory."""
    table = config.layer_table
    return config if table is None else config.replace(layer_table=table.expanduser().absolute())


def _placed(settings: ServingSettings) -> ServingSettings:
    """The same for a model that is a file or a folder."""
    path = Path(settings.model).expanduser()
    named = settings.model in CATALOGUE or not path.exists()
    return settings if named else replace(settings, model=str(path.absolute()))
