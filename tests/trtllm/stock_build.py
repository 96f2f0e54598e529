"""TensorRT-LLM's `trtllm-build` as its sources are known, down to the network, which is not built.

An engine holds what can be told of the model that it was made of and of the process that made it, as JSON.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from enum import Enum
from importlib.machinery import SourceFileLoader
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.trtllm.contract.entries import read
from tests.trtllm.contract.fakes import Fakes, implementations_of

COMMAND = "tensorrt_llm.commands.build"
DEVICES = "STAND_IN_DEVICES"  # how many GPUs torch would count
FAILS = "STAND_IN_FAILS"  # the rank whose build fails, after others were saved
FLAGS = [
    *("strip_plan", "weight_sparsity", "weight_streaming", "fast_build", "enable_debug_output", "dry_run"),
    *("monitor_memory", "gather_context_logits", "gather_generation_logits", "gather_all_token_logits"),
]
ENABLED = ["remove_input_padding", "context_fmha", "use_paged_context_fmha", "use_fp8_context_fmha", "paged_state"]
DISABLED = ["multiple_profiles", "streamingllm", "norm_quant_fusion", "reduce_fusion", "user_buffer", "fuse_fp4_quant"]
NUMBERS = {
    **{"max_batch_size": 2048, "max_input_len": 1024, "max_seq_len": None, "max_beam_width": 1, "max_num_tokens": 8192},
    **{"opt_num_tokens": None, "workers": 1, "tokens_per_block": 32, "max_draft_len": 0},
}
TEXTS = {"output_dir": "engine_outputs", "log_level": "info", "gpt_attention_plugin": "auto"}


class KVCacheType(Enum):
    CONTINUOUS = "continuous"
    PAGED = "paged"
    DISABLED = "disabled"


def parse_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for option in read()[1]:
        name = option.removeprefix("--")
        if name in FLAGS:
            parser.add_argument(option, action="store_true", default=False)
        elif name in (*ENABLED, *DISABLED, "paged_kv_cache"):
            default = argparse.SUPPRESS if name == "paged_kv_cache" else "enable" if name in ENABLED else "disable"
            parser.add_argument(option, choices=["enable", "disable"], default=default)
        elif name == "kv_cache_type":
            parser.add_argument(option, type=lambda text: KVCacheType[text.upper()], default=argparse.SUPPRESS)
        elif name in NUMBERS:
            parser.add_argument(option, type=int, default=NUMBERS[name])
        else:
            parser.add_argument(option, default=TEXTS.get(name))
    return parser


def main() -> None:
    import tensorrt_llm.commands.build as build
    from tensorrt_llm.builder import BuildConfig
    from tensorrt_llm.models.modeling_utils import PretrainedConfig

    args = build.parse_arguments().parse_args()
    os.makedirs(args.output_dir, exist_ok=True)
    model_cls = None
    if args.model_cls_file is not None:
        assert args.model_cls_name is not None
        module = SourceFileLoader("models", args.model_cls_file).load_module()
        model_cls = getattr(module, args.model_cls_name)
    workers = min(int(os.environ.get(DEVICES, "1")), args.workers)
    source = args.checkpoint_dir if args.checkpoint_dir is not None else args.model_config
    if source.lower().endswith(".json"):
        config_path, ckpt_dir = source, None
    else:
        config_path, ckpt_dir = os.path.join(source, "config.json"), source
    model_config = PretrainedConfig.from_json_file(config_path)
    build_config = BuildConfig(max_beam_width=args.max_beam_width, dry_run=args.dry_run)
    build.parallel_build(
        model_config, ckpt_dir, build_config, args.output_dir, workers, args.log_level, model_cls, told=sys.argv
    )


def parallel_build(
    model_config, ckpt_dir, build_config, output_dir, workers=1, log_level="info", model_cls=None, **kwargs
):
    from tensorrt_llm.commands.build import build_and_save

    ranks = range(model_config.mapping["world_size"])
    tasks = [(rank, rank % workers, ckpt_dir, build_config, output_dir, log_level, model_config, model_cls)
             for rank in ranks]  # fmt: skip
    if workers == 1:
        for task in tasks:
            assert build_and_save(*task, **kwargs), "Failed to build engine"
        return
    with ProcessPoolExecutor(mp_context=get_context("spawn"), max_workers=workers) as pool:
        futures = [pool.submit(build_and_save, *task, **kwargs) for task in tasks]
        failed = [error for error in (future.exception() for future in futures) if error is not None]
        for error in failed:
            print(repr(error), file=sys.stderr)
        assert not failed, "Engine building failed, please check error log."


def build_and_save(rank, gpu_id, ckpt_dir, build_config, output_dir, log_level, model_config, model_cls, **kwargs):
    from tensorrt_llm.commands.build import build_model

    told = kwargs.pop("told")
    engine = build_model(build_config, rank, ckpt_dir, model_config, model_cls=model_cls)
    if os.environ.get(FAILS) == str(rank):
        raise RuntimeError("out of memory")
    if build_config.dry_run:
        return True
    engine._content["told"] = told
    engine.save(output_dir)
    return True


def build_model(build_config, rank=0, ckpt_dir=None, model_config=None, model_cls=None, dry_run=False, **kwargs):
    from tensorrt_llm.builder import Engine, EngineConfig
    from tensorrt_llm.models import MODEL_MAP

    import bpkv_trt.trtllm.models as models

    rank_config = deepcopy(model_config)
    rank_config.set_rank(rank)
    if model_cls is None:
        assert rank_config.architecture in MODEL_MAP
        model_cls = MODEL_MAP[rank_config.architecture]
    model = model_cls(rank_config) if ckpt_dir is None else model_cls.from_checkpoint(ckpt_dir, config=rank_config)
    if hasattr(rank_config, "bpkv"):
        models.score_plugin(rank_config)  # what its network, which is not built, would begin with
    content = {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "weights": ckpt_dir is not None,
        "process": os.getpid(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("BPKV_")},
    }
    config = EngineConfig(model.config, build_config, "1.2.1")
    engine = Engine(config, content)
    engine._rank = rank
    return engine


class PretrainedConfig:
    @classmethod
    def from_json_file(cls, config_file):
        return cls(**json.loads(Path(config_file).read_text()))

    def set_rank(self, rank):
        self.mapping = {**self.mapping, "rank": rank}

    def to_dict(self):
        return deepcopy(vars(self))


class PretrainedModel:
    def __init__(self, config):
        self.config = config

    def save_checkpoint(self, output_dir, save_config=True):
        config = self.config.to_dict()
        rank = config["mapping"].pop("rank")
        if save_config:
            (Path(output_dir) / "config.json").write_text(json.dumps(config))
        save_projections(Path(output_dir), rank, self.config.num_hidden_layers, self.config.hidden_size)

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None, *, preprocess_weights_hook=None):
        return cls(config)


class LlamaForCausalLM:
    def __init__(self, config):
        from tensorrt_llm.models.modeling_utils import PretrainedModel

        PretrainedModel.__init__(self, config)

    @classmethod
    def from_hugging_face(cls, hf_model_or_dir, dtype="auto", mapping=None, quant_config=None, **kwargs):
        from tensorrt_llm.models.modeling_utils import PretrainedConfig

        told = json.loads((Path(hf_model_or_dir) / "config.json").read_text())
        return cls(
            PretrainedConfig(
                architecture=told["architectures"][0],
                dtype=told["dtype"] if dtype == "auto" else dtype,
                mapping={name: getattr(mapping, name) for name in ("world_size", "tp_size", "pp_size", "rank")},
                **{name: told[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
            )
        )


class EngineConfig:
    def __init__(self, pretrained_config, build_config, version):
        self._parts = (pretrained_config, build_config, version)

    def to_dict(self):
        pretrained, build, version = self._parts
        shown = {"max_beam_width": build.max_beam_width}
        return {"version": version, "pretrained_config": pretrained.to_dict(), "build_config": shown}


class Engine:
    def __init__(self, config, engine, managed_weights={}):  # noqa: B006
        self._config, self._content = config, engine

    def save(self, engine_dir):
        folder = Path(engine_dir)
        if self._rank == 0:
            (folder / "config.json").write_text(json.dumps(self._config.to_dict(), indent=4))
        (folder / f"rank{self._rank}.engine").write_text(json.dumps(self._content))


def save_projections(folder, rank, layers, width):
    """Of a checkpoint's weights, those that are read outside of a network."""
    import torch
    from safetensors.torch import save_file

    names = [f"transformer.layers.{layer}.attention.dense.weight" for layer in range(layers)]
    save_file({name: torch.full((width, width), 0.5) for name in names}, folder / f"rank{rank}.safetensors")


def stock_fakes() -> Fakes:
    """TensorRT-LLM with this command in it."""
    commands = (parse_arguments, main, parallel_build, build_and_save, build_model)
    classes: dict[str, type] = {
        "models.modeling_utils.PretrainedConfig": PretrainedConfig,
        "models.modeling_utils.PretrainedModel": PretrainedModel,
        "models.llama.model.LLaMAForCausalLM": LlamaForCausalLM,
        "builder.EngineConfig": EngineConfig,
        "builder.Engine": Engine,
    }
    given: dict[str, Any] = {f"{COMMAND}.{each.__name__}": each for each in commands}
    given["tensorrt_llm._common.default_trtnet"] = lambda: None
    for name, kind in classes.items():
        given |= implementations_of(f"tensorrt_llm.{name}", kind)
    return Fakes(given)


def install() -> None:
    """For all of this process, which imports the package from a generated folder."""
    sys.modules.update(stock_fakes().modules)
