"""The output projections of an engine's model, beside the engine: what stage 2 reads its shifts through."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bpkv_trt.errors import InputError

STOCK = "transformer.layers.{layer}.attention.dense.weight"  # of a checkpoint of TensorRT-LLM
BUILD = "build the engine again from a checkpoint with weights"


def file_of(rank: int) -> str:
    """Its name in the engine's folder."""
    return f"rank{rank}_bpkv_projections.safetensors"


@dataclass(frozen=True)
class Projections:
    """W_O [d, Hq D] of every layer, of the heads of one rank; an engine's own copies cannot be read."""

    layers: tuple[Tensor, ...]

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """W_O and no bias, which no shift depends on."""
        return self.layers[layer], None

    def post_attention_norm(self, layer: int) -> tuple[Tensor, float] | None:
        """None: no architecture that engines are built of has one."""
        return None

    @classmethod
    def of_checkpoint(cls, checkpoint: Path, rank: int) -> "Projections":
        """Read a checkpoint's. Raises InputError where it has none."""
        with _weights(checkpoint, rank) as (file, layers):
            return cls(tuple(file.get_tensor(STOCK.format(layer=layer)) for layer in range(layers)))

    @classmethod
    def load(cls, engine: Path, rank: int, device: torch.device) -> "Projections":
        """Those beside an engine. Raises InputError where there are none or they are damaged."""
        path = engine / file_of(rank)
        try:
            found = load_file(path, device=str(device))
            return cls(tuple(found[f"layers.{layer}"] for layer in range(len(found))))
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(
                f"The engine's output projections cannot be read from {path} ({error}); {BUILD}."
            ) from None

    def save(self, engine: Path, rank: int) -> None:
        """Write them beside the engine. Raises InputError where that cannot be."""
        path = engine / file_of(rank)
        try:
            save_file({f"layers.{layer}": weight for layer, weight in enumerate(self.layers)}, path)
        except OSError as error:
            raise InputError(f"The output projections cannot be written to {path} ({error.strerror}).") from None


def check_checkpoint(checkpoint: Path, ranks: int) -> None:
    """Raises InputError where the weights of a rank lack them; nothing but names is read."""
    for rank in range(ranks):
        with _weights(checkpoint, rank):
            pass


@contextmanager
def _weights(checkpoint: Path, rank: int) -> Iterator[tuple[Any, int]]:
    """The file of a rank's weights, and how many layers have a projection in it."""
    path = checkpoint / f"rank{rank}.safetensors"
    try:
        with safe_open(path, "pt") as file:
            names, layers = set(file.keys()), 0
            while STOCK.format(layer=layers) in names:
                layers += 1
            if not layers:
                raise InputError(f"The weights {path} have no {STOCK.format(layer=0)}; convert the model again.")
            yield file, layers
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"The checkpoint's weights {path} cannot be read ({error}); convert the model again."
        ) from None
