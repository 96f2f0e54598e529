"""BpkvPress in kvpress's own pipeline: it keeps what our engine keeps, and leaves the model as it was."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import BpkvError, ConfigError, InputError, ModelError, NumericalError
from bpkv_trt.models.loading import LoadedModel, load_model
from bpkv_trt.policies.registry import settled
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.scratch import scratch_rows
from build_scripts.recall_text import recall_prompt, two_questions
from tests.models.small_models import configurations, random_model
from tests.runtime.masked_reference import NEVER, MaskedReference

kvpress = pytest.importorskip(
    "kvpress", reason="pip install 'bpkv-trt[kvpress]' (Python below 3.13)", exc_type=ImportError
)
from bpkv_trt.integrations.kvpress import BpkvPress  # noqa: E402 (it needs kvpress)

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


@cache
def loaded(name: str = TINY) -> LoadedModel:
    return load_model(name)


@pytest.fixture
def model() -> PreTrainedModel:
    """A model as its user has it: no host of ours ever ran it."""
    return AutoModelForCausalLM.from_pretrained(TINY)


def prompt_tokens(seed: int, tokens: int = 300) -> list[int]:
    return loaded().encoder.encode_raw(recall_prompt(seed, tokens)[0])


@torch.no_grad()
def prefilled(model: PreTrainedModel, tokens: list[int], press: Any = None) -> DynamicCache:
    held = DynamicCache()
    if press is None:
        model.model(input_ids=torch.tensor([tokens]), past_key_values=held)
        return held
    with press(model):
        model.model(input_ids=torch.tensor([tokens]), past_key_values=held)
    return held


def kept_rows(full: DynamicCache, cut: DynamicCache) -> Tensor:
    """[L, Hkv, n] rows of the full cache that the cut one holds, recognised by key and value, in its order."""
    layers = []
    for before, after in zip(full.layers, cut.layers, strict=True):
        same = (before.keys[0][:, None] == after.keys[0][:, :, None]).all(-1)  # [Hkv, n, T]
        same &= (before.values[0][:, None] == after.values[0][:, :, None]).all(-1)
        assert bool((same.sum(-1) == 1).all())
        layers.append(same.int().argmax(-1))
    return torch.stack(layers)


def engine_of(name: str, rows: int, budget: int, **options: Any) -> Engine:
    config = settled(BpkvConfig(**options, budget=f"{budget}t", scope="head", regime="prefill"))
    pool = make_pool(loaded(name), rows, config.page_size, scratch=scratch_rows(config, None, [rows]), poison=True)
    return Engine(loaded(name), config, pool)


@pytest.mark.parametrize("ratio", [0.5, 0.8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"readout": "exact", "probes": 4, "lookahead": 0},
        {"readout": "direct", "lookahead": 9, "pooling": 1, "rehearsal": 0},
        {"rehearsal": 100, "lookahead": 2},
        {"preset": "paper"},
        {"policy": "snapkv", "lookahead": 20},
        {"positions": 4, "recent": 16, "sinks": 2, "refine": 8, "epsilon": 0.1, "top_k": 8},
        {"policy": "criticalkv"},
        {"policy": "random", "seed": 3},
    ],
    ids=str,
)
def test_it_keeps_what_the_engine_keeps(model: PreTrainedModel, options: dict[str, Any], ratio: float) -> None:
    tokens = prompt_tokens(1)
    press = BpkvPress(ratio, **options)
    kept = kept_rows(prefilled(model, tokens), prefilled(model, tokens, press))
    count = int(len(tokens) * (1 - ratio))  # kvpress's rule
    assert kept.shape[-1] == count and bool((kept.diff() > 0).all())
    engine = engine_of(TINY, len(tokens), count, **options)
    sequence = engine.open()
    engine.encode([(sequence, tokens)])
    event = engine.compactor.on_context_step_end(sequence)
    assert torch.equal(kept, engine.pool.view(sequence).position_table().long())
    (pressed,) = press.events
    assert event is not None and pressed.entries_after == event.entries_after == kept.numel()
    assert pressed.drafted == event.drafted <= press.config.drafted
    assert (event.drafted > 0) == (press.config.lookahead > 0)
    if event.estimated_kl is not None:
        assert pressed.estimated_kl == pytest.approx(event.estimated_kl, rel=1e-3)


@torch.no_grad()
def test_the_cut_cache_is_the_full_one_with_entries_masked(model: PreTrainedModel) -> None:
    tokens, future = prompt_tokens(2), prompt_tokens(3)[:40]
    full, cut = prefilled(model, tokens), prefilled(model, tokens, BpkvPress(0.7))
    kept = kept_rows(full, cut)
    hidden_from = torch.full((*kept.shape[:2], len(tokens) + len(future)), NEVER)
    hidden_from[..., : len(tokens)] = len(tokens)
    hidden_from.scatter_(-1, kept, NEVER)
    truth = MaskedReference(AutoModelForCausalLM.from_pretrained(TINY), {}).logits(tokens + future, hidden_from)
    positions = torch.arange(len(tokens), len(tokens) + len(future))[None]
    question = model(input_ids=torch.tensor([future[:-1]]), past_key_values=cut, position_ids=positions[:, :-1])
    answer = model(input_ids=torch.tensor([future[-1:]]), past_key_values=cut, position_ids=positions[:, -1:])
    logits = torch.cat([question.logits[0], answer.logits[0]])
    assert torch.allclose(logits, truth[len(tokens) :], atol=1e-4)
    whole = MaskedReference(AutoModelForCausalLM.from_pretrained(TINY), {}).logits(
        tokens + future, hidden_from * 0 + NEVER
    )
    assert not torch.allclose(logits, whole[len(tokens) :], atol=1e-2), "the evicted entries made no difference"


def test_ratio_zero_is_no_press(model: PreTrainedModel) -> None:
    tokens = prompt_tokens(4)
    for layer, plain in zip(
        prefilled(model, tokens, BpkvPress(0.0)).layers, prefilled(model, tokens).layers, strict=True
    ):
        assert torch.equal(layer.keys, plain.keys) and torch.equal(layer.values, plain.values)


@torch.no_grad()
def test_every_row_of_a_batch_is_compressed_by_itself(model: PreTrainedModel) -> None:
    rows = [prompt_tokens(seed)[:280] for seed in (5, 6)]
    press, together = BpkvPress(0.6), DynamicCache()
    with press(model):
        model(input_ids=torch.tensor(rows), past_key_values=together)
    assert len(press.events) == 2
    for index, row in enumerate(rows):
        for both, alone in zip(together.layers, prefilled(model, row, BpkvPress(0.6)).layers, strict=True):
            assert torch.allclose(both.keys[index], alone.keys[0], atol=1e-5)


@torch.no_grad()
def test_only_the_prefill_is_compressed(model: PreTrainedModel) -> None:
    tokens, held = prompt_tokens(7), DynamicCache()
    with BpkvPress(0.5)(model):
        model(input_ids=torch.tensor([tokens]), past_key_values=held)
        count = held.get_seq_length()
        model(input_ids=torch.tensor([tokens[:9]]), past_key_values=held)
        assert held.get_seq_length() == count + 9
        own = model(input_ids=torch.tensor([tokens])).past_key_values  # a cache that the model made itself
        assert own.get_seq_length() == count


def test_exact_works_where_nothing_is_differentiated(model: PreTrainedModel) -> None:
    tokens, press = prompt_tokens(8), BpkvPress(0.8, readout="exact")
    plain = prefilled(model, tokens, press)
    held = DynamicCache()
    with torch.inference_mode(), press(model):
        model(input_ids=torch.tensor([tokens]), past_key_values=held)
    assert torch.equal(held.layers[-1].keys, plain.layers[-1].keys)


# The pipeline


def pipeline_of(model: PreTrainedModel, name: str = TINY) -> Any:
    return kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=loaded(name).tokenizer)


def engine_answer(pipe: Any, name: str, context: str, question: str, ratio: float, new_tokens: int) -> str:
    """The same conversation on our engine: context, compaction, question, greedy answer."""
    tokenizer = loaded(name).tokenizer
    inputs = pipe.preprocess(context, [question], "", 10**9)
    turns = [inputs["context_ids"][0].tolist(), inputs["questions_ids"][0][0].tolist()]
    length = len(turns[0])
    engine = engine_of(name, length + len(turns[1]) + new_tokens, int(length * (1 - ratio)))
    sampling = SamplingParams(max_new_tokens=new_tokens, stop_tokens=frozenset([tokenizer.eos_token_id]))
    generator = Generator(engine)
    (request,) = generator.generate([generator.add(turns, sampling)])
    return str(tokenizer.decode(request.generated, skip_special_tokens=True))


@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_the_pipeline_answers_as_the_engine_does(model: PreTrainedModel, ratio: float) -> None:
    example, pipe = two_questions(100, 256), pipeline_of(model)
    questions = [exchange.question for exchange in example.exchanges[:2]]
    answers = pipe(example.context, questions=questions, press=BpkvPress(ratio), max_new_tokens=12)["answers"]
    assert answers == [engine_answer(pipe, TINY, example.context, question, ratio, 12) for question in questions]
    if ratio == 0.3:
        wanted = [exchange.answer for exchange in example.exchanges[:2]]
        assert all(answer in reply for answer, reply in zip(wanted, answers, strict=True))


@pytest.mark.slow
def test_the_pipeline_on_a_real_model() -> None:
    model = copy.deepcopy(loaded("smollm2").model)
    model.set_attn_implementation("sdpa")
    pipe = pipeline_of(model, "smollm2")
    context = (
        "The meeting was moved. " * 30 + "The code of the blue door is 4711. " + "Nobody knew why it rained. " * 30
    )
    question = "\nWhat is the code of the blue door?"
    for ratio in (0.2, 0.5):
        reply = pipe(context, question=question, press=BpkvPress(ratio), max_new_tokens=16)["answer"]
        assert reply == engine_answer(pipe, "smollm2", context, question, ratio, 16)


# What is refused, and what is left behind


@pytest.mark.parametrize("ratio", [1.0, 1, -0.1, float("nan"), True, "0.5"])
def test_a_ratio_out_of_range_is_refused(model: PreTrainedModel, ratio: Any) -> None:
    with pytest.raises(ConfigError, match="compression_ratio is"):
        BpkvPress(ratio)
    press = BpkvPress(0.5)
    press.compression_ratio = ratio
    with pytest.raises(ConfigError, match="compression_ratio is"), press(model):
        pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"budget": "0.2", "scope": "layer"}, "budget, scope cannot be given to BpkvPress"),
        ({"page_size": 16}, "page_size cannot be given to BpkvPress"),
        ({"policy": "random", "positions": 4}, "positions is 4, which changes nothing"),
        ({"readout": "direct", "probes": 4}, "probes is 4, which changes nothing"),
        ({"policy": "h2o"}, "h2o needs received_attention, which a finished prefill's cache and last tokens do not"),
        ({"policy": "kvzip"}, "kvzip needs replay"),
        ({"policy": "pyramidkv"}, "pyramidkv keeps more in some layers than in others"),
        ({"policy": "ripplekv"}, "ripplekv keeps more in some layers than in others"),
        ({"policy": "adakv"}, "scope is head, which the policy adakv cannot have"),
        ({"policy": "deferkv"}, "regime is prefill, which the policy deferkv cannot have"),
        ({"policy": "snapvk"}, "not a policy"),
        ({"positons": 4}, "positons is not an option"),
        ({"recent": 4, "positions": 8}, "recent is 4 and positions is 8"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        BpkvPress(0.5, **options)


def test_models_that_are_not_covered_are_refused_by_name() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=16))
    with pytest.raises(ModelError, match="'gpt2' are not supported"), BpkvPress(0.5)(gpt2):
        pass
    with (
        pytest.raises(ModelError, match="sliding-window layers"),
        BpkvPress(0.5)(random_model(configurations()["gemma2"])),
    ):
        pass


@torch.no_grad()
def test_what_is_fed_after_the_prefill_is_kept_and_a_long_chunk_warned_of_once(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    chunk, press = torch.tensor([prompt_tokens(14)[:100]]), BpkvPress(0.5)
    for _ in range(2):
        caplog.clear()
        with press(model):
            assert press.events == []
            held = DynamicCache()
            model(input_ids=chunk, past_key_values=held)
            model(input_ids=chunk[:, :60], past_key_values=held)
            assert not caplog.records
            model(input_ids=chunk, past_key_values=held)
            model(input_ids=chunk, past_key_values=held)
            model(input_ids=chunk, past_key_values=DynamicCache())
        (record,) = caplog.records
        assert "100 tokens follow the 100 that were compressed, and are kept whole" in record.message
        assert held.get_seq_length() == 50 + 60 + 200


def test_a_press_within_another_is_refused(model: PreTrainedModel) -> None:
    press, before = BpkvPress(0.5), state_of(model)
    with pytest.raises(ConfigError, match="Another BpkvPress is in use"), press(model), BpkvPress(0.2)(model):
        pass
    assert state_of(model) == before
    held = prefilled(model, prompt_tokens(15)[:100], press)
    assert held.get_seq_length() == 50, "the model is free again"
    prefill = {"prefilling_press": press, "decoding_press": None}
    for outer in (kvpress.ComposedPress([press]), kvpress.PrefillDecodingPress(**prefill)):
        with pytest.raises(ConfigError, match="cannot be a part of another press"), torch.no_grad(), outer(model):
            model(input_ids=torch.tensor([prompt_tokens(15)[:60]]), past_key_values=DynamicCache())


@pytest.mark.parametrize("given", [None, "smollm2", torch.nn.Linear(2, 2)], ids=str)
def test_what_is_no_model_is_refused(given: Any) -> None:
    with pytest.raises(ModelError, match="transformers model"), BpkvPress(0.5)(given):
        pass


def test_a_context_below_the_protected_tokens_stays_whole(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    press = BpkvPress(0.9)
    assert prefilled(model, prompt_tokens(9)[:30], press).get_seq_length() == 30
    assert "would leave 2 of 30 tokens; raised to the 30 that are protected" in caplog.text
    assert prefilled(model, prompt_tokens(9)[:200], press).get_seq_length() == 36
    assert "would leave 19 of 200 tokens; raised to the 36 that are protected" in caplog.text


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Attention, hooks and attributes of all modules, but for the mark that kvpress leaves on every attention."""
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    attributes = [vars(module).keys() - {"masked_key_indices"} for module in model.modules()]
    return model.config._attn_implementation, hooks, attributes


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_left_as_it_was(model: PreTrainedModel, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    prefilled(model, prompt_tokens(10))
    before = state_of(model)
    prefilled(model, prompt_tokens(10), BpkvPress(0.5, readout="exact"))
    assert state_of(model) == before


FAILURES: list[tuple[dict[str, Any], type[BpkvError]]] = [
    ({"input_ids": None, "inputs_embeds": torch.randn(1, 60, 128)}, InputError),
    ({"attention_mask": torch.tensor([[0] * 5 + [1] * 55])}, InputError),
    ({"position_ids": torch.arange(3, 63)[None]}, InputError),
]


@pytest.mark.parametrize(("changes", "error"), FAILURES)
def test_a_refused_input_leaves_model_and_cache_as_they_were(
    model: PreTrainedModel, changes: dict[str, Any], error: type[BpkvError]
) -> None:
    prefilled(model, prompt_tokens(11)[:60])
    before, held = state_of(model), DynamicCache()
    with pytest.raises(error), BpkvPress(0.3)(model), torch.no_grad():
        model(**{"input_ids": torch.tensor([prompt_tokens(11)[:60]]), "past_key_values": held, **changes})
    assert state_of(model) == before and held.get_seq_length() == 60


def test_another_kind_of_cache_is_refused(model: PreTrainedModel) -> None:
    held = StaticCache(config=model.config, max_cache_len=80)
    with pytest.raises(InputError, match="was given a StaticCache"), BpkvPress(0.3)(model), torch.no_grad():
        model(input_ids=torch.tensor([prompt_tokens(12)[:60]]), past_key_values=held)


def test_a_failure_while_scoring_leaves_model_and_cache_as_they_were(model: PreTrainedModel) -> None:
    prefilled(model, prompt_tokens(13))
    before, held = state_of(model), DynamicCache()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(NumericalError), BpkvPress(0.5)(model), torch.no_grad():
        model.model(input_ids=torch.tensor([prompt_tokens(13)]), past_key_values=held)
    assert state_of(model) == before and held.get_seq_length() == len(prompt_tokens(13))
