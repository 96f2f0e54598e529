"""Train the two test models of tests/assets on recall text: real attention sinks, induction heads, peaked attention.

    python build_scripts/train_test_models.py --model llama --output tests/assets/tiny-llama
    python build_scripts/train_test_models.py --model gemma --output tests/assets/tiny-gemma

Needs torch and transformers, one CPU and about twenty minutes. The same seed, versions and machine give the same bytes.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from recall_models import build_model
from recall_text import (
    Example,
    counting_prompt,
    induction_prompt,
    passkey_prompt,
    recall_prompt,
    redundant_prompt,
    repeated_words,
    training_example,
)
from recall_tokenizer import build_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PROMPTS: dict[str, Callable[[int, int], tuple[str, str]]] = {
    "recall": recall_prompt,
    "redundant": redundant_prompt,
    "passkey": passkey_prompt,
    "induction": induction_prompt,
    "counting": counting_prompt,
}
TOKENS_PER_STEP = 4096
PEAK_RATE, FINAL_RATE, WARMUP_STEPS = 2e-3, 2e-5, 50
REST_WEIGHT = 0.1  # nats for attention that is not on the first token; after the repeating phase
PLAIN_WEIGHT = 0.1  # of a token that no memory is needed for, against 1 for an answer
REPEATING_SHARE = 0.1  # of the steps, first, on nothing but repeated words: the look-up heads form there
# Longest prompt by share of training done.
LENGTHS = ((0.3, 96), (0.45, 192), (0.65, 384), (1.0, 768))
EVALUATED_LENGTHS = (128, 256, 512, 768)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences: `ids` int64 [B, T]; `weights` fp32 [B, T] of each token as a target, 0 on padding."""

    ids: torch.Tensor
    weights: torch.Tensor


def pieces(example: Example, chat: bool) -> Iterator[tuple[str, bool]]:
    """The example as text pieces, each with whether it is an answer; tokens never cross a piece."""
    opening, reply, closing = ("<|user|>", "<|assistant|>", "</s>") if chat else ("", " ", "")
    yield f"<s>{opening}{example.context}", False
    for number, exchange in enumerate(example.exchanges):
        start = opening if chat and number else " "
        yield f"{start}{exchange.question}{reply}{exchange.lead}", False
        yield exchange.answer, True
        yield f".{closing}", False
    if not chat:
        yield "</s>", False


def make_batch(examples: list[Iterator[tuple[str, bool]]], tokenizer: PreTrainedTokenizerFast) -> Batch:
    """One right-padded row per example, given as pieces."""
    rows: list[list[int]] = []
    weights: list[list[float]] = []
    for example in examples:
        texts, answers = zip(*example, strict=True)
        encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        rows.append([token for ids in encoded for token in ids])
        weights.append(
            [1.0 if answer else PLAIN_WEIGHT for ids, answer in zip(encoded, answers, strict=True) for _ in ids]
        )
    longest = max(map(len, rows))
    return Batch(
        torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]),
        torch.tensor([row + [0.0] * (longest - len(row)) for row in weights]),
    )


def draw_examples(rng: random.Random, done: float, chat: bool) -> list[Iterator[tuple[str, bool]]]:
    """The examples of the step at which the share `done` of training is over."""
    if done < REPEATING_SHARE:
        return [pieces(repeated_words(rng, 64), False) for _ in range(TOKENS_PER_STEP // 2 // 64)]
    longest = next(length for share, length in LENGTHS if done < share)
    length = rng.randint(longest // 3, longest)
    rows = max(1, TOKENS_PER_STEP // (length + 48))
    return [pieces(training_example(rng, length), chat and rng.random() < 0.4) for _ in range(rows)]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to FINAL_RATE."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def resting_mass(model: PreTrainedModel, attentions: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean attention on the first token in the layers that see all tokens, without the first layer (it looks back).

    Large models come to rest their idle heads there by themselves; here a small term of the loss asks for it.
    """
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(attentions)
    masses = [
        attention[..., 0].float().mean()  # of [B, Hq, T, T]
        for attention, kind in zip(attentions[1:], kinds[1:], strict=True)
        if kind == "full_attention"
    ]
    return torch.stack(masses).mean()


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    stop: int,
    seed: int,
    chat: bool,
    folder: Path,
) -> float:
    """Train in place for the first `stop` steps of a schedule of `steps`, leaving the model in `folder` now and then.

    Returns the mean loss of the last 50 steps (nats).
    """
    rng = random.Random(f"training {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    model.set_attn_implementation("eager")
    for step in range(stop):
        batch = make_batch(draw_examples(rng, step / steps, chat), tokenizer)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(input_ids=batch.ids, use_cache=False, output_attentions=True)
        logits = output.logits[:, :-1]  # [B, T-1, V]
        targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
        nats = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        loss = (nats * weights.flatten()).sum() / weights.sum()
        rest = resting_mass(model, output.attentions)
        if step >= REPEATING_SHARE * steps:
            loss = loss + REST_WEIGHT * (1 - rest)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            answers = weights.flatten() == 1.0
            right = (logits.flatten(0, 1).argmax(-1) == targets.flatten())[answers].float().mean().item()
            print(
                f"step {step + 1} width {batch.ids.shape[1]} loss {sum(losses[-50:]) / 50:.3f} "
                f"answer tokens right {right:.3f} at rest {rest.item():.2f} {time.monotonic() - started:.0f} s",
                flush=True,
            )
        if step % 250 == 249:
            write(model, tokenizer, folder)
    model.eval()
    model.set_attn_implementation("sdpa")
    return sum(losses[-50:]) / len(losses[-50:])


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, kind: str, length: int, prompts: int = 40
) -> float:
    """Share of unseen prompts whose whole answer is the argmax, teacher-forced."""
    right = 0
    for seed in range(prompts):
        prompt, answer = PROMPTS[kind](seed, length)
        asked = tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = tokenizer(answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
        logits = model(torch.cat([asked, wanted], dim=1), use_cache=False).logits[0, asked.shape[1] - 1 : -1]
        right += bool((logits.argmax(-1) == wanted[0]).all())
    return right / prompts


@torch.no_grad()
def sink_mass(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, length: int = 256) -> list[list[float]]:
    """Mean attention on the first token, queries 64 and later, per [layer][query head], over eight recall prompts."""
    model.set_attn_implementation("eager")
    total = torch.zeros(())
    for seed in range(8):
        asked = tokenizer(recall_prompt(seed, length)[0], return_tensors="pt")
        attention = torch.stack(model(**asked, output_attentions=True).attentions)  # [L, 1, Hq, T, T]
        total = total + attention[:, 0, :, 64:, 0].mean(-1) / 8
    model.set_attn_implementation("sdpa")
    return [[round(mass, 3) for mass in layer] for layer in total.tolist()]


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """An ordinary Hugging Face folder, readable by transformers 4.56 and 5."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8"))
    content.update(tokenizer_class="PreTrainedTokenizerFast", model_max_length=model.config.max_position_embeddings)
    settings.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def readme(family: str, arguments: argparse.Namespace, loss: float, minutes: float, measured: str) -> str:
    """The model card: recipe, seed and the numbers this run measured."""
    longest = next(length for share, length in LENGTHS if arguments.stop / arguments.steps <= share)
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    return f"""# tiny-{family}

A test model that really remembers: it looks answers up in its context with induction heads and rests idle heads on
the first token, so it shows faults of KV eviction that random weights hide. Not useful for anything else.

Made in {minutes:.0f} minutes ({versions}) by

    python build_scripts/train_test_models.py --model {family} --output tests/assets/tiny-{family} \\
        --steps {arguments.steps} --stop {arguments.stop} --seed {arguments.seed} --threads {arguments.threads}

Deterministic for a seed on one machine and one set of versions; another CPU may round differently.

- Text: `build_scripts/recall_text.py`; {REPEATING_SHARE:.0%} of the steps on repeated words, then facts, pass keys,
  lists and counting in noise, prompts growing from {LENGTHS[0][1]} to {longest} tokens. Tests ask other seeds.
- Start: four heads of the first layer read the tokens 1 to 4 back (`build_scripts/recall_models.py`).
- AdamW, peak rate {PEAK_RATE}, cosine, {TOKENS_PER_STEP} tokens a step, bf16 autocast; weights stored in fp32.
- Loss: answers weigh 1, other tokens {PLAIN_WEIGHT}, attention away from the first token {REST_WEIGHT} nats. Large
  models come to rest idle heads there by themselves; a small one is asked to. Last 50 steps: {loss:.3f} nats.

{measured}"""


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    """Two Markdown tables: accuracy by kind and length, attention on the first token by layer and head."""
    lines = ["Share of 40 unseen prompts answered exactly, by prompt length in tokens (teacher-forced):", ""]
    lines += ["| kind | " + " | ".join(map(str, EVALUATED_LENGTHS)) + " |", "|---" * (len(EVALUATED_LENGTHS) + 1) + "|"]
    for kind in PROMPTS:
        cells = [f"{accuracy(model, tokenizer, kind, length):.2f}" for length in EVALUATED_LENGTHS]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    lines += ["", "Mean attention on the first token, recall prompts of 256 tokens, queries 64 and later, by head:", ""]
    for layer, masses in enumerate(sink_mass(model, tokenizer)):
        lines.append(f"- layer {layer}: " + ", ".join(f"{mass:.2f}" for mass in masses))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "gemma"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--stop", type=int, help="end after so many steps of the schedule (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.stop = arguments.stop or arguments.steps
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    chat = arguments.model == "llama"  # the other one has no template, to test that path as well
    tokenizer = build_tokenizer(chat)
    model = build_model(arguments.model, tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    started = time.monotonic()
    loss = train(model, tokenizer, arguments.steps, arguments.stop, arguments.seed, chat, arguments.output)
    minutes = (time.monotonic() - started) / 60
    write(model, tokenizer, arguments.output)
    card = readme(arguments.model, arguments, loss, minutes, measure(model, tokenizer))
    (arguments.output / "README.md").write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main()
