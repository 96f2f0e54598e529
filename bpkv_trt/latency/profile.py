"""What a profiling session runs: a YAML file such as those in `profiles/`."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bpkv_trt.config import BpkvConfig, check_budgets, paragraph
from bpkv_trt.core.budget import parse_bytes
from bpkv_trt.errors import ConfigError
from bpkv_trt.profiling import RangeName
from bpkv_trt.yaml_file import yaml_mapping

Measured = Literal["answers", "loads"]  # by a run: one answer, or a server's load
Traced = Literal["cuda", "nvtx", "osrt", "cudnn", "cublas"]


class NsysOptions(BaseModel):
    """How Nsight Systems records, where it is there; option names of 2022.4 and newer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: tuple[Traced, ...] = Field(("cuda", "nvtx", "osrt"), description="what is recorded; nvtx has the ranges")
    capture_range: Literal["none", "nvtx", "cudaProfilerApi"] = Field(
        "none", description="when: all the time, in the first range `capture`, or after the warm-up (needs a GPU)"
    )
    capture: RangeName | None = Field(None, description="the range, for capture_range: nvtx")
    cuda_graph_trace: Literal["graph", "node"] = Field("node", description="a CUDA graph as a whole, or its kernels")
    trace_fork_before_exec: bool = Field(False, description="also children that only fork")
    environment: dict[str, str] = Field({}, description="variables of the process")

    @model_validator(mode="after")
    def _consistent(self) -> "NsysOptions":
        if "nvtx" not in self.trace:
            raise ConfigError("nsys.trace has no nvtx, by which ranges are recorded: add it.")
        if (self.capture_range == "nvtx") != (self.capture is not None):
            raise ConfigError("nsys.capture names the range of capture_range: nvtx; give both or neither.")
        if bad := [name for name in self.environment if not name or set(name) & set("=,\0")]:
            raise ConfigError(f"nsys.environment has {bad[0]!r}, which is no name of a variable: correct it.")
        return self


class ServingLoad(BaseModel):
    """Requests that share a pool: the prompts of a server under load."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: int = Field(ge=1, le=10_000, description="each with a prompt of its own")
    every_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="seconds from one to the next; 0: all at once")
    shortest_prompt: int | None = Field(None, ge=1, description="tokens; prompts are spread from it to prompt_tokens")
    pool_prompts: int | None = Field(None, ge=1, description="prompts of prompt_tokens, with answers, held in full")
    pool_size: str | None = Field(None, description="the pool's bytes, such as 64MiB, in place of pool_prompts")
    chunk_tokens: int = Field(256, ge=1, description="of prompts, that one step runs beside the running answers")
    most_running: int = Field(64, ge=1, description="requests that share a step")

    @model_validator(mode="after")
    def _consistent(self) -> "ServingLoad":
        if (self.pool_prompts is None) == (self.pool_size is None):
            raise ConfigError("serving.pool_prompts and serving.pool_size both say how large the pool is: give one.")
        if self.pool_size is not None:
            parse_bytes(self.pool_size, "serving.pool_size")
        return self


class Profile(BaseModel):
    """One session: the same prompt, or the same load, at several budgets. Invalid options raise ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="as `bpkv generate --model` takes it")
    prompt_tokens: int = Field(ge=1, description="of a long text")
    answer_tokens: int = Field(ge=1, description="decoded greedily; nothing ends an answer early")
    budgets: tuple[str, ...] = Field(("1", "0.2"), min_length=1, description="each is run; 1 keeps all")
    options: dict[str, Any] = Field({}, description="others of `bpkv generate`, such as policy or regime")
    repeats: int = Field(3, ge=1, le=1000, description="runs of every budget that count, in turn")
    warmup: int = Field(1, ge=0, le=1000, description="runs of every budget before them, of a load's first request")
    serving: ServingLoad | None = Field(None, description="many requests at once, in place of one after the other")
    prompt_file: Path | None = Field(None, description="UTF-8 text; by default Python's own documentation")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nsys: NsysOptions = NsysOptions()

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            parts: dict[str, type[BaseModel]] = {"nsys": NsysOptions, "serving": ServingLoad}
            within = [f"{part}.{name}" for part, model in parts.items() for name in model.model_fields]
            raise ConfigError(paragraph(error, [*type(self).model_fields, *within])) from None

    @field_validator("budgets", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return [str(each) for each in value] if isinstance(value, list) else value  # YAML reads 0.2 as a number

    @model_validator(mode="after")
    def _consistent(self) -> "Profile":
        if "budget" in self.options:
            raise ConfigError("options has a budget, of which a profile has several: give budgets in place of it.")
        if self.serving is not None and (self.serving.shortest_prompt or 0) > self.prompt_tokens:
            raise ConfigError(
                f"serving.shortest_prompt is {self.serving.shortest_prompt}, more than prompt_tokens, the longest, "
                f"which is {self.prompt_tokens}: give less."
            )
        check_budgets(self.budgets)
        for budget in self.budgets:
            self.config(budget)
        return self

    @property
    def measured(self) -> Measured:
        """What a run is."""
        return "answers" if self.serving is None else "loads"

    def config(self, budget: str) -> BpkvConfig:
        """The configuration at one of the budgets."""
        return BpkvConfig(**{**self.options, "budget": budget})

    @classmethod
    def from_yaml(cls, path: Path) -> "Profile":
        """Read a profile; raises ConfigError, which names the file."""
        values = yaml_mapping(path, "profile", "bpkv profile run", "model: smollm2")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"In the profile {path}: {error}") from None

    def to_yaml(self) -> str:
        """YAML that `from_yaml` reads back to an equal profile, with what was not given at its default."""
        return str(yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False))
