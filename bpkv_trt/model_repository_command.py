"""The options of `bpkv model-repository`."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.budget import parse_bytes
from bpkv_trt.documents import check_destination
from bpkv_trt.model_repository import check_output, write_repository
from bpkv_trt.models.catalogue import CATALOGUE
from bpkv_trt.options import add_config_options, config_from, file_path, given_options, importing
from bpkv_trt.serving_settings import ServingSettings
from bpkv_trt.source_options import add_source_options, check_source, flag

LIMITS = {  # of ServingSettings: what the option says, and its type
    "queue_limit": ("requests that may wait; more are refused", int),
    "most_running": ("requests that share a step", int),
    "chunk_tokens": ("tokens of prompts that one step runs beside the running answers", int),
    "most_text_bytes": ("of a request's text and question", int),
    "most_new_tokens": ("that a request may ask for", int),
    "timeout_s": ("seconds that a request may take, waiting included", float),
}
# Options that would change nothing for an engine, and why.
NOT_OF_ENGINES = {
    "dtype": "an engine has the type that it was built with",
    "device": "an engine runs on a GPU",
    "pool_size": "TensorRT-LLM takes the memory of a batch when it begins",
    "chunk_tokens": "an engine runs the prompts of a batch at once",
}


def add_model_repository(parser: argparse.ArgumentParser) -> None:
    """`bpkv model-repository`."""
    what = parser.add_argument_group("what to serve")
    what.add_argument("--output", required=True, type=file_path, metavar="DIR", help="the repository; DIR/bpkv is made")
    add_source_options(what)
    what.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default=ServingSettings.dtype)
    what.add_argument("--device", choices=("auto", "cpu", "cuda"), default=ServingSettings.device)
    trace = "when the server ends, write there when each range ran, in Chrome's format"
    what.add_argument("--trace", type=file_path, metavar="OUT", help=trace)
    limits = parser.add_argument_group("limits")
    limits.add_argument("--pool-size", metavar="SIZE", help="of keys and values, all requests together (default 1GiB)")
    for name, (meaning, kind) in LIMITS.items():
        default = getattr(ServingSettings, name)
        limits.add_argument(flag(name), type=kind, default=default, metavar="N", help=f"{meaning} (default {default})")
    add_config_options(parser.add_argument_group("what to keep, where a request says nothing else"))
    parser.set_defaults(run=lambda options: _model_repository(options, parser))


def _model_repository(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    check_source(options, parser, NOT_OF_ENGINES)
    check_output(options.output)
    limits = {name: getattr(options, name) for name in LIMITS}
    settings = (_of_model if options.engine_dir is None else _of_engine)(options, limits)
    folder = write_repository(options.output, settings)
    for name in (settings.model, settings.tokenizer):
        if name is not None and name not in CATALOGUE and not Path(name).is_absolute():
            told = f"note: {name} is no file or folder here; the server will ask the Hugging Face hub for it."
            Console().print(told, soft_wrap=True)
    Console().print(f"Wrote {folder}. Start a server on it with runtime/launch.sh {options.output}", soft_wrap=True)


def _of_model(options: argparse.Namespace, limits: dict[str, Any]) -> ServingSettings:
    config = config_from(options)
    if options.pool_size is not None:
        limits["pool_bytes"] = parse_bytes(options.pool_size, "--pool-size")
    given = _rooted(config).model_dump(mode="json", exclude_unset=True)
    place = {"dtype": options.dtype, "device": options.device, "trace": _trace(options, layer_table=config.layer_table)}
    settings = ServingSettings(_placed(options.model), given, **place, **limits)
    with importing("model-repository"):
        from bpkv_trt.models.source import ModelSource
        from bpkv_trt.policies.registry import refuse_idle, settled
    refuse_idle(config.model_fields_set, [settled(config)])
    ModelSource(options.model).find()
    return settings


def _of_engine(options: argparse.Namespace, limits: dict[str, Any]) -> ServingSettings:
    """Without a GPU, or TensorRT-LLM: they are looked for where the server is started."""
    library = options.plugin_lib
    settings = ServingSettings(
        options=given_options(options),
        engine=str(options.engine_dir.expanduser().absolute()),
        tokenizer=_placed(options.tokenizer),
        plugin_lib=None if library is None else str(library.expanduser().absolute()),
        bounded_cache=options.bounded_cache is not None,
        trace=_trace(options, plugin_lib=library),
        **limits,
    )
    with importing("model-repository --engine-dir"):
        from bpkv_trt.models.tokenizers import load_tokenizer
        from bpkv_trt.runtime.engine_runner import configured
        from bpkv_trt.trtllm.plugin_library import PluginLibrary
        from bpkv_trt.trtllm.sidecar import EngineSidecar
    sidecar = EngineSidecar.read(options.engine_dir)
    configured(sidecar.settings, settings.options)
    if library is not None:
        sidecar.check_library(PluginLibrary.find(library))
    load_tokenizer(options.tokenizer)
    return settings


def _trace(options: argparse.Namespace, **others: Path | None) -> str | None:
    """Where the server writes its trace. others: files that are read beside --config, by the option that names them."""
    if options.trace is None:
        return None
    inputs = [(flag(name), path) for name, path in {"config": options.config, **others}.items()]
    check_destination(options.trace, inputs, flag="--trace")
    return str(options.trace.absolute())


def _rooted(config: BpkvConfig) -> BpkvConfig:
    """The configuration as a server reads it, which is started in another directory."""
    table = config.layer_table
    return config if table is None else config.replace(layer_table=table.expanduser().absolute())


def _placed(name: str) -> str:
    """The same for a model, or a tokenizer, that is a file or a folder."""
    path = Path(name).expanduser()
    named = not name.strip() or name in CATALOGUE or not path.exists()
    return name if named else str(path.absolute())
