"""`bpkv model-repository`: a folder that Triton Inference Server serves a model from."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import bpkv_trt
from bpkv_trt.documents import check_directory
from bpkv_trt.errors import ConfigError, InputError
from bpkv_trt.serving_settings import ServingSettings

MODEL_NAME = "bpkv"
SETTINGS = Path("1", "model.yaml")  # within the model's folder
COPIED = (Path("config.pbtxt"), Path("1", "model.py"))


def template() -> Path:
    """The folder that is copied: within an installed package, or of the checkout that it runs from."""
    package = Path(bpkv_trt.__file__).parent
    installed = package / "model_repository_template"
    return (installed if installed.is_dir() else package.parent / "runtime" / "model_repository") / MODEL_NAME


def write_repository(output: Path, settings: ServingSettings) -> Path:
    """Write the model's folder into `output`, made where it is missing; returns it.

    One of ours that is there is replaced; anything else raises InputError, with nothing changed.
    """
    folder = output / MODEL_NAME
    check_output(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bpkv-", dir=output) as scratch:  # hidden: a server may be looking
            made = Path(scratch) / MODEL_NAME
            (made / SETTINGS).parent.mkdir(parents=True)
            for file in COPIED:
                shutil.copyfile(template() / file, made / file)
            (made / SETTINGS).write_text(settings.to_yaml(), encoding="utf-8")
            _exchange(made, folder, Path(scratch) / "replaced")
    except OSError as error:
        raise InputError(
            f"The model repository {output} cannot be written ({error.strerror}); check path, space and permissions."
        ) from None
    return folder


def _exchange(made: Path, folder: Path, replaced: Path) -> None:
    if folder.exists():
        os.replace(folder, replaced)
    try:
        os.replace(made, folder)
    except OSError:
        if replaced.exists():
            os.replace(replaced, folder)
        raise


def check_output(output: Path) -> None:
    """Raise InputError where a repository must not be written, or no server could be started on it."""
    folder = output / MODEL_NAME
    if not re.fullmatch("[A-Za-z0-9_./+=,@:%-]+", str(output.resolve())):  # as in launch.sh
        raise InputError(
            f"The output is {output.resolve()}, and Triton starts no model from a path with blanks, quotes or letters "
            "beyond ASCII; give another --output."
        )
    check_directory(next(place for place in (output, *output.absolute().parents) if os.path.lexists(place)))
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{folder} is there and is no folder of bpkv, so it is left as it is; move it away.")
    if folder.is_dir():
        _check_ours(folder)


def _check_ours(folder: Path) -> None:
    """Raise InputError unless nothing is lost by replacing a folder."""
    files = {path for path in folder.rglob("*") if not path.is_dir()}
    made = {path for path in files if path.parent == folder / "1" / "__pycache__"}  # by a server's Python
    others = sorted({path.relative_to(folder) for path in files - made} - {*COPIED, SETTINGS})
    try:
        if files:
            ServingSettings.read(folder / SETTINGS)
    except ConfigError:
        raise InputError(
            f"{folder} is there, and its {SETTINGS} is missing, damaged or not of `bpkv model-repository`, so it is "
            "left as it is; give another --output, or move that folder away."
        ) from None
    if others:
        raise InputError(
            f"{folder / others[0]} is there and was not written by `bpkv model-repository`, so nothing is replaced; "
            "move it away, or give another --output."
        )
