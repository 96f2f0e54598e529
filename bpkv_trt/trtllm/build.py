"""`bpkv-trtllm-build`: TensorRT-LLM's `trtllm-build`, with `--plugin bpkv`."""

import sys

try:
    import argparse
    import os
    import tempfile
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import contextmanager
    from dataclasses import replace
    from pathlib import Path
    from typing import TYPE_CHECKING, Any

    from bpkv_trt.config import BpkvConfig
    from bpkv_trt.documents import check_directory
    from bpkv_trt.errors import BpkvError, ConfigError, ModelError
    from bpkv_trt.options import CommandParser, add_config_options, config_from, file_path
    from bpkv_trt.trtllm.checkpoint import Checkpoint
    from bpkv_trt.trtllm.conflicts import refuse_conflicts
    from bpkv_trt.trtllm.plugin_library import VARIABLE as LIBRARY_VARIABLE
    from bpkv_trt.trtllm.plugin_library import PluginLibrary
    from bpkv_trt.trtllm.projections import Projections, check_checkpoint
    from bpkv_trt.trtllm.settings import ONLY, VARIABLE, EngineSettings, for_engine
    from bpkv_trt.trtllm.sidecar import FILE, EngineSidecar, withdrawn
    from bpkv_trt.trtllm.stock import NAME, StockBuild

    if TYPE_CHECKING:  # Triton is optional
        from bpkv_trt.trtllm.session_kernels import SessionKernels
except KeyboardInterrupt:  # they take a while where the machine is busy
    print("bpkv-trtllm-build: interrupted.", file=sys.stderr)
    sys.exit(130)

PROGRAM = "bpkv-trtllm-build"
PLUGINS = ("bpkv",)
ELSEWHERE = ("page_size", "seed")  # fields of BpkvConfig: --tokens_per_block, and what each request brings


def _spelt(name: str) -> list[str]:
    return [f"--bpkv_{name}", f"--bpkv-{name.replace('_', '-')}"]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--plugin bpkv [--plugin-lib PATH] [--bpkv_OPTION X ...]] [options of {NAME}]",
        description=f"TensorRT-LLM's {NAME}, which builds an engine whose KV cache is compacted, with --plugin bpkv. "
        f"Without it, the command is {NAME}.",
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    own = parser.add_argument_group("what is added to the engine")
    own.add_argument("--plugin", action="append", metavar="NAME", help=f"compiled in: {', '.join(PLUGINS)}")
    own.add_argument("--plugin-lib", "--plugin_lib", type=file_path, metavar="PATH", help="its library, if not found")
    own.add_argument("-h", "--help", action="store_true", help=f"print this, and the options of {NAME}")
    keep = parser.add_argument_group("with --plugin bpkv: compiled in, or what its runtime compacts with by default")
    keep.add_argument(
        *_spelt("targets"), dest="targets", metavar="X", help="GPUs to compile for, such as 90a (default: all known)"
    )
    add_config_options(keep, without=(*ELSEWHERE, *ONLY), spelt=_spelt)
    for name, (only, reason) in ONLY.items():
        shown = "not for engines" if only is None else f"{only} alone"
        keep.add_argument(*_spelt(name), dest=name, metavar="X", help=f"{shown}: {reason}".replace("%", "%%"))
    return parser


def _build(arguments: Sequence[str]) -> None:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    given = vars(options)
    if "help" in given:
        _print_help(parser)
    elif "plugin" in given:
        _build_with_plugin(options, rest)
    elif given or any(map(_seems_ours, rest)):
        first = next(each for each in arguments if each.startswith("--plugin") or _seems_ours(each))
        raise ConfigError(f"{first.partition('=')[0]} is given without --plugin bpkv, which it belongs to: add that.")
    else:
        StockBuild.find().run(arguments)


def _seems_ours(argument: str) -> bool:
    return argument.startswith(("--bpkv_", "--bpkv-"))


def _print_help(parser: CommandParser) -> None:
    print(parser.format_help())
    try:
        print(StockBuild.find().help())
    except BpkvError as error:
        print(f"The options of {NAME} cannot be shown. {error}")


def _build_with_plugin(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Everything that can be refused is, before the stock command begins."""
    if unknown := [name for name in options.plugin if name not in PLUGINS]:
        raise ConfigError(f"--plugin is {unknown[0]!r}, which is no plugin; choose from {', '.join(PLUGINS)}.")
    if strange := next(filter(_seems_ours, arguments), None):
        raise ConfigError(f"{strange.partition('=')[0]} is not an option; `{PROGRAM} --help` lists them.")
    if any(int(os.environ.get(name) or 1) > 1 for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        raise ConfigError(
            "Several processes run this command under MPI, and each would write to the same folder: start it once, "
            "with --workers N to build ranks side by side."
        )
    config = _configuration(options)

    stock = StockBuild.find()
    stock.package.check_version()
    told = stock.options(arguments)
    refuse_conflicts(told)
    checkpoint = Checkpoint.read(_source(told))
    model_class = _class_for(checkpoint)
    output = Path(told["output_dir"])
    check_directory(next(folder for folder in (output, *output.absolute().parents) if folder.exists()))
    config = _settled(config).replace(page_size=told["tokens_per_block"])
    import tensorrt

    library = PluginLibrary.find(getattr(options, "plugin_lib", None))
    library.register(tensorrt)
    ranks = checkpoint.mapping.tp_size
    weights = _weights(told)
    if weights is not None:
        check_checkpoint(weights, ranks)
    settings, session_kernels = _compiled(options, config, checkpoint, library)
    with withdrawn(output), _announced(settings, library, model_class) as class_options:
        stock.run([*arguments, *class_options])
        if not told.get("dry_run"):
            _save_projections(weights, ranks, output)
            session_kernels.write(output)
            versions = {"tensorrt": tensorrt.__version__, "tensorrt_llm": stock.package.version}
            EngineSidecar.write(output, settings, versions)
            print(f"{PROGRAM}: the engine's settings are in {output / FILE}; keep it beside the engine.")


def _configuration(options: argparse.Namespace) -> BpkvConfig:
    options.config = getattr(options, "config", None)
    return for_engine(config_from(options, without=ELSEWHERE))


def _settled(config: BpkvConfig) -> BpkvConfig:
    """With its preset; an option that changes nothing is refused."""
    from bpkv_trt.policies.registry import refuse_idle, settled  # they need torch

    given = config.model_fields_set - ONLY.keys()
    config = settled(config)
    refuse_idle(given, [config])
    return config


def _source(told: Mapping[str, Any]) -> Path:
    named = told.get("checkpoint_dir") or told.get("model_config")
    if not named:
        raise ConfigError("No checkpoint is given; name its folder with --checkpoint_dir, or a --model_config.")
    return Path(named)


def _weights(told: Mapping[str, Any]) -> Path | None:
    """The checkpoint's folder; None where an engine is built without weights, which no session can compact for."""
    source = _source(told)
    return None if source.suffix == ".json" else source


def _save_projections(weights: Path | None, ranks: int, output: Path) -> None:
    if weights is not None:
        for rank in range(ranks):
            Projections.of_checkpoint(weights, rank).save(output, rank)


def _class_for(checkpoint: Checkpoint) -> str:
    """The name in `bpkv_trt.trtllm.models` of the class that builds this architecture with BP-KV."""
    from bpkv_trt.trtllm.models import CLASSES  # they need TensorRT-LLM

    if checkpoint.architecture not in CLASSES:
        raise ModelError(
            f"The checkpoint is of {checkpoint.architecture}, whose networks are not covered; those of "
            f"{', '.join(CLASSES)} are. Build it without --plugin bpkv."
        )
    return str(CLASSES[checkpoint.architecture])


def _compiled(
    options: argparse.Namespace, config: BpkvConfig, checkpoint: Checkpoint, library: PluginLibrary
) -> "tuple[EngineSettings, SessionKernels]":
    """Settings of an engine whose kernels wait in the cache, for the processes that build its ranks; and those kernels
    that its session runs beside it."""
    from bpkv_trt.kernels.compiler import check_compiler

    check_compiler()
    from bpkv_trt.kernels.aot import parse_targets
    from bpkv_trt.trtllm.score_kernels import compile_score_kernels
    from bpkv_trt.trtllm.session_kernels import compile_session_kernels

    targets = parse_targets(options.targets) if "targets" in options else library.sidecar.targets
    library.check_targets(targets)
    configuration = checkpoint.kernel_configuration(config)
    if sys.stderr.isatty():
        print(f"{PROGRAM}: compiling kernels for {', '.join(targets)}; they are kept.", file=sys.stderr)
    settings = EngineSettings(
        config=config,
        targets=tuple(targets),
        plugin_abi=library.sidecar.abi,
        plugin_sha256=library.sidecar.sha256,
        kernels=compile_score_kernels(configuration, targets).checksum,
    )
    return settings, compile_session_kernels(replace(configuration, positions=config.scoring_positions), targets)


@contextmanager
def _announced(settings: EngineSettings, library: PluginLibrary, model_class: str) -> Iterator[list[str]]:
    """The stock command's options for the class, while the processes of the build can find settings and library.

    The class is named by a file, which only imports it: what that file defined, other processes could not unpickle.
    """
    with tempfile.TemporaryDirectory(prefix="bpkv-build-") as folder:
        shim, file = Path(folder) / "model_class.py", Path(folder) / "settings.json"
        shim.write_text(f"from bpkv_trt.trtllm.models import {model_class}  # noqa: F401\n")
        file.write_text(settings.model_dump_json())
        before = {name: os.environ.get(name) for name in (VARIABLE, LIBRARY_VARIABLE)}
        os.environ |= {VARIABLE: str(file), LIBRARY_VARIABLE: str(library.path.resolve())}
        try:
            yield ["--model_cls_file", str(shim), "--model_cls_name", model_class]
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for what the user can mend, 130 when interrupted; others are the stock command's,
    which ends with SystemExit or with a traceback of its own."""
    try:
        _build(sys.argv[1:] if arguments is None else arguments)
    except BpkvError as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
