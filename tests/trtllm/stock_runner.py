"""How TensorRT-LLM loads an engine's folder, and the ModelRunner that it gives a session to."""

import copy
import json
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.trtllm.contract.fakes import Implementation, implementations_of
from tests.trtllm.stock_build import KVCacheType

RUNNER = "tensorrt_llm.runtime.model_runner"


def runner_implementations() -> dict[str, Implementation]:
    return (
        {
            f"{RUNNER}._engine_config_to_model_config": _engine_config_to_model_config,
            "tensorrt_llm.models.modeling_utils.PretrainedConfig.set_rank": _set_rank,
            "tensorrt_llm.models.modeling_utils.PretrainedConfig.quant_mode": property(_quant_mode),
            "tensorrt_llm.quantization.mode.QuantMode.has_kv_cache_quant": lambda self: bool(self),
            "tensorrt_llm.runtime.generation.SamplingConfig.update": _update,
        }
        | implementations_of("tensorrt_llm.builder.Engine", Engine)
        | implementations_of("tensorrt_llm.builder.EngineConfig", EngineConfig)
        | implementations_of(f"{RUNNER}.ModelRunner", ModelRunner)
    )


class EngineConfig:
    def __init__(self: Any, pretrained_config: Any, build_config: Any, version: str) -> None:
        self.pretrained_config, self.build_config, self.version = pretrained_config, build_config, version

    def from_json_file(cls: Any, config_file: str) -> Any:  # noqa: N805
        from tensorrt_llm.builder import BuildConfig
        from tensorrt_llm.mapping import Mapping
        from tensorrt_llm.models.modeling_utils import PretrainedConfig
        from tensorrt_llm.plugin.plugin import PluginConfig

        content = json.loads(Path(config_file).read_text())
        pretrained, build = content["pretrained_config"], content["build_config"]
        build |= {
            "plugin_config": PluginConfig(**build["plugin_config"]),
            "kv_cache_type": KVCacheType[build["kv_cache_type"]],
        }
        pretrained["mapping"] = Mapping(**pretrained["mapping"])
        return cls(PretrainedConfig(**pretrained), BuildConfig(**build), content["version"])

    def to_dict(self: Any) -> dict[str, Any]:
        build = self.build_config
        plugins = {name: getattr(build.plugin_config, name) for name in PLUGINS}
        sizes = {name: getattr(build, name) for name in SIZES}
        shown = {**sizes, "kv_cache_type": build.kv_cache_type.name, "plugin_config": plugins}
        pretrained = {name: _plain(value) for name, value in self.pretrained_config.to_dict().items()}
        return {"version": self.version, "pretrained_config": pretrained, "build_config": shown}


SIZES = ("max_batch_size", "max_input_len", "max_seq_len", "max_beam_width", "max_num_tokens")
PLUGINS = ("gpt_attention_plugin", "remove_input_padding", "tokens_per_block", "gemm_allreduce_plugin")


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


class Engine:
    def __init__(self: Any, config: Any, engine: bytes, managed_weights: Any) -> None:
        self.config, self.engine = config, engine

    def save(self: Any, engine_dir: str) -> None:
        (Path(engine_dir) / "config.json").write_text(json.dumps(self.config.to_dict(), indent=4))
        (Path(engine_dir) / f"rank{self.config.pretrained_config.mapping.rank}.engine").write_bytes(self.engine)

    def from_dir(cls: Any, engine_dir: str, rank: int = 0) -> Any:  # noqa: N805
        from tensorrt_llm.builder import EngineConfig as Kind

        config = Kind.from_json_file(Path(engine_dir) / "config.json")
        config.pretrained_config.set_rank(rank)
        return cls(config, (Path(engine_dir) / f"rank{rank}.engine").read_bytes())


def _set_rank(self: Any, rank: int) -> None:
    from tensorrt_llm.mapping import Mapping

    sizes = {name: getattr(self.mapping, name) for name in ("world_size", "tp_size", "pp_size", "cp_size")}
    self.mapping = Mapping(rank=rank, **sizes)


def _quant_mode(self: Any) -> Any:
    from tensorrt_llm.quantization import QuantMode

    assert not self.quantization
    return QuantMode(0)


def _engine_config_to_model_config(engine_config: Any, **kwargs: Any) -> Any:
    from tensorrt_llm.runtime.generation import ModelConfig

    model, build = engine_config.pretrained_config, engine_config.build_config
    plugins, ranks = build.plugin_config, model.mapping.tp_size
    return ModelConfig(
        max_batch_size=build.max_batch_size,
        max_beam_width=build.max_beam_width,
        vocab_size=model.vocab_size,
        num_layers=model.num_hidden_layers,
        num_heads=model.num_attention_heads // ranks,
        num_kv_heads=(model.num_key_value_heads + ranks - 1) // ranks,
        hidden_size=model.hidden_size // ranks,
        head_size=model.head_size,
        gpt_attention_plugin=bool(plugins.gpt_attention_plugin),
        gemm_allreduce_plugin=plugins.gemm_allreduce_plugin,
        remove_input_padding=plugins.remove_input_padding,
        tokens_per_block=plugins.tokens_per_block,
        quant_mode=model.quant_mode,
        gather_context_logits=build.gather_context_logits,
        gather_generation_logits=build.gather_generation_logits,
        dtype=model.dtype,
        kv_cache_type=build.kv_cache_type,
        **kwargs,
    )


def _update(self: Any, **kwargs: Any) -> dict[str, Any]:
    """What it does not know is returned."""
    known = {name: value for name, value in kwargs.items() if name in type(self).contract}
    for name, value in known.items():
        setattr(self, name, value)
    return {name: value for name, value in kwargs.items() if name not in known}


class ModelRunner:
    def __init__(
        self: Any,
        session: Any,
        max_batch_size: int,
        max_input_len: int,
        max_seq_len: int,
        max_beam_width: int,
        kv_cache_type: Any,
        lora_manager: Any = None,
    ) -> None:
        self.session, self.kv_cache_type, self.lora_manager = session, kv_cache_type, lora_manager
        self.max_batch_size, self.max_beam_width = max_batch_size, max_beam_width
        self.max_input_len, self.max_seq_len = max_input_len, max_seq_len
        self.enable_context_fmha_fp32_acc, self.multi_block_mode = False, True

    def generate(**arguments: Any) -> Any:
        self, prompts, named = (arguments[name] for name in ("self", "batch_input_ids", "kwargs"))
        config = copy.deepcopy(arguments["sampling_config"])
        config.update(**named)
        if isinstance(config.temperature, float) and config.temperature == 0.0:
            config.temperature, config.top_k = 1.0, 1
        _check(self, [len(prompt) for prompt in prompts], config)
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
        self.session.setup(
            batch_size=len(prompts),
            max_context_length=lengths.max().item(),
            max_new_tokens=config.max_new_tokens,
            beam_width=config.num_beams,
            max_attention_window_size=config.max_attention_window_size,
            sink_token_length=config.sink_token_length,
            lora_manager=self.lora_manager,
            lora_uids=arguments["lora_uids"],
            medusa_choices=arguments["medusa_choices"],
            enable_context_fmha_fp32_acc=self.enable_context_fmha_fp32_acc,
            multi_block_mode=self.multi_block_mode,
            encoder_max_input_length=arguments["encoder_max_input_length"],
        )
        passed_on = ("streaming", "output_generation_logits", "stopping_criteria", "logits_processor", "position_ids")
        outputs = self.session.decode(
            torch.cat([prompt.type(torch.int32) for prompt in prompts]),
            lengths,
            config,
            stop_words_list=_words(config.stop_words_list),
            bad_words_list=_words(config.bad_words_list),
            output_sequence_lengths=config.output_sequence_lengths,
            return_dict=config.return_dict,
            encoder_output=arguments["encoder_input_features"],
            encoder_input_lengths=arguments["encoder_output_lengths"],
            cross_attention_mask=arguments["cross_attention_masks"],
            skip_cross_attn_blocks=named.get("skip_cross_attn_blocks"),
            **{name: arguments[name] for name in passed_on},
        )
        if config.return_dict and not arguments["streaming"] and "generation_logits" in outputs:
            outputs["generation_logits"] = torch.stack(outputs["generation_logits"], 1).unsqueeze(1)  # [B, 1, n, V]
        return outputs


def _words(listed: Any) -> Any:
    assert listed is None or isinstance(listed, np.ndarray | Tensor), "a list needs a tokenizer"
    return listed.numpy() if isinstance(listed, Tensor) else listed


def _check(runner: Any, lengths: list[int], config: Any) -> None:
    for given, limit, what in (
        (len(lengths), runner.max_batch_size, "Input batch size"),
        (max(lengths), runner.max_input_len, "Maximum input length"),
        (max(lengths) + config.max_new_tokens, runner.max_seq_len, "Maximum input length + maximum new tokens"),
        (config.num_beams, runner.max_beam_width, "Num beams"),
    ):
        if given > limit:
            raise RuntimeError(f"{what} ({given}) exceeds the engine or specified limit ({limit})")
