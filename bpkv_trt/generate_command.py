"""`bpkv generate`: its options, what is refused before anything is loaded, and where the report goes."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.budget import parse_bytes
from bpkv_trt.documents import check_destination, deliver, document
from bpkv_trt.errors import InputError
from bpkv_trt.options import (
    add_config_options,
    add_placement_options,
    config_from,
    file_path,
    given_options,
    importing,
)
from bpkv_trt.progress import progress_on
from bpkv_trt.request import EngineRequest, GenerateRequest, read_prompt
from bpkv_trt.source_options import add_source_options, check_source, flag
from bpkv_trt.summary import print_generate

# Options that an engine cannot have, and why.
NOT_OF_ENGINES = {
    "question_after": "TensorRT-LLM's session runs a prompt at once, so nothing can be asked of the compacted cache: "
    "use --question",
    "dtype": "an engine has the type that it was built with",
    "device": "an engine runs on a GPU",
    "memory_limit": "TensorRT-LLM allocates the memory of an engine, as it was built for",
    "allow_extrapolation": "an engine has rotations for the positions that its model knows, and no more",
    "verify": "an engine's session holds one cache, so there is no full one to compare with",
}


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    run = parser.add_argument_group("what to run")
    add_source_options(run)
    run.add_argument("--prompt-file", required=True, type=file_path, metavar="F", help="UTF-8 text")
    run.add_argument("--question", metavar="Q", help="put after the prompt, before compaction")
    run.add_argument("--question-after", metavar="Q", help="asked of the compacted cache")
    run.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    run.add_argument("--max-new-tokens", type=int, default=GenerateRequest.max_new_tokens, metavar="N")
    run.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    run.add_argument("--top-p", type=float, default=1.0, metavar="X")
    add_placement_options(run)
    run.add_argument("--allow-extrapolation", action="store_true", help="run past the positions the model knows")
    run.add_argument("--verify", action="store_true", help="also run the full cache and report future KL and agreement")
    run.add_argument("--json", type=file_path, metavar="OUT", help="write the whole report there")
    run.add_argument("--trace", type=file_path, metavar="OUT", help="write when each range ran, in Chrome's format")
    what = "what to keep (of an engine: in place of what it was built with)"
    add_config_options(parser.add_argument_group(what))
    parser.set_defaults(run=lambda options: _generate(options, parser))


def _generate(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    check_source(options, parser, NOT_OF_ENGINES)
    for name in ("question", "question_after"):
        text = getattr(options, name)
        if text is not None and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InputError(f"{flag(name)} is not text in this terminal's encoding; give it as UTF-8.")
        if text is not None and not text.strip():
            raise InputError(f"{flag(name)} is empty; give a question, or leave it out.")
    config, report = (_on_model if options.engine_dir is None else _on_engine)(options)
    deliver(lambda: print_generate(report, Console()), options.json, document(config, report))


def _on_model(options: argparse.Namespace) -> tuple[BpkvConfig, dict[str, Any]]:
    request = GenerateRequest(
        **_asked(options),
        model=options.model,
        config=config_from(options),
        question_after=options.question_after,
        dtype=options.dtype,
        device=options.device,
        allow_extrapolation=options.allow_extrapolation,
        memory_limit=options.memory_limit and parse_bytes(options.memory_limit, "--memory-limit"),
        verify=options.verify,
    )
    _check_destination(options, {"layer_table": request.config.layer_table})
    with importing("generate"):
        from bpkv_trt.generate import run_generate
        from bpkv_trt.policies.registry import refuse_idle, settled
    given_names = request.config.model_fields_set
    request = replace(request, config=settled(request.config))  # what a policy cannot have is refused before the model
    refuse_idle(given_names, [request.config])
    with progress_on(Console(stderr=True)) as progress:
        return request.config, run_generate(request, progress)


def _on_engine(options: argparse.Namespace) -> tuple[BpkvConfig, dict[str, Any]]:
    request = EngineRequest(
        **_asked(options),
        engine=options.engine_dir,
        tokenizer=options.tokenizer,
        plugin_lib=options.plugin_lib,
        bounded=options.bounded_cache is not None,
        options=given_options(options),
    )
    _check_destination(options, {"plugin_lib": options.plugin_lib})
    with importing("generate --engine-dir", "trtllm"):
        from bpkv_trt.generate_on_engine import run_generate_on_engine
    with progress_on(Console(stderr=True)) as progress:
        return run_generate_on_engine(request, progress)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    own = ("question", "raw", "max_new_tokens", "temperature", "top_p", "trace")
    return {"prompt": read_prompt(options.prompt_file)} | {name: getattr(options, name) for name in own}


def _check_destination(options: argparse.Namespace, others: Mapping[str, Any]) -> None:
    """others: files that are read too, by the option that names them."""
    inputs = {"prompt_file": options.prompt_file, "config": options.config, **others}
    for name in ("json", "trace"):
        if (output := getattr(options, name)) is not None:
            check_destination(output, [(flag(of), path) for of, path in inputs.items()], flag=flag(name))
    if options.trace is not None and options.json is not None and options.trace.resolve() == options.json.resolve():
        raise InputError(f"--trace and --json are both {options.json}; give them different names.")
