"""The plugin's library on disk: where it is, whether it is what its sidecar says, and loading it into TensorRT."""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from bpkv_trt.errors import BpkvError, ConfigError, InputError

FILE = "libbpkv_plugin.so"
VARIABLE = "BPKV_PLUGIN_PATH"
ABI = 1  # of the plugin's inputs, fields and bundle of kernels
NAME, VERSION, NAMESPACE = "BpkvScore", "1", "bpkv"  # in TensorRT's registry
BUILD = "build it with `bash build_scripts/build_plugin.sh --output out/plugin`"
PACKAGE = Path(__file__).resolve().parents[1]


class Sidecar(BaseModel):
    """What the build wrote of the library, in a file beside it of the same name that ends in .json."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    schema_version: Literal[1]
    sha256: str
    abi: int
    tensorrt: str  # version of the headers
    targets: list[str]


@dataclass(frozen=True)
class PluginLibrary:
    """A library that is what its sidecar says."""

    path: Path
    sidecar: Sidecar

    @classmethod
    def find(cls, chosen: Path | None = None) -> "PluginLibrary":
        """The library that was chosen, or the first of: $BPKV_PLUGIN_PATH, the package's, a checkout's build folder.

        Raises InputError where there is none, where it or its sidecar was changed or is damaged, and ConfigError where
        it speaks another version's language.
        """
        path = locate(chosen)
        sidecar = _sidecar(path)
        if sidecar.abi != ABI:
            raise ConfigError(
                f"The plugin library {path} has interface {sidecar.abi}, and this version of bpkv speaks {ABI}; "
                f"{BUILD} from this version's sources."
            )
        if _sha256(path) != sidecar.sha256:
            raise InputError(
                f"The plugin library {path} is not the one that its sidecar {sidecar_of(path).name} was written for: "
                f"one of them was changed or is damaged; {BUILD} again."
            )
        return cls(path, sidecar)

    def check_targets(self, targets: Sequence[str]) -> None:
        """Raises ConfigError for kernels that this library would never choose."""
        if unknown := [target for target in targets if target not in self.sidecar.targets]:
            raise ConfigError(
                f"The plugin library {self.path} knows no target {', '.join(unknown)}; it knows "
                f"{', '.join(self.sidecar.targets)}. Choose from these, or {BUILD} from newer sources."
            )

    def check_tensorrt(self, present: str) -> None:
        """Raises ConfigError for a TensorRT of another major version."""
        built = self.sidecar.tensorrt
        if built.partition(".")[0] != present.partition(".")[0]:
            raise ConfigError(
                f"The plugin library {self.path} was built for TensorRT {built}, and {present} is installed: their "
                f"interfaces differ. Set TENSORRT_INCLUDE_DIR to the headers of {present} and {BUILD}."
            )

    def register(self, trt: ModuleType) -> None:
        """Load it for all of the process and register its plugin with TensorRT, once; `trt` is the module tensorrt.

        Raises ConfigError for a TensorRT of another major version, BpkvError where it does not load or is refused.
        """
        present = trt.__version__
        self.check_tensorrt(present)
        try:
            library = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_GLOBAL)
            initialise = library.initBpkvPlugins
        except (OSError, AttributeError) as error:
            raise BpkvError(
                f"The plugin library {self.path} does not load ({error}); {BUILD} on this machine."
            ) from None
        registry = trt.get_plugin_registry()
        if registry.get_creator(NAME, VERSION, NAMESPACE) is not None:
            return
        initialise.argtypes, initialise.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_bool
        if not initialise(None, NAMESPACE.encode()):
            raise BpkvError(
                f"TensorRT {present} does not take the plugin of {self.path}; the line that begins with `bpkv:` says "
                "why."
            )


def locate(chosen: Path | None = None) -> Path:
    """The absolute path of the library, as `PluginLibrary.find` looks for it; InputError where it is nowhere."""
    variable = os.environ.get(VARIABLE)
    if chosen is not None or variable:
        path, by = (chosen, "--plugin-lib") if chosen is not None else (Path(str(variable)), VARIABLE)
        path = path.expanduser()
        if path.is_dir():
            raise InputError(f"The plugin library {path} given by {by} is a folder; name the file {FILE} in it.")
        if not path.is_file():
            raise InputError(f"The plugin library {path} given by {by} does not exist; check the path, or {BUILD}.")
        return path.resolve()  # the sidecar is beside the file itself, and the loader looks elsewhere for a bare name
    for folder in (PACKAGE, PACKAGE.parent / "out" / "plugin"):
        if (folder / FILE).is_file():
            return (folder / FILE).resolve()
    raise InputError(
        f"The plugin library {FILE} is not in the package; {BUILD} and set {VARIABLE} to its path, or give it to "
        "--plugin-lib."
    )


def _sha256(library: Path) -> str:
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(
            f"The plugin library {library} cannot be read ({error.strerror}); check its permissions."
        ) from None


def sidecar_of(library: Path) -> Path:
    return library.with_suffix(".json")


def _sidecar(library: Path) -> Sidecar:
    path = sidecar_of(library)
    try:
        return Sidecar.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"The plugin library {library} has no readable sidecar {path.name} beside it ({error.strerror}), which "
            f"says what it was built for; copy both files, or {BUILD}."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise InputError(
            f"The sidecar {path} of the plugin library is damaged or of another version ({where}: {first['msg']}); "
            f"{BUILD} again."
        ) from None
