"""The command `bpkv`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from bpkv_trt import __version__
from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.budget import parse_bytes
from bpkv_trt.doctor import examine, print_findings
from bpkv_trt.documents import SCHEMA_VERSION, check_destination, document, library_versions, write_json
from bpkv_trt.errors import BpkvError, ConfigError
from bpkv_trt.layer_table import LayerTable
from bpkv_trt.progress import progress_on
from bpkv_trt.request import GenerateRequest, read_prompt
from bpkv_trt.summary import print_generate

# Options of BpkvConfig: validated there, so that a command line and a YAML file are refused in the same words.
_CONFIG_OPTIONS = {
    "budget": "what may stay of the prompt's cache: 0.2, 20%%, 512t (tokens per head) or 64MiB (default 0.2)",
    "generation_budget": "what may stay of the answer's cache, in tokens per head (default 512t)",
    "policy": "how entries are scored (default bpkv)",
    "regime": "when: prefill, deferred, generation, or several, comma-separated (default prefill,generation)",
    "scope": "where entries compete: head, layer or global (default global)",
    "readout": "how a shift reaches the logits: direct or exact (default direct)",
    "sinks": "first tokens that are never evicted (default 4)",
    "recent": "last tokens that are never evicted (default 32)",
    "positions": "last positions whose next-token distribution is preserved (default 8)",
    "top_k": "logits that the distribution is followed on (default 32)",
    "probes": "random probes of the exact readout (default 8)",
    "epsilon": "least share of its attention that an eviction leaves a head (default 0.02)",
    "refine": "evictions chosen one at a time at the boundary (default 64)",
    "interval": "tokens between compactions of the answer (default 128)",
    "defer": "tokens decoded before a deferred compaction (default 8)",
    "layer_table": "weights of the layers, JSON or safetensors (default: uniform)",
    "page_size": "rows in a page of the pool (default 32)",
    "seed": "seed of sampling and of random policies and probes (default 0)",
}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # a new option must not change what an old script means

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the options.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="bpkv", description="Behavior-preserving KV-cache compression.")
    parser.add_argument("--version", action="version", version=f"bpkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands.add_parser("generate", help="run a long prompt, compact its cache, generate"))
    doctor = commands.add_parser("doctor", help="what of this machine can be used, and what to do about the rest")
    doctor.add_argument("--json", type=Path, metavar="OUT", help="also write the findings there")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("what to run")
    run.add_argument("--model", required=True, help="Hugging Face directory or id, GGUF file, or smollm2")
    run.add_argument("--prompt-file", required=True, type=Path, metavar="F", help="UTF-8 text")
    run.add_argument("--question", metavar="Q", help="put after the prompt, before compaction")
    run.add_argument("--question-after", metavar="Q", help="asked of the compacted cache")
    run.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    run.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    run.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    run.add_argument("--top-p", type=float, default=1.0, metavar="X")
    run.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--allow-extrapolation", action="store_true", help="run past the positions the model knows")
    run.add_argument("--memory-limit", metavar="SIZE", help="refuse what needs more, such as 4GiB")
    run.add_argument("--verify", action="store_true", help="also run the full cache and report future KL and agreement")
    run.add_argument("--json", type=Path, metavar="OUT", help="write the whole report there")
    keep = parser.add_argument_group("what to keep")
    keep.add_argument("--config", type=Path, metavar="YAML", help="a file with these options; those given here win")
    for name, text in _CONFIG_OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        keep.add_argument(flag, dest=name, help=text, metavar="X", default=argparse.SUPPRESS)
    parser.set_defaults(run=_generate)


def _config(options: argparse.Namespace) -> BpkvConfig:
    given = {name: value for name, value in vars(options).items() if name in _CONFIG_OPTIONS}
    config = BpkvConfig(**given) if options.config is None else BpkvConfig.from_yaml(options.config, **given)
    if config.layer_table is not None:
        LayerTable.load(config.layer_table)  # refused now, not after the model has been loaded
    return config


def _generate(options: argparse.Namespace) -> None:
    if options.json is not None:
        check_destination(options.json)
    request = GenerateRequest(
        model=options.model,
        prompt=read_prompt(options.prompt_file),
        config=_config(options),
        question=options.question,
        question_after=options.question_after,
        raw=options.raw,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        dtype=options.dtype,
        device=options.device,
        allow_extrapolation=options.allow_extrapolation,
        memory_limit=options.memory_limit and parse_bytes(options.memory_limit, "--memory-limit"),
        verify=options.verify,
    )
    try:
        # torch and transformers are loaded here, not before
        from bpkv_trt.generate import run_generate
        from bpkv_trt.policies.registry import policy_class
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "bpkv_trt":
            raise
        raise BpkvError(
            f"bpkv generate needs the Python package {error.name}, which is not installed; install what it needs with "
            "pip install 'bpkv-trt[hf]'. `bpkv doctor` shows what else is missing."
        ) from None
    policy_class(request.config.policy)  # an unknown one is refused before the model is loaded
    with progress_on(Console(stderr=True)) as progress:
        report: dict[str, Any] = run_generate(request, progress)
    if options.json is not None:
        write_json(options.json, document(request.config, report))
    print_generate(report, Console())


def _doctor(options: argparse.Namespace) -> None:
    if options.json is not None:
        check_destination(options.json)
    findings = examine()
    if options.json is not None:
        found = [vars(finding) for finding in findings]
        write_json(options.json, {"schema_version": SCHEMA_VERSION, "versions": library_versions(), "findings": found})
    print_findings(findings, Console())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for what the user can mend, 130 when interrupted."""
    try:
        options = _parser().parse_args(arguments)
        options.run(options)
        sys.stdout.flush()
    except BpkvError as error:
        print("bpkv: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bpkv: interrupted; nothing was written.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `bpkv doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
