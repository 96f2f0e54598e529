"""Tasks that need no download: seeded, sized by a model's tokenizer, without torch."""

from bpkv_trt.evaluation.tasks.registry import make_sample, task_names, variant_names
from bpkv_trt.evaluation.tasks.sample import Sample

__all__ = ["Sample", "make_sample", "task_names", "variant_names"]
