"""Weights of layers, or of single KV heads, read from a file: what a policy measured beforehand, or a user decided."""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load

from bpkv_trt.core.budget import Scope
from bpkv_trt.errors import ConfigError, quoted
from bpkv_trt.input_file import read_file

# Scores of bpkv lie around 1e-11; what multiplies them must not bring them near the least number of fp32, 1e-38.
LARGEST_RATIO = 1e9
LARGEST_JSON, LARGEST_TENSORS = 1 << 20, 64 << 20  # bytes
_FORMAT = (
    'give JSON such as {"weights": [1.0, 0.5, ...]}, one positive number for every layer of the model, or '
    '{"weights": [[1.0, 0.5], ...]}, one for every KV head of every layer; or a .safetensors file with one tensor '
    "`weights` of such a shape, in float16, float32 or float64"
)


@dataclass(frozen=True)
class ScoreTable:
    """Positive weights of every layer of a model, or of every KV head of every layer; only their ratios matter, and
    those of layers outside the budget (sliding windows) are ignored.

    In scopes `head` and `layer` a layer keeps rows in proportion to its weight, or the mean of its heads' weights; in
    `layer` heads of unequal weight have their scores multiplied by theirs; in `global` all scores are multiplied.
    """

    weights: tuple[tuple[float, ...], ...]  # [L][1] or [L][Hkv]

    @classmethod
    def load(cls, path: Path) -> "ScoreTable":
        """Read a `.safetensors` file (tensor `weights`, [L] or [L, Hkv]) or JSON (`{"weights": [...]}`).

        Other keys of the JSON are ignored: they say where the weights come from. Raises ConfigError.
        """
        binary = path.suffix == ".safetensors"
        content = read_file(
            path, LARGEST_TENSORS if binary else LARGEST_JSON, "layer table", "--layer-table", ConfigError
        )
        try:
            weights = _rows(_from_safetensors(content) if binary else _from_json(content))
        except _Unusable as problem:
            raise ConfigError(f"The layer table {path} cannot be used: {problem}; {_FORMAT}.") from None
        if weights is None:
            raise ConfigError(f"The layer table {path} does not hold positive finite weights; {_FORMAT}.")
        if len({len(row) for row in weights}) > 1:
            raise ConfigError(f"The layer table {path} has layers of different numbers of heads; {_FORMAT}.")
        least, largest = min(map(min, weights)), max(map(max, weights))
        if largest > LARGEST_RATIO * least:
            raise ConfigError(
                f"The layer table {path} has positive weights from {least:g} to {largest:g}. Scores are multiplied by "
                f"them, and beyond a ratio of {LARGEST_RATIO:g} the least would be lost to rounding: raise those."
            )
        return cls(weights)

    def check(self, layers: int, kv_heads: int, scope: Scope) -> None:
        """Raise ConfigError unless the table fits a model of so many layers and KV heads, and the scope."""
        if len(self.weights) != layers:
            raise ConfigError(
                f"The layer table has {len(self.weights)} weights and the model {layers} layers; {_FORMAT}."
            )
        heads = len(self.weights[0])
        if heads not in (1, kv_heads):
            raise ConfigError(
                f"The layer table has {heads} heads a layer and the model {kv_heads} KV heads; {_FORMAT}."
            )
        if heads > 1 and scope == "head":
            raise ConfigError(
                "The layer table has weights for single heads, but in scope head all heads of a layer keep the same "
                "number: choose --scope layer or global, or give one weight for every layer."
            )

    @property
    def layer_weights(self) -> tuple[float, ...]:
        """[L] means over the heads: how layers share a budget out."""
        return tuple(sum(weight / len(row) for weight in row) for row in self.weights)

    def score_weights(self, scope: Scope) -> tuple[tuple[float, ...], ...] | None:
        """[L][1] or [L][Hkv] of what scores are multiplied by, 1 at most; None where counts say it all."""
        if scope == "head" or (scope == "layer" and len(self.weights[0]) == 1):
            return None
        largest = max(map(max, self.weights))
        return tuple(tuple(weight / largest for weight in row) for row in self.weights)


class _Unusable(Exception):
    """Why a file is no layer table."""


def _from_safetensors(content: bytes) -> Any:
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError):  # the last: types that numpy lacks
        raise _Unusable("it is damaged, or of a type other than those below") from None
    if set(tensors) != {"weights"}:
        raise _Unusable(f"its tensors are {quoted(sorted(tensors))}")
    weights = tensors["weights"]
    if weights.dtype.kind != "f":
        raise _Unusable(f"its weights are {weights.dtype}")
    return weights.tolist()


def _from_json(content: bytes) -> Any:
    try:
        table = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise _Unusable("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise _Unusable(f"it is not JSON ({error.msg} in line {error.lineno}, column {error.colno})") from None
    except (ValueError, RecursionError):
        raise _Unusable("it has too many digits in a number, or brackets within brackets") from None
    if not isinstance(table, dict) or "weights" not in table:
        raise _Unusable("it is no JSON object with the key weights")
    return table["weights"]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which json would take the last of two equal keys."""
    counts = Counter(key for key, _ in pairs)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise _Unusable(f"its key {quoted(twice[0])} is given twice")
    return dict(pairs)


def _rows(content: Any) -> tuple[tuple[float, ...], ...] | None:
    """The weights by layer, or None where something is not a positive finite number."""
    if not isinstance(content, list) or not content:
        return None
    by_head = isinstance(content[0], list)
    if not all(isinstance(layer, list) == by_head and layer != [] for layer in content):
        return None
    rows = [layer if by_head else [layer] for layer in content]
    if not all(_is_weight(value) for row in rows for value in row):
        return None
    return tuple(tuple(map(float, row)) for row in rows)


def _is_weight(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value <= sys.float_info.max  # also of an integer that no float can hold
