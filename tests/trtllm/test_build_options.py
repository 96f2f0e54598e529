"""What `bpkv-trtllm-build` refuses: exit 2, one paragraph, before anything is built or written."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError
from bpkv_trt.trtllm import build
from bpkv_trt.trtllm.build import main
from bpkv_trt.trtllm.conflicts import CONFLICTS, refuse_conflicts
from bpkv_trt.trtllm.plugin_library import VARIABLE as LIBRARY_VARIABLE
from bpkv_trt.trtllm.plugin_library import PluginLibrary
from bpkv_trt.trtllm.settings import VARIABLE, EngineSettings, for_engine
from tests.trtllm.build_place import TENSORRT, save_checkpoint, save_library
from tests.trtllm.contract.entries import read
from tests.trtllm.contract.fakes import Fakes
from tests.trtllm.stock_build import stock_fakes

PLUGIN = ["--plugin", "bpkv"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("BPKV_PLUGIN_PATH", "BPKV_BUILD_CONFIG", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """TensorRT-LLM 1.2.1 and a TensorRT whose registry takes any plugin."""
    tensorrt = ModuleType("tensorrt")
    exec(TENSORRT, vars(tensorrt))
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    with stock_fakes().installed("bpkv_trt.trtllm.models") as installed:
        yield installed


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The paragraph that a command line is refused with; nothing was made where it ran."""
    before = sorted(Path.cwd().rglob("*"))
    assert main([str(argument) for argument in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("bpkv-trtllm-build: ") and output.err.count("\n") == 1
    assert "Traceback" not in output.err
    assert sorted(Path.cwd().rglob("*")) == before
    return output.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plugin", "bpkw"], ["--plugin is 'bpkw'", "choose from bpkv"]),
        ([*PLUGIN, "--plugin", "other"], ["--plugin is 'other'"]),
        (["--plugin"], ["--plugin", "expected one argument", "bpkv-trtllm-build --help"]),
        (["--bpkv_budget", "0.2"], ["--bpkv_budget is given without --plugin bpkv", "add that"]),
        (["--bpkv-budget=0.2"], ["--bpkv-budget is given without --plugin bpkv"]),
        (["--plugin-lib", "x.so"], ["--plugin-lib is given without --plugin bpkv"]),
        (["--bpkv_bugdet", "0.2"], ["--bpkv_bugdet is given without --plugin bpkv"]),
        ([*PLUGIN, "--bpkv_bugdet=0.2"], ["--bpkv_bugdet is not an option", "bpkv-trtllm-build --help"]),
        ([*PLUGIN, "--bpkv_page_size", "64"], ["--bpkv_page_size is not an option"]),
        ([*PLUGIN, "--bpkv_budget", "2"], ["budget is '2'", "did you mean 2t"]),
        ([*PLUGIN, "--bpkv_regime", "always"], ["regime is 'always'", "prefill, deferred, generation"]),
        ([*PLUGIN, "--bpkv_scope", "global"], ["scope is global, which an engine cannot have", "give head"]),
        ([*PLUGIN, "--bpkv_readout", "exact"], ["readout is exact", "cannot be differentiated"]),
        ([*PLUGIN, "--bpkv_lookahead", "8"], ["lookahead is 8", "give 0"]),
        ([*PLUGIN, "--bpkv-layer-table", "t.json"], ["The layer table t.json does not exist"]),
        ([*PLUGIN, "--bpkv_config", "c.yaml"], ["The configuration c.yaml does not exist"]),
        ([*PLUGIN, "--plugin-lib", ""], ["--plugin-lib", "it is empty"]),
    ],
    ids=" ".join,
)
def test_options_of_ours(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    """Refused before TensorRT-LLM is looked for, which is not there."""
    message = refusal(capsys, *arguments)
    assert all(word in message for word in words), message


def test_a_configuration_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text("scope: layer\n")
    assert "scope is layer, which an engine cannot have" in refusal(capsys, *PLUGIN, "--bpkv_config", "c.yaml")
    Path("c.yaml").write_text("page_size: 64\n")
    assert "has page_size, which this command takes" in refusal(capsys, *PLUGIN, "--bpkv_config", "c.yaml")


def test_without_tensorrt_llm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    for arguments in ([], PLUGIN, ["--checkpoint_dir", "x"]):
        message = refusal(capsys, *arguments)
        assert "TensorRT-LLM is not installed" in message and "pip install 'bpkv-trt[trtllm]'" in message
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--bpkv_budget" in shown and "options of trtllm-build cannot be shown. TensorRT-LLM is not ins" in shown


def test_a_tensorrt_llm_that_does_not_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "packages" / "tensorrt_llm").mkdir(parents=True)
    package = tmp_path / "packages" / "tensorrt_llm" / "__init__.py"
    package.write_text("raise ImportError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    message = refusal(capsys, *PLUGIN)
    assert "cannot be imported (libcuda.so.1: cannot open" in message and "`bpkv doctor`" in message


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.21.0", "is 0.21.0, which is too old"),
        ("1.3.0rc20", "is 1.3.0rc20: engines were removed from TensorRT-LLM in 1.3. Install an earlier one"),
        ("2.0", "is 2.0: engines were removed"),
        ("main", "is main, which is too old"),
    ],
)
def test_other_versions(fakes: Fakes, capsys: pytest.CaptureFixture[str], version: str, words: str) -> None:
    fakes.modules["tensorrt_llm"].members["__version__"] = version
    message = refusal(capsys, *PLUGIN, "--checkpoint_dir", "x")
    assert words in message and "tensorrt-llm>=1.0,<1.3" in message


def test_a_version_without_the_command(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    """1.3 and later; with and without the plugin."""
    fakes.modules["tensorrt_llm"].members["__version__"] = "1.3.0"
    sys.modules["tensorrt_llm.commands.build"] = None  # type: ignore[assignment]
    for arguments in ([], PLUGIN):
        message = refusal(capsys, *arguments)
        assert "TensorRT-LLM 1.3.0 has no trtllm-build: engines were removed" in message
        assert "PyTorch backend, whose KV-cache compression framework" in message


REFUSED = {
    "model_cls_file": "x.py",
    "model_cls_name": "X",
    "max_beam_width": "2",
    "speculative_decoding_mode": "medusa",
    "max_draft_len": "3",
    "multiple_profiles": "enable",
    "streamingllm": "enable",
    "kv_cache_type": "continuous",
    "paged_kv_cache": "disable",
    "remove_input_padding": "disable",
    "gpt_attention_plugin": "disable",
    "reduce_fusion": "enable",
    "user_buffer": "enable",
    "norm_quant_fusion": "enable",
    "fuse_fp4_quant": "enable",
    "lora_plugin": "auto",
    "lora_dir": "adapters",
    "strip_plan": "",
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_of_the_stock_command(fakes: Fakes, capsys: pytest.CaptureFixture[str], option: str) -> None:
    value = REFUSED[option]
    message = refusal(capsys, *PLUGIN, "--checkpoint_dir", "x", f"--{option}", *filter(None, [value]))
    assert f"--{option} is {value.lower() or 'true'}, which cannot be combined with --plugin bpkv: " in message
    assert CONFLICTS[option][1] in message and "build without the plugin" in message


def test_conflicts_are_known_by_the_values_of_a_plugin_config_too() -> None:
    """Where a network is built, switches are what TensorRT-LLM makes of the command line: True, False, None, a type."""
    defaults = {"remove_input_padding": True, "gpt_attention_plugin": "float16", "paged_kv_cache": None}
    defaults |= dict.fromkeys(("multiple_profiles", "streamingllm", "reduce_fusion", "user_buffer"), False)
    defaults |= {"norm_quant_fusion": False, "fuse_fp4_quant": False, "lora_plugin": None}
    refuse_conflicts(defaults)
    for name, value in (
        *dict.fromkeys(
            defaults.keys() - {"remove_input_padding", "gpt_attention_plugin", "paged_kv_cache"}, True
        ).items(),
        ("remove_input_padding", False),
        ("paged_kv_cache", False),
        ("gpt_attention_plugin", None),
    ):
        with pytest.raises(ConfigError, match=f"--{name} is {str(value).lower()}, which cannot be combined"):
            refuse_conflicts(defaults | {name: value})


def test_every_conflict_is_of_an_option_that_there_is() -> None:
    options = {option.removeprefix("--") for option in read()[1]}
    assert REFUSED.keys() == CONFLICTS.keys() & options == CONFLICTS.keys() - {"use_strip_plan"}


def test_what_stands_in_a_build_configuration(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    path, command = Path("build.json"), [*PLUGIN, "--checkpoint_dir", "x", "--build_config", "build.json"]
    assert "The build configuration build.json does not exist" in refusal(capsys, *command)
    for content, words in (
        ("[", "build.json is no JSON object"),
        ('{"max_beam_width": 4}', "max_beam_width is 4 in build.json, which cannot be combined"),
        ('{"kv_cache_type": "CONTINUOUS"}', "kv_cache_type is continuous in build.json"),
        ('{"speculative_decoding_mode": "MEDUSA"}', "speculative_decoding_mode is medusa in build.json"),
        ('{"use_strip_plan": true}', "use_strip_plan is true in build.json"),
    ):
        path.write_text(content)
        assert words in refusal(capsys, *command)
    path.write_text('{"max_beam_width": 1, "kv_cache_type": "KVCacheType.PAGED", "speculative_decoding_mode": 1}')
    assert "x/config.json does not exist; check the path given to --checkpoint_dir" in refusal(capsys, *command)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architecture": "GPTJForCausalLM"}, "is of GPTJForCausalLM, whose networks are not covered"),
        ({"mapping": {"world_size": 2, "pp_size": 2}}, "has pp_size 2"),
        ({"mapping": {"world_size": 2, "cp_size": 2}}, "has cp_size 2"),
        ({"quantization": {"quant_algo": "FP8"}}, "weights are quantised (FP8), which is not covered"),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "KV cache is NVFP4, and only FP8, INT8"),
        ({"sliding_window": 16, "max_position_embeddings": 64}, "attends to a sliding window of 16 tokens"),
        ({"mup_width_multiplier": 0.5}, "sets mup_width_multiplier, which no covered architecture has"),
        ({"dtype": "float8"}, "config.json is not one of TensorRT-LLM (dtype: "),
        ({"num_attention_heads": None}, "(num_attention_heads: "),
    ],
    ids=str,
)
def test_checkpoints(fakes: Fakes, capsys: pytest.CaptureFixture[str], changed: dict[str, object], words: str) -> None:
    save_checkpoint(Path("checkpoint"), **changed)
    assert words in refusal(capsys, *PLUGIN, "--checkpoint_dir", "checkpoint")


def test_no_checkpoint(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No checkpoint is given; name its folder with --checkpoint_dir" in refusal(capsys, *PLUGIN)
    message = refusal(capsys, *PLUGIN, "--model_config", "model.json")
    assert "model.json does not exist; check the path given to --model_config" in message
    Path("config.json").write_text("{")
    assert "config.json is not one of TensorRT-LLM (it is no JSON)" in refusal(capsys, *PLUGIN, "--checkpoint_dir", ".")


def test_an_output_that_cannot_be(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(Path("checkpoint"))
    Path("file").touch()
    command = [*PLUGIN, "--checkpoint_dir", "checkpoint", "--output_dir"]
    assert "The directory file is a file; give the name of a directory" in refusal(capsys, *command, "file")
    assert "file is a file" in refusal(capsys, *command, "file/engine")


def test_options_that_change_nothing(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(Path("checkpoint"))
    command = [*PLUGIN, "--checkpoint_dir", "checkpoint", "--bpkv_regime", "prefill"]
    assert "interval is 64, which changes nothing here" in refusal(capsys, *command, "--bpkv_interval", "64")


def test_the_library_and_its_targets(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(Path("checkpoint"))
    command = [*PLUGIN, "--checkpoint_dir", "checkpoint"]
    assert "absent.so given by --plugin-lib does not exist" in refusal(capsys, *command, "--plugin-lib", "absent.so")
    broken = save_library(Path("broken"), compiled=False)
    assert "does not load" in refusal(capsys, *command, "--plugin-lib", broken)
    monkeypatch.setenv("STAND_IN_REGISTRY", "/dev/null")
    library = save_library(Path("library").absolute())
    message = refusal(capsys, *command, "--plugin-lib", library)
    assert "TRITON_INTERPRET is set" in message, "as in all of these tests"
    monkeypatch.setattr("bpkv_trt.kernels.compiler.check_compiler", lambda: None)
    for targets, words in (
        ("70", "targets has 70, which nothing is compiled for"),
        ("120a", "knows no target 120a; it knows 80, 90a"),
        (",", "targets is ',', which names none"),
    ):
        assert words in refusal(capsys, *command, "--plugin-lib", library, "--bpkv_targets", targets)
    save_checkpoint(Path("checkpoint"), head_size=8)
    assert "head_dim is 8; give a multiple of" in refusal(capsys, *command, "--plugin-lib", library)
    save_checkpoint(Path("checkpoint"), ranks=3)
    assert "4 attention heads are not a multiple of 3 ranks" in refusal(capsys, *command, "--plugin-lib", library)


def test_several_processes(fakes: Fakes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    message = refusal(capsys, *PLUGIN, "--checkpoint_dir", "x")
    assert "under MPI" in message and "--workers N" in message


def test_help_shows_both(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        assert main([*PLUGIN, flag, "--checkpoint_dir", "x"]) == 0
        shown = capsys.readouterr().out
        assert "--plugin NAME" in shown and "--bpkv_generation_budget" in shown and "head alone: the pools" in shown
        assert "usage: trtllm-build" in shown and "--gather_context_logits" in shown


def test_a_mistake_found_by_the_model_class_is_a_paragraph_too(
    fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    """And an exit code of the stock command is its own."""

    def main_of_stock() -> None:
        raise build.ModelError("The layers are of another kind; convert the model again.")

    fakes.implement({"tensorrt_llm.commands.build.main": main_of_stock})
    assert "layers are of another kind" in refusal(capsys, "--checkpoint_dir", "x")

    def exits() -> None:
        return 7  # type: ignore[return-value]

    fakes.implement({"tensorrt_llm.commands.build.main": exits})
    before = sys.argv
    with pytest.raises(SystemExit) as ended:
        main(["--checkpoint_dir", "x"])
    assert ended.value.code == 7 and sys.argv is before


@pytest.mark.parametrize("before", [None, "earlier"])
def test_the_environment_is_as_it_was_after_a_build(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    if before is not None:
        monkeypatch.setenv(LIBRARY_VARIABLE, before)
    settings = EngineSettings(
        config=for_engine(BpkvConfig()), targets=("80",), plugin_abi=1, plugin_sha256="0" * 64, kernels=1
    )
    library = PluginLibrary.find(save_library(Path("library"), compiled=False))
    with pytest.raises(KeyboardInterrupt), build._announced(settings, library, "X") as options:
        assert EngineSettings.of_this_build() == settings
        assert os.environ[LIBRARY_VARIABLE] == str(library.path.resolve())
        assert Path(options[1]).read_text().startswith("from bpkv_trt.trtllm.models import X ")
        raise KeyboardInterrupt
    assert VARIABLE not in os.environ and os.environ.get(LIBRARY_VARIABLE) == before
    assert not Path(options[1]).parent.exists()


def test_a_preset_settles_what_was_not_given() -> None:
    def settled(*arguments: str) -> BpkvConfig:
        return build._settled(build._configuration(build._parser().parse_args([*PLUGIN, *arguments])))

    paper = settled("--bpkv_preset", "paper", "--bpkv-top-k=16")
    assert (paper.positions, paper.top_k, paper.safeguard, paper.scope) == (32, 16, 0.0, "head")
    assert settled().positions == BpkvConfig().positions and settled().safeguard == BpkvConfig().safeguard
