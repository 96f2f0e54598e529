"""Weights that share a budget out over layers, read from a file."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file

from bpkv_trt.errors import ConfigError

_FORMAT = (
    'give JSON such as {"weights": [1.0, 0.5, ...]}, or a .safetensors file with one tensor `weights`: '
    "one positive number for every layer of the model"
)


@dataclass(frozen=True)
class LayerTable:
    """One positive weight per layer of the model; only their ratios matter, and those of layers outside the budget
    (sliding windows) are ignored. In scopes `head` and `layer` a layer keeps rows in proportion to its weight, in
    `global` its scores are multiplied by it.
    """

    weights: tuple[float, ...]

    @classmethod
    def load(cls, path: Path) -> "LayerTable":
        """Read a `.safetensors` file (1-d tensor `weights`) or JSON (`{"weights": [...]}`); raises ConfigError."""
        try:
            if path.suffix == ".safetensors":
                weights = load_file(path)["weights"].tolist()
            else:
                weights = json.loads(path.read_text(encoding="utf-8"))["weights"]
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"The layer table {path} cannot be read ({reason}); check the path.") from None
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"The layer table {path} cannot be understood ({error!r}); {_FORMAT}.") from None
        if not isinstance(weights, list) or not weights or not all(map(_is_weight, weights)):
            raise ConfigError(f"The layer table {path} does not hold positive finite weights; {_FORMAT}.")
        return cls(tuple(map(float, weights)))

    def weights_for(self, layers: int) -> tuple[float, ...]:
        """The weights, for a model of so many layers; raises ConfigError where the count differs."""
        if len(self.weights) != layers:
            raise ConfigError(
                f"The layer table has {len(self.weights)} weights and the model {layers} layers; {_FORMAT}."
            )
        return self.weights


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
