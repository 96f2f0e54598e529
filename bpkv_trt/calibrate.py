"""The job of `bpkv layer-table`: measure a model's layers on a text, and say what the weights were made from."""

import hashlib
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

from bpkv_trt.documents import SCHEMA_VERSION, library_versions, machine
from bpkv_trt.evaluation.layer_sensitivity import (
    LENGTH,
    NOISE,
    POSITIONS,
    calibration_samples,
    layer_sensitivity,
    layer_weights,
)
from bpkv_trt.models.loading import load_model
from bpkv_trt.models.placement import device_of, dtype_of
from bpkv_trt.progress import Progress

OWN_TEXT = "pydoc_data.topics"  # Python's own documentation, which every machine has


@dataclass(frozen=True)
class CalibrationRequest:
    """What to measure, and on what."""

    model: str
    text: str | None = None  # None: Python's documentation
    text_name: str = OWN_TEXT
    samples: int = 8
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"


def run_calibration(request: CalibrationRequest, progress: Progress) -> dict[str, Any]:
    """Weights of a model's layers (RippleKV), with their provenance: what `bpkv layer-table` writes as JSON.

    Raises a BpkvError where model and text cannot be used.
    """
    text = "\n\n".join(topics[page] for page in sorted(topics)) if request.text is None else request.text
    device = device_of(request.device)
    progress.stage("load")
    loaded = load_model(request.model, dtype=dtype_of(request.dtype, device), device=device)
    traits = loaded.traits
    length = min(LENGTH, traits.max_positions or LENGTH)
    samples = calibration_samples(loaded.encoder, text, request.samples, length, request.seed)
    progress.stage("measure", len(samples) * len(traits.compactable_layers))
    sensitivity = layer_sensitivity(loaded, samples, request.seed, progress.advance)
    return {
        "schema_version": SCHEMA_VERSION,
        "weights": list(layer_weights(sensitivity, traits.compactable_layers)),
        "sensitivity_kl": list(sensitivity),
        "model": request.model,
        "text": {"name": request.text_name, "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest()},
        "samples": len(samples),
        "tokens": [len(tokens) for tokens in samples],
        "positions": POSITIONS,
        "noise": NOISE,
        "seed": request.seed,
        "versions": library_versions(),
        "machine": machine(),
    }
