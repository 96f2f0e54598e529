"""A checkpoint of TensorRT-LLM, as far as BP-KV has to know it before an engine is built from it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError, InputError, ModelError
from bpkv_trt.input_file import read_file

if TYPE_CHECKING:
    from bpkv_trt.kernels.configuration import KernelConfiguration

LARGEST = 1 << 24  # bytes of a config.json
WITHOUT = "or build the engine without --plugin bpkv"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Mapping(_Part):
    tp_size: int = Field(1, ge=1)
    pp_size: int = Field(1, ge=1)
    cp_size: int = Field(1, ge=1)


class _Quantization(_Part):
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None


class Checkpoint(_Part):
    """Its config.json, in the words of TensorRT-LLM's PretrainedConfig. What engines with BP-KV cannot have is refused
    by name."""

    architecture: str
    dtype: Literal["float32", "float16", "bfloat16"]
    hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_size: int | None = Field(None, ge=1)
    max_position_embeddings: int | None = None
    sliding_window: int | None = None
    output_multiplier_scale: float | None = None
    mup_width_multiplier: float | None = None
    mapping: _Mapping = _Mapping()
    quantization: _Quantization = _Quantization()

    @field_validator("mapping", "quantization", mode="before")
    @classmethod
    def _absent(cls, value: object) -> object:
        return {} if value is None else value

    @classmethod
    def read(cls, source: Path) -> "Checkpoint":
        """Read what `--checkpoint_dir` or `--model_config` names: a folder with a config.json, or such a file.

        Raises InputError where there is none or it is damaged, ModelError for what is not covered.
        """
        flag = "--model_config" if source.suffix == ".json" else "--checkpoint_dir"
        path = source if source.suffix == ".json" else source / "config.json"
        content = read_file(path, LARGEST, "checkpoint's configuration", flag)
        try:
            return cls.of(json.loads(content))
        except (ValueError, RecursionError) as error:
            problem = "it is no JSON"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                problem = f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
            raise InputError(
                f"The checkpoint's configuration {path} is not one of TensorRT-LLM ({problem}); convert the model "
                "again, as `build_scripts/build_engine.sh` does."
            ) from None

    @classmethod
    def of(cls, config: Any) -> "Checkpoint":
        """From what a config.json holds, or `PretrainedConfig.to_dict()`.

        Raises ModelError for what is not covered, pydantic's ValidationError where something is missing.
        """
        checkpoint = cls.model_validate(config)
        checkpoint._check_ranks()
        checkpoint._check_model()
        checkpoint._check_quantization()
        return checkpoint

    def _check_ranks(self) -> None:
        for name in ("pp_size", "cp_size"):
            if (size := getattr(self.mapping, name)) > 1:
                raise ModelError(
                    f"The checkpoint has {name} {size}, but scores are computed where a sequence's positions and all "
                    "its layers are: convert it with tensor parallelism (tp_size) alone."
                )

    def _check_model(self) -> None:
        window = self.sliding_window
        if window is not None and window < (self.max_position_embeddings or 0):
            raise ModelError(
                f"The model attends to a sliding window of {window} tokens, which is counted in rows of the cache: "
                f"after an eviction they are others. Use another model, {WITHOUT}."
            )
        for name in ("output_multiplier_scale", "mup_width_multiplier"):
            if getattr(self, name) not in (None, 1):
                raise ModelError(
                    f"The checkpoint sets {name}, which no covered architecture has: its logits would not be those "
                    f"that scores are read out from. Use another model, {WITHOUT}."
                )

    def _check_quantization(self) -> None:
        weights, cache = self.quantization.quant_algo, self.quantization.kv_cache_quant_algo
        if weights not in (None, "NO_QUANT"):
            raise ModelError(
                f"The checkpoint's weights are quantised ({weights}), which is not covered: the output projection, "
                "through which scores are read out, is not stored as numbers that can be multiplied. Convert the model "
                "without quantised weights; its KV cache may be FP8 or INT8."
            )
        if cache not in (None, "NO_QUANT", "FP8", "INT8"):
            raise ModelError(
                f"The checkpoint's KV cache is {cache}, and only FP8, INT8 and unquantised ones can be compacted: "
                "convert the model with one of these."
            )

    def kernel_configuration(self, config: BpkvConfig) -> "KernelConfiguration":
        """What one rank's scoring kernels are compiled for. Raises ConfigError where there are none."""
        import torch

        from bpkv_trt.kernels.configuration import KernelConfiguration
        from bpkv_trt.kernels.paged import CacheType

        ranks, activations = self.mapping.tp_size, getattr(torch, self.dtype)
        if self.num_attention_heads % ranks:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads are not a multiple of {ranks} ranks (tp_size); convert "
                "the checkpoint for another number of ranks."
            )
        quantised = {"FP8": CacheType.FP8, "INT8": CacheType.INT8}
        return KernelConfiguration(
            query_heads=self.num_attention_heads // ranks,
            kv_heads=-(-(self.num_key_value_heads or self.num_attention_heads) // ranks),
            head_dim=self.head_size or self.hidden_size // self.num_attention_heads,
            page_size=config.page_size,
            cache=quantised.get(self.quantization.kv_cache_quant_algo or "") or CacheType.of(activations),
            activations=activations,
            shared_pages=True,
            positions=config.positions,
            channels=config.top_k,
        )
