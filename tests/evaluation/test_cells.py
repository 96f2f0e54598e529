"""What `bpkv compare` measures on a sample, against plain forwards of transformers with the evicted entries masked."""

import pytest
import torch
from torch import Tensor

from bpkv_trt.evaluation.arm import Arm
from bpkv_trt.evaluation.cells import measure_sample
from bpkv_trt.evaluation.encoded import EncodedSample, encode_sample
from bpkv_trt.evaluation.tasks import make_sample
from bpkv_trt.models.loading import load_model
from bpkv_trt.runtime.engine import Engine, make_pool
from tests.evaluation.small_comparison import LLAMA, comparison, tiny_llama
from tests.runtime.masked_reference import NEVER, MaskedReference

HORIZON, SEED = 12, 3


def sample_of(task: str, lead: int) -> EncodedSample:
    loaded = tiny_llama()

    def count(text: str) -> int:
        return len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

    template = len(loaded.encoder.encode("a")[0]) - count("a")
    return encode_sample(loaded, make_sample(task, SEED, 400 - template, count, lead))


def evicted(arm: Arm, sample: EncodedSample) -> tuple[Tensor, int]:
    """[L, Hkv, N] bool by logical position, and how many tokens had been run when they went."""
    loaded = tiny_llama()
    engine = Engine(loaded, arm.seeded(SEED), make_pool(loaded, 600, 8, caches=3))
    sequence = engine.open()
    engine.encode([(sequence, sample.turns[0])])
    engine.compactor.on_context_step_end(sequence)
    if "deferred" in arm.config.regime:
        engine.follow(sequence, sample.lead[: arm.config.defer])
    length = engine.pool.logical_length(sequence)
    kept = engine.pool.view(sequence).position_table()
    gone = torch.ones(loaded.traits.layers, loaded.traits.kv_heads, length, dtype=torch.bool)
    for layer, head in torch.cartesian_prod(*map(torch.arange, gone.shape[:2])).tolist():
        rows = kept[layer, head]
        gone[layer, head, rows[rows >= 0].long()] = False
    return gone, length


def one_step_kl(truth: MaskedReference, arm: Arm, sample: EncodedSample, gone: Tensor) -> float:
    """The scoring positions of a compaction run again over an uncompacted cache, `gone` hidden by a mask; then the
    tokens that it looked ahead to, which come after the compaction and so are written over what it left.
    """
    loaded, deferred = tiny_llama(), arm.config.defer if "deferred" in arm.config.regime else 0
    config = arm.config.replace(policy="full")
    engine = Engine(loaded, config, make_pool(loaded, 600, 8))
    sequence = engine.open()
    given = [*sample.turns[0], *sample.lead[:deferred]]
    engine.encode([(sequence, given)])
    count = arm.config.positions + deferred
    sides = [engine.host.replay(sequence, count, mask).logits.double().log_softmax(-1) for mask in (None, gone)]
    lookahead = arm.config.lookahead
    draft = continued(truth, given, lookahead)
    early = continued(truth, list(sample.turns[0]), lookahead) if deferred else []
    assert not deferred or early[:deferred] != given[-deferred:], "the lead is what the model would have written"
    weights = torch.tensor([1.0] * (count + len(draft)) + [0.1] * len(early), dtype=torch.float64)
    draft += early  # which has not come true, and follows the draft that is made now
    if draft:
        ahead = [predictions(truth, given + draft, mask, len(given), len(draft)) for mask in (None, gone)]
        sides = [torch.cat(each) for each in zip(sides, ahead, strict=True)]
    full, masked = sides
    return float((full.exp() * (full - masked)).sum(-1) @ weights / weights.sum())


def continued(truth: MaskedReference, given: list[int], count: int) -> list[int]:
    """The full cache's greedy continuation, up to `count` tokens or a stop token."""
    tokens: list[int] = []
    while len(tokens) < count:
        token = int(predictions(truth, given + tokens, None, 0, 1)[0].argmax())
        if token == tiny_llama().tokenizer.eos_token_id:
            break
        tokens.append(token)
    return tokens


def predictions(truth: MaskedReference, tokens: list[int], gone: Tensor | None, moment: int, count: int) -> Tensor:
    """Log-probabilities [count, V] of the last predictions, float64."""
    hidden = torch.full((truth.model.config.num_hidden_layers, 2, len(tokens)), NEVER)
    if gone is not None:
        hidden[..., : gone.shape[-1]][gone] = moment
    return torch.log_softmax(truth.logits(tokens, hidden)[-count:].double(), -1)


@pytest.mark.parametrize(
    ("regime", "task"), [("prefill", "passkey"), ("prefill", "two_questions"), ("deferred", "passkey")]
)
def test_kl_and_answers_are_those_of_masked_forwards(regime: str, task: str) -> None:
    asked = comparison("bpkv,snapkv,bpkv[refine=0,scope=head]", (regime,), horizon=HORIZON)
    record = measure_sample(tiny_llama(), asked, task, SEED)
    sample = sample_of(task, asked.lead_tokens)
    truth = MaskedReference(load_model(LLAMA).model, {})
    given = [token for part in (*sample.turns, sample.lead) for token in part]
    continuation = continued(truth, given, HORIZON)
    count, answer = len(continuation), list(sample.answer)
    assert record["full"]["continuation_tokens"] == count and record["full"]["prompt_tokens"] == sample.prompt_tokens
    full = predictions(truth, given + continuation[:-1], None, 0, count)
    for arm, cell in zip(asked.arms, record["cells"], strict=True):
        gone, moment = evicted(arm, sample)
        ours = predictions(truth, given + continuation[:-1], gone, moment, count)
        kl = (full.exp() * (full - ours)).sum(-1)
        assert cell["tokens"] == count
        assert cell["future_kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-8)
        assert cell["future_kl_max"] == pytest.approx(float(kl.max()), rel=1e-3, abs=1e-8)
        assert cell["future_kl_first"] == pytest.approx(float(kl[0]), rel=1e-3, abs=1e-8)
        assert cell["top1"] == float((full.argmax(-1) == ours.argmax(-1)).double().mean())
        written = predictions(truth, given + answer, gone, moment, len(answer) + 1).argmax(-1)[:-1].tolist()
        assert cell["correct"] == [written[where] == answer[where] for where in sample.references]
        assert cell["entries_fraction"] == pytest.approx(1 - float(gone.double().mean()))
        estimated = arm.config.policy == "bpkv"
        expected = pytest.approx(one_step_kl(truth, arm, sample, gone), rel=1e-3, abs=1e-9) if estimated else None
        assert cell["one_step_kl"] == expected and (cell["estimated_kl"] is not None) == estimated
        retention = 1 - gone.double().mean(-1)
        assert torch.allclose(torch.tensor(cell["retention"]).double(), retention, atol=1e-4)


def test_the_full_cache_loses_nothing() -> None:
    record = measure_sample(tiny_llama(), comparison("full,h2o", budgets="1"), "passkey", SEED)
    for cell in record["cells"]:
        assert cell["future_kl_max"] < 1e-9 and cell["top1"] == 1.0 and cell["common_prefix"] == cell["tokens"]
        assert cell["entries_fraction"] == 1.0 and cell["pages_freed"] == 0 and cell["compactions"] == 0
        assert cell["correct"] == cell["correct_full"] and cell["notes"]
        assert cell["retention"] == [[1.0, 1.0]] * 4


def test_all_regimes_are_measured_on_the_same_tokens() -> None:
    regimes = ("prefill", "deferred", "prefill,generation")
    asked = comparison("bpkv", regimes, "40t", horizon=10)
    record = measure_sample(tiny_llama(), asked, "passkey", SEED)
    assert len({cell["tokens"] for cell in record["cells"]}) == 1
    # 16 decoded tokens come before the first compaction of an answer, and the lead counts.
    assert record["full"]["first_measured"] == max(0, 16 + 1 - record["full"]["lead_tokens"])
    kl = {cell["regime"]: cell["future_kl_mean"] for cell in record["cells"]}
    assert kl["prefill"] == pytest.approx(kl["prefill,generation"], rel=1e-5)  # the answer is within its budget
    assert kl["deferred"] != pytest.approx(kl["prefill"], rel=0.01)


def test_what_a_contender_gets_does_not_depend_on_the_others() -> None:
    alone = measure_sample(tiny_llama(), comparison("h2o"), "passkey", SEED)["cells"]
    among = measure_sample(tiny_llama(), comparison("bpkv,kvzip,h2o,expected_attention,inertiakv"), "passkey", SEED)
    (same,) = [cell for cell in among["cells"] if cell["contender"] == "h2o"]
    timed = ("compress_s", "decode_s")
    assert {k: v for k, v in same.items() if k not in timed} == {k: v for k, v in alone[0].items() if k not in timed}


@pytest.mark.parametrize(
    ("given", "words"),
    [({"tokens": 60}, "too few"), ({"horizon": 3000}, "positions"), ({"memory_limit": 1000}, "MiB")],
)
def test_what_does_not_fit_is_skipped_with_the_reason(given: dict[str, int], words: str) -> None:
    record = measure_sample(tiny_llama(), comparison("bpkv", **given), "passkey", SEED)
    assert record.keys() == {"task", "seed", "skipped"} and words in record["skipped"]


def test_the_budget_of_an_answer_is_kept_in_the_generation_regime() -> None:
    asked = comparison("bpkv,rkv", ("generation",), "24t", tasks=("counting",), tokens=1500, horizon=20)
    record = measure_sample(tiny_llama(), asked, "counting", SEED)
    full = record["full"]
    assert full["first_measured"] == max(0, 16 + 1 - full["lead_tokens"]) and any(full["measured"])
    for cell in record["cells"]:
        assert cell["tokens"] == full["continuation_tokens"] - full["first_measured"]
        assert cell["compactions"] > 0 and cell["entries_after"] == 4 * 2 * (full["prompt_tokens"] + 24)
        assert len(cell["correct"]) == len(cell["correct_full"]) == sum(full["measured"])
