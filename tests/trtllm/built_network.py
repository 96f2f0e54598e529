"""A small model's network with scores in it, built by the package over the generated TensorRT-LLM."""

import importlib
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace

import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.runtime.torch_host import TorchHost
from bpkv_trt.trtllm.score_kernels import ScoreKernels
from bpkv_trt.trtllm.settings import EngineSettings, for_engine
from tests.models.small_models import configurations
from tests.runtime.random_models import peaked
from tests.trtllm.paged_memory import PagedMemory
from tests.trtllm.stock import Stock

MODULES = [
    f"bpkv_trt.trtllm.{name}" for name in ("models", "scored_network", "attention_tap", "collectives", "coverage")
]
K, POSITIONS, PAGE = 6, 3, 4
PROMPTS = [[5, 9, 33, 12, 60, 7, 7, 21, 48, 3, 17], [44, 2, 8, 51, 30, 19, 6]]
BUNDLE = b"kernels"
SHA256 = "0f" * 32


@cache
def model(name, dtype=torch.float32):
    config = configurations()[name]
    config.head_dim = 16  # the least that kernels take
    return peaked(name, config, dtype)


class Built:
    """The network of a model, built by its class of the package.

    name: of a small one, or a LoadedModel. library: SHA-256 of the plugin's, by default that of the settings.
    """

    def __init__(
        self,
        trt,
        tensorrt_10,
        name,
        *,
        ranks=1,
        rank=0,
        dtype=torch.float32,
        settings=None,
        library=None,
        page_size=PAGE,
        **changes,
    ):
        self.loaded = model(name, dtype) if isinstance(name, str) else name
        traits = self.loaded.traits
        blocks = sum(-(-(len(prompt) + 4) // PAGE) for prompt in PROMPTS)
        self.memory = PagedMemory(blocks, traits.layers, traits.kv_heads // ranks, page_size, traits.head_dim, dtype)
        self.stock = Stock(trt, tensorrt_10, self.loaded.model, self.memory, ranks, rank)
        self.settings = engine_settings() if settings is None else settings
        self.library = library or self.settings.plugin_sha256
        self.changes = changes

    @contextmanager
    def imported(self, monkeypatch):
        """The package's module of model classes, over the generated TensorRT-LLM."""
        with self.stock.fakes.installed(*MODULES):
            models = importlib.import_module(MODULES[0])
            library = SimpleNamespace(
                sidecar=SimpleNamespace(sha256=self.library),
                path="library.so",
                register=lambda trt: None,
            )
            monkeypatch.setattr(models, "PluginLibrary", SimpleNamespace(find=lambda: library))
            monkeypatch.setattr(models, "compile_score_kernels", partial(ScoreKernels, bundle=BUNDLE))
            yield models

    def construct(self, models):
        config = self.stock.config(**{"bpkv": self.settings.document()} | self.changes)
        return getattr(models, models.CLASSES[config.architecture])(config)

    def build(self, monkeypatch, **options):
        with self.imported(monkeypatch) as models:
            self.model = self.construct(models)
            inputs = self.model.prepare_inputs(**prepare(**options))
            self.model(**inputs)
        return self

    def host(self):
        traits = self.loaded.traits
        pool = PagedKvPool(
            layers=traits.layers, kv_heads=traits.kv_heads, head_dim=traits.head_dim, pages=200, page_size=PAGE
        )
        return TorchHost(self.loaded, pool, POSITIONS)

    def tables(self):
        needed = [-(-(len(prompt) + 4) // PAGE) for prompt in PROMPTS]
        numbers = torch.randperm(sum(needed)).split(needed)
        return self.memory.table([own.tolist() for own in numbers])


def engine_settings(**options):
    own = {"positions": POSITIONS, "top_k": K, "page_size": PAGE, "recent": POSITIONS} | options
    config = for_engine(BpkvConfig(**own))
    kernels = ScoreKernels(None, (), BUNDLE).checksum
    return EngineSettings(config=config, targets=("90a",), plugin_abi=1, plugin_sha256=SHA256, kernels=kernels)


def prepare(**options):
    given = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 96, "max_num_tokens": 128, "use_cache": True}
    return given | options
