"""What a request is answered when it runs alone: by `bpkv generate`, which knows nothing of serving."""

from functools import cache

from bpkv_trt.config import BpkvConfig
from bpkv_trt.generate import run_generate
from bpkv_trt.request import GenerateRequest
from tests.serving.conftest import TINY


class Silent:
    """A progress that shows nothing."""

    def stage(self, name: str, total: int | None = None) -> None:
        pass

    def advance(self, steps: int = 1) -> None:
        pass


@cache
def alone(
    text: str,
    budget: str,
    max_tokens: int,
    policy: str = "bpkv",
    temperature: float = 0.0,
    seed: int = 0,
    model: str = str(TINY),
    raw: bool = True,
) -> tuple[str, int, int]:
    """The answer's text, entries kept and bytes freed by the prompt's compaction."""
    config = BpkvConfig(policy=policy, budget=budget, seed=seed)
    request = GenerateRequest(
        model=model, prompt=text, config=config, raw=raw, max_new_tokens=max_tokens, temperature=temperature
    )
    report = run_generate(request, Silent())
    pool = report["pool"]
    return report["text"], report["budget"]["entries_kept"], pool["bytes_before"] - pool["bytes_after"]
