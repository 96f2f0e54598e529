"""What an engine is built with: how its runtime compacts unless told otherwise, and what of it is compiled in."""

import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import BpkvError, ConfigError, InputError, quoted
from bpkv_trt.input_file import read_file
from bpkv_trt.kernels.target import Capability, choose_target

VARIABLE = "BPKV_BUILD_CONFIG"  # names the file of settings to the processes of one build
SCHEMA_VERSION: Literal[1] = 1
LARGEST = 1 << 20  # bytes

_LENGTHS = "the pools of TensorRT-LLM have one length for all heads and layers of a sequence"
# Options of which an engine can have one value only, and why.
ONLY: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "policy": ("bpkv", "the scores of that policy are what is compiled into an engine"),
        "scope": ("head", f"{_LENGTHS}, so that every head keeps the same number of entries"),
        "layer_table": (None, f"{_LENGTHS}, so that every layer keeps the same number of entries"),
        "readout": ("direct", "an engine cannot be differentiated"),
        "probes": (None, "they are those of the readout exact, and an engine cannot be differentiated"),
        "lookahead": (0, "the runtime of an engine cannot take back tokens that it drafted"),
        "rehearsal": (0, "the runtime of an engine cannot run tokens beside those of the answer"),
    }
)


def for_engine(config: BpkvConfig) -> BpkvConfig:
    """The configuration with what an engine can only have, where the user said nothing of it.

    Raises ConfigError where the user asked for something else.
    """
    own = {name: value for name, (value, _) in ONLY.items() if name not in config.model_fields_set}
    return _possible(config.replace(**own))


def _possible(config: BpkvConfig) -> BpkvConfig:
    for name, (only, reason) in ONLY.items():
        if (value := getattr(config, name)) != only:
            wanted = f"give {only}, or leave it out" if only is not None else "leave it out"
            raise ConfigError(f"{name} is {value}, which an engine cannot have: {reason}. For an engine {wanted}.")
    _check_windows(config)
    return config


def _check_windows(config: BpkvConfig) -> None:
    """Raises ConfigError where a compaction would go by positions from before the one that precedes it.

    An engine scores a position in the run of its token: what has been evicted since, it still attended to.
    """
    if "generation" not in config.regime:
        return
    defer = config.defer if "deferred" in config.regime else 0
    fitting = next(each for each in count(config.interval) if each - defer % each >= config.positions)
    if fitting != config.interval:
        also = f" and defer is {defer}" if defer else ""
        raise ConfigError(
            f"interval is {config.interval}{also}, and an answer's compaction goes by the last {config.positions} "
            "positions, some of them from before the compaction that precedes it. An engine scores positions as they "
            f"pass: give interval {fitting}, or fewer positions."
        )


class EngineSettings(BaseModel):
    """One engine's. They travel as JSON: to the processes that build it, and with it to those that run it.

    Of the configuration, `positions` (scoring rows of a sequence in a step, at most), `top_k` and `page_size`
    (TensorRT-LLM's tokens per block) are compiled into the engine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    config: BpkvConfig
    targets: tuple[str, ...] = Field(min_length=1)  # keys of kernels.aot.TARGETS
    plugin_abi: int
    plugin_sha256: str = Field(pattern="^[0-9a-f]{64}$")  # of the plugin's library
    kernels: int  # ScoreKernels.checksum, by which the plugin's layers name what they launch

    @field_validator("config")
    @classmethod
    def _of_an_engine(cls, config: BpkvConfig) -> BpkvConfig:
        return _possible(config)

    def document(self) -> dict[str, Any]:
        """As JSON has it: what goes into the engine's `pretrained_config.bpkv`."""
        return self.model_dump(mode="json")

    @classmethod
    def from_document(cls, document: object, where: str) -> "EngineSettings":
        """Read `document` back; raises InputError, which names the place, for what this version did not write."""
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise InputError(
                f"The BP-KV settings in {where} are of version {quoted(version)}, and this version of bpkv reads "
                f"{SCHEMA_VERSION}: build the engine again, or install the bpkv that built it."
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except ConfigError as error:
            problem = str(error)
        raise InputError(f"The BP-KV settings in {where} are damaged ({problem}); build the engine again.")

    @classmethod
    def of_this_build(cls) -> "EngineSettings":
        """Those of the build that this process belongs to, in the file that $BPKV_BUILD_CONFIG names.

        Raises BpkvError where no build of `bpkv-trtllm-build` is going on.
        """
        path = os.environ.get(VARIABLE)
        if not path:
            raise BpkvError(
                f"{VARIABLE} is not set: networks with BP-KV in them are built by `bpkv-trtllm-build --plugin bpkv`."
            )
        content = read_file(Path(path), LARGEST, "settings of the build", VARIABLE)
        try:
            return cls.from_document(json.loads(content), path)
        except (ValueError, RecursionError):
            raise InputError(f"The BP-KV settings in {path} are no JSON; start the build again.") from None

    def configured(self, **options: Any) -> BpkvConfig:
        """What a runtime of the engine compacts with: the engine's own configuration with some options changed.

        Raises ConfigError as `checked`.
        """
        return self.checked(self.config.replace(**options))

    def checked(self, config: BpkvConfig) -> BpkvConfig:
        """The same configuration. Raises ConfigError for what an engine cannot have, and for more than was compiled
        into this one."""
        config = _possible(config)
        for name in ("preset", "top_k", "page_size"):
            if (value := getattr(config, name)) != (built := getattr(self.config, name)):
                raise ConfigError(
                    f"{name} is {value}, and the engine was built for {built}: leave it out, or build another engine."
                )
        if config.positions > self.config.positions:
            raise ConfigError(
                f"positions is {config.positions}, and the engine was built for at most {self.config.positions}: give "
                "no more, or build another engine."
            )
        if config.scoring_positions > (most := self.config.scoring_positions):
            raise ConfigError(
                f"regime is {(regime := ','.join(config.regime))}, in which a compaction goes by positions + defer, "
                f"{config.positions} + {config.defer}, and the engine has kernels for at most {most} together: give "
                f"fewer positions or a smaller defer, or build an engine with --bpkv_regime {regime} --bpkv_defer "
                f"{config.defer}."
            )
        return config

    def check_gpu(self, capability: Capability) -> None:
        """Raises ConfigError where the engine carries no kernels that a GPU of this compute capability runs."""
        if choose_target(self.targets, capability) is None:
            major, minor = capability
            raise ConfigError(
                f"The engine has scoring kernels for {', '.join(self.targets)}, and the GPU, of compute capability "
                f"{major}.{minor}, runs none of them: use another GPU, or build the engine with --bpkv_targets for it."
            )
