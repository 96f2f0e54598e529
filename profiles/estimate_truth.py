"""How well the estimate ranks masks on a real model: Spearman with masked forwards, by kind of mask and readout.

python profiles/estimate_truth.py [--model smollm2] [--prompts 4] [--masks 40] [--tokens 500] [--json FILE]
"""

import argparse
import json
import pydoc_data.topics
import random
import statistics
from pathlib import Path

import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.documents import document
from bpkv_trt.evaluation.estimate import study
from bpkv_trt.evaluation.masks import block_of_heads, half_of_a_layer, masks_of, scattered, scattered_of_mixed_size
from bpkv_trt.models.loading import load_model
from bpkv_trt.runtime.engine import Engine, make_pool

KINDS = (half_of_a_layer, block_of_heads, scattered, scattered_of_mixed_size)


def prompt(seed: int) -> str:
    """Pages of Python's own documentation in a random order."""
    pages = sorted(pydoc_data.topics.topics)
    return "\n\n".join(pydoc_data.topics.topics[page] for page in random.Random(seed).sample(pages, 12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--masks", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--positions", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loaded = load_model(options.model)
    configs = {kind: BpkvConfig(readout=kind, positions=options.positions) for kind in ("direct", "exact")}
    engines = {
        kind: Engine(loaded, config, make_pool(loaded, options.tokens, config.page_size))
        for kind, config in configs.items()
    }
    rows = []
    for kind in KINDS:
        studies = []
        for seed in range(options.seed, options.seed + options.prompts):
            tokens = loaded.encoder.encode_raw(prompt(seed))[: options.tokens]
            masks = masks_of(kind, loaded.traits, len(tokens), options.masks, seed)
            studies.append(study(engines, tokens, masks, options.positions))
        correlations = [each.spearman() for each in studies]
        row = {"masks": kind.__name__, "truth_median": statistics.median(t for each in studies for t in each.truth)}
        row |= {f"spearman_{name}": [round(each[name], 3) for each in correlations] for name in correlations[0]}
        row |= {f"mean_{name}": statistics.mean(each[name] for each in correlations) for name in correlations[0]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json is not None:
        body = {"options": {**vars(options), "json": None}, "rows": rows, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps(document(configs["direct"], body), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
