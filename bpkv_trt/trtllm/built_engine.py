"""An engine with BP-KV in it, as its folder holds it: checked, and ready to be run by a session."""

from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bpkv_trt.core.readout import BranchWeights
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import InputError
from bpkv_trt.kernels.compiled_kernels import CompiledKernels
from bpkv_trt.trtllm.network_record import NetworkRecord
from bpkv_trt.trtllm.projections import Projections
from bpkv_trt.trtllm.settings import EngineSettings
from bpkv_trt.trtllm.sidecar import KERNELS, EngineSidecar, read_config

CACHES = {"FP8": torch.float8_e4m3fn, "INT8": torch.int8}  # by TensorRT-LLM's name of the quantisation


class EngineLimits(BaseModel):
    """What the engine was built for, at most; names are TensorRT-LLM's."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    max_batch_size: int = Field(ge=1)
    max_input_len: int = Field(ge=1)
    max_seq_len: int = Field(ge=1)
    max_num_tokens: int = Field(ge=1)


@dataclass(frozen=True)
class BuiltEngine:
    """One rank of it."""

    settings: EngineSettings
    limits: EngineLimits
    traits: ModelTraits
    projections: BranchWeights
    kernels: CompiledKernels | None = None  # that stage 2 and moves run on a GPU; None: Triton compiles them
    cache_dtype: torch.dtype | None = None  # of a quantised pool, which is stored as bytes
    cache_scales: tuple[float, ...] | None = None

    @classmethod
    def open(cls, folder: Path, sidecar: EngineSidecar, device: torch.device, rank: int = 0) -> "BuiltEngine":
        """Load what a session needs beside the engine. sidecar: the folder's, read from it and so checked against it.

        Raises InputError or ConfigError where the folder, or the device, is not one that a session can run.
        """
        if device.type == "cuda":
            sidecar.settings.check_gpu(torch.cuda.get_device_capability(device))
        config = read_config(folder)
        pretrained = config["pretrained_config"]
        record = NetworkRecord.from_pretrained(pretrained, str(folder))
        try:
            limits = EngineLimits.model_validate(config.get("build_config"))
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(
                f"The configuration of the engine in {folder} is not one of TensorRT-LLM 1.0 to 1.2 (build_config: "
                f"{'.'.join(map(str, first['loc']))}: {first['msg']}); build the engine again."
            ) from None
        quantised = (pretrained.get("quantization") or {}).get("kv_cache_quant_algo")
        return cls(
            settings=sidecar.settings,
            limits=limits,
            traits=record.traits,
            projections=Projections.load(folder, rank, device),
            kernels=CompiledKernels.read(folder / KERNELS),
            cache_dtype=CACHES.get(str(quantised)),
            cache_scales=record.cache_scales,
        )
