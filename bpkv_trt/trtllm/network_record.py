"""What only the network knows of its model, kept in the engine's configuration for the session that runs it."""

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import InputError

KEY = "bpkv_network"  # in `pretrained_config`


@dataclass(frozen=True)
class NetworkRecord:
    """Of one rank: heads are its own."""

    traits: ModelTraits
    cache_scales: tuple[float, ...] | None = None  # by layer, what a number of a quantised pool is multiplied by

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        written: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return written

    @classmethod
    def from_pretrained(cls, pretrained: dict[str, Any], where: str) -> "NetworkRecord":
        """Read it from an engine's `pretrained_config`. InputError, which names the place, where it is not there."""
        try:
            return _ADAPTER.validate_python(pretrained.get(KEY))
        except ValidationError:
            raise InputError(
                f"The configuration of the engine in {where} does not tell what a session needs of its network "
                f"({KEY}): build the engine again with `bpkv-trtllm-build --plugin bpkv` of this version."
            ) from None


_ADAPTER = TypeAdapter(NetworkRecord)
