"""Samples as their texts say they are: everything a prompt claims is counted again from the prompt itself."""

import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpkv_trt.errors import ConfigError, InputError
from bpkv_trt.evaluation.tasks import Sample, make_sample, task_names, variant_names
from bpkv_trt.evaluation.tasks.haystack import NOISE, hidden, noise_lines
from bpkv_trt.evaluation.tasks.passkey import passkey_depth
from bpkv_trt.evaluation.tasks.sizing import largest

ROOT = Path(__file__).resolve().parents[2]
ALL = task_names() + variant_names()
SIZED = tuple(name for name in ALL if name != "counting")
DESIGN = (
    "passkey niah_single niah_multikey niah_multivalue niah_multiquery vt cwe fwe redundant_facts two_questions "
    "system_rule long_text counting"
)
NEEDLE = re.compile(r"^One of the special magic numbers for (\S+) is: (\d{7})\.$", re.MULTILINE)
CODE = re.compile(r"^The code of (\S+) is (\d{5})\.$", re.MULTILINE)


def words(text: str) -> int:
    return len(text.split())


def tokens_of(sample: Sample) -> int:
    parts = [f"{sample.context}\n\n{sample.question}", sample.question_after or "", sample.lead, sample.joined]
    return sum(map(words, parts))


def depth_of(text: str, context: str) -> float:
    """Which share of the noise stands before `text`."""
    before, _, after = context.partition(text)
    seen, rest = (part.count(NOISE[0]) for part in (before, after))
    return seen / (seen + rest)


def test_the_names_are_the_documented_ones() -> None:
    assert task_names() == tuple(DESIGN.split())


@pytest.mark.parametrize("name", ["", "niah", "passkey:needle", "niah_multikey:", "two_questions:second"])
def test_an_unknown_name_is_answered_with_the_choices(name: str) -> None:
    with pytest.raises(ConfigError) as told:
        make_sample(name, 0, 1000, words)
    assert all(choice in str(told.value) for choice in ALL)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SIZED), seed=st.integers(0, 10**6), tokens=st.integers(800, 6000))
def test_a_sample_fills_its_size_and_has_its_references(name: str, seed: int, tokens: int) -> None:
    sample = make_sample(name, seed, tokens, words)
    assert 0.95 * tokens <= tokens_of(sample) <= tokens
    assert (sample.task, sample.seed) == (name.partition(":")[0], seed)
    assert words(sample.lead) >= 16
    assert sample.lead == sample.lead.strip() and sample.joined[:1] in ("", " ")
    assert tuple(sample.joined[start:end] for start, end in sample.spans) == sample.answers
    assert all(a[1] <= b[0] for a, b in zip(sample.spans, sample.spans[1:], strict=False))
    assert all(re.search(rf"\b{answer}\b", sample.context) for answer in sample.answers)
    assert not any(re.search(rf"\b{answer}\b", f"{sample.question} {sample.lead}") for answer in sample.answers)
    assert bool(sample.answers) == (name != "long_text")
    assert not sample.generation


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(SIZED), seed=st.integers(0, 10**6), tokens=st.integers(700, 3000))
def test_more_tokens_never_make_a_sample_smaller(name: str, seed: int, tokens: int) -> None:
    """What the search for the size rests on, checked at sizes that lie one unit apart."""
    smaller = make_sample(name, seed, tokens, words)
    larger = make_sample(name, seed, tokens + 40, words)
    assert tokens_of(smaller) <= tokens_of(larger)


@pytest.mark.parametrize("name", ALL)
def test_seeds_differ_and_repeat(name: str) -> None:
    first, again, other = (make_sample(name, seed, 1000, words) for seed in (7, 7, 8))
    assert first == again
    assert first.context != other.context
    if name != "long_text":
        assert first.answers != other.answers


def test_samples_are_the_same_in_every_process() -> None:
    script = (
        "import hashlib, sys; from bpkv_trt.evaluation.tasks import *; "
        "made = [make_sample(n, 5, 1200, lambda t: len(t.split())) for n in task_names() + variant_names()]; "
        "print(hashlib.sha256(repr(made).encode()).hexdigest()); assert 'torch' not in sys.modules"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(prints) == 1


@pytest.mark.parametrize("name", ALL)
def test_too_few_tokens_are_refused_with_the_fewest_that_do(name: str) -> None:
    """However few were asked for, and although the example of vt grows with them."""
    fewest = next(tokens for tokens in range(2000) if made(name, tokens))
    for tokens in (-20, 10, fewest - 1):
        with pytest.raises(InputError, match=rf"^{tokens} tokens are too few .* takes {fewest} or more"):
            make_sample(name, 3, tokens, words)
    with pytest.raises(InputError, match=rf"^{fewest + 29} tokens are too few .* takes {fewest + 30} or more"):
        make_sample(name, 3, fewest + 29, words, frame_tokens=30)
    assert make_sample(name, 3, fewest + 30, words, frame_tokens=30) == make_sample(name, 3, fewest, words)


def made(name: str, tokens: int) -> bool:
    try:
        return tokens_of(make_sample(name, 3, tokens, words)) <= tokens
    except InputError:
        return False


@pytest.mark.parametrize("name", task_names())
def test_a_lead_is_as_long_as_asked(name: str) -> None:
    plain, long = (make_sample(name, 1, 1500, words, lead_tokens=n) for n in (0, 60))
    assert words(long.lead) >= 60 > words(plain.lead)
    assert long.lead.endswith(f" {plain.lead}") and sorted(long.answers) == sorted(plain.answers)
    with pytest.raises(ConfigError, match="lead_tokens is 1000"):
        make_sample(name, 1, 5000, words, lead_tokens=1000)


@pytest.mark.parametrize("seed", range(11))
def test_passkey_is_swept_over_all_depths(seed: int) -> None:
    sample = make_sample("passkey", seed, 2000, words)
    (key,) = sample.answers
    line = f"The pass key is {key}. Remember it. {key} is the pass key.\n"
    assert len(key) == 5 and f"{sample.context}\n".count(line) == 1
    assert passkey_depth(seed) == seed / 10
    assert depth_of(line.strip(), sample.context) == pytest.approx(seed / 10, abs=0.02)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("name", "needles", "keys", "asked"),
    [
        ("niah_single", 1, 1, 1),
        ("niah_multikey", 4, 4, 1),
        ("niah_multivalue", 4, 1, 1),
        ("niah_multiquery", 4, 4, 4),
        ("niah_multikey:needle", None, None, 1),
    ],
)
def test_needles(name: str, needles: int | None, keys: int | None, asked: int, seed: int) -> None:
    sample = make_sample(name, seed, 1000, words)
    found = NEEDLE.findall(sample.context)
    assert sample.question is not None
    named = [key for key, _ in found if f" {key}" in sample.question and f" {key}" in sample.lead]
    assert len(dict.fromkeys(named)) == asked
    assert sample.answers == tuple(value for key, value in found if key in named), "in the order of the text"
    if needles is None:
        assert len(found) > 50 and len(dict.fromkeys(key for key, _ in found)) == len(found)
        assert NOISE[0] not in sample.context
    else:
        assert (len(found), len(dict.fromkeys(key for key, _ in found))) == (needles, keys)
        assert sample.context.count(NOISE[0]) > 20


@pytest.mark.parametrize("seed", range(8))
def test_the_variables_are_found_by_following_the_assignments(seed: int) -> None:
    sample = make_sample("vt", seed, 1000, words)
    (asked,) = re.findall(r"the value (\d{5}) in", sample.question or "")
    held: dict[str, str] = {}
    for name, value, source in re.findall(r"VAR (\w{5}) = (?:(\d+)|VAR (\w{5}) )$", sample.context, re.MULTILINE):
        held[name] = value or held[source]
    assert tuple(name for name, value in held.items() if value == asked) == sample.answers
    assert len(sample.answers) == 5
    assert sample.context.count("Memorize and track") == 2, "one solved example"


@pytest.mark.parametrize(("tokens", "often", "seldom"), [(1200, 6, 1), (5000, 30, 3)])
def test_common_words_are_the_ten_most_frequent(tokens: int, often: int, seldom: int) -> None:
    sample = make_sample("cwe", 4, tokens, words)
    listed = [word for _, word in re.findall(r"(\d+)\. (\w+)", sample.context.split("\n\n\n")[1])]
    counts = Counter(listed)
    assert tuple(dict.fromkeys(word for word in listed if counts[word] == often)) == sample.answers
    assert len(sample.answers) == 10 and set(counts.values()) == {often, seldom}
    example = [word for _, word in re.findall(r"(\d+)\. (\w+)", sample.context.split("\n\n\n")[0])]
    assert len(Counter(example)) == (20 if often == 6 else 40)


@pytest.mark.parametrize("tokens", range(160, 3000, 160))
def test_coded_words_are_ranked_without_ties(tokens: int) -> None:
    sample = make_sample("fwe", tokens, tokens, words)
    counts = Counter(sample.context.partition("coded words. ")[2].split()).most_common(6)
    assert counts[0][0] == "..." and tuple(word for word, _ in counts[1:4]) == sample.answers
    numbers = [number for _, number in counts]
    assert numbers[:5] == sorted(set(numbers[:5]), reverse=True), "strictly fewer from rank to rank"


@pytest.mark.parametrize("seed", range(8))
def test_a_redundant_fact_stands_twice_far_apart(seed: int) -> None:
    sample = make_sample("redundant_facts", seed, 1000, words)
    facts = Counter(CODE.findall(sample.context))
    ((key, value),) = [fact for fact, times in facts.items() if times == 2]
    assert sample.answers == (value,) and key in (sample.question or "") and len(facts) == 4
    line = f"The code of {key} is {value}."
    first = sample.context.index(line)
    assert (sample.context.rindex(line) - first) / len(sample.context) > 0.3


@pytest.mark.parametrize("seed", range(8))
def test_two_questions_share_one_text(seed: int) -> None:
    second, first = (make_sample(name, seed, 1000, words) for name in ("two_questions", "two_questions:first"))
    facts = dict(CODE.findall(second.context))
    assert len(facts) == 4
    assert first.question == second.question and first.question_after is None
    for sample, question in ((first, first.question), (second, second.question_after)):
        (key,) = re.findall(r"code of (\S+)\?", question or "")
        assert sample.answers == (facts[key],) and key in sample.lead
    assert first.answers != second.answers


def test_the_rule_stands_once_at_the_beginning() -> None:
    sample = make_sample("system_rule", 2, 1000, words)
    (word,) = sample.answers
    assert sample.context.count(word) == 1 and word in sample.context.splitlines()[0]
    assert "rule" in (sample.question or "")


@pytest.mark.parametrize("tokens", [300, 1000, 20000])
def test_a_long_text_has_the_asked_page_once_and_whole(tokens: int) -> None:
    topics = pytest.importorskip("pydoc_data.topics").topics
    sample = make_sample("long_text", 6, tokens, words)
    titles = [
        page.strip() for page in topics.values() if f"'{page.strip().splitlines()[0]}'" in (sample.question or "")
    ]
    assert any(f"{sample.context}\n".count(f"{page}\n") == 1 for page in titles)
    assert 0.95 * tokens <= tokens_of(sample) <= tokens


@pytest.mark.parametrize("length", [300, 1500])
@pytest.mark.parametrize("seed", range(6))
def test_counting_is_right_and_as_long_as_asked(seed: int, length: int) -> None:
    sample = make_sample("counting", seed, 2000, words, answer_tokens=length)
    assert sample.generation and 0.95 * length <= words(sample.joined) <= length
    numbers = [int(answer) for answer in sample.answers]
    if seed % 2 == 0:
        ((start, step),) = re.findall(r"Start with (\d+) and add (\d)", sample.context)
        sums = [(int(start) + i * int(step), int(start) + (i + 1) * int(step)) for i in range(len(numbers) // 2)]
        assert numbers == [n for pair in sums for n in pair]
        assert sample.joined == "".join(f" {a} + {step} = {b}," for a, b in sums)
        return
    given, _, rule = sample.context.partition(". Every further value is the one 4 places before it plus ")
    values = [int(n) for n in re.findall(r"= (\d+)", given)]
    names = re.findall(r"(\w+) = ", given)
    assert len(values) == 4
    for line in sample.joined.split(".")[:-1]:
        source, copied, again, step, total, name, held = re.findall(r"\w+", re.sub(r"\bso\b|[+=,]", " ", line))
        assert step == rule[0] and source == names[-4] and copied == again == str(values[-4])
        assert total == held == str(values[-4] + int(step)) and name not in names
        names.append(name)
        values.append(int(total))
        assert numbers[:3] == [int(copied), int(total), int(total)]
        numbers = numbers[3:]
    assert not numbers


def test_counting_refuses_what_holds_no_step() -> None:
    with pytest.raises(InputError, match="answer_tokens is 2"):
        make_sample("counting", 1, 1000, words, answer_tokens=2)


@given(seed=st.integers(0, 1000), limit=st.integers(0, 5000))
def test_largest_finds_what_trying_all_would_find(seed: int, limit: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(0, 50)]
    while sizes[-1] <= 5000:
        sizes.append(sizes[-1] + rng.choice((0, 1, 7, 400)))
    tail = len(sizes) - 1
    found = largest(lambda n: sizes[n] if n <= tail else sizes[-1] + n, limit, smallest=0)
    fitting = [n for n, size in enumerate(sizes) if size <= limit]
    assert found == (fitting[-1] if fitting else None)


@given(sentences=st.integers(0, 60), places=st.lists(st.floats(0, 1), max_size=4).map(sorted))
def test_hidden_facts_keep_the_noise_and_their_order(sentences: int, places: list[float]) -> None:
    facts = [(place, f"fact {i}") for i, place in enumerate(places)]
    lines = hidden(noise_lines(sentences), facts).splitlines()
    assert [line for line in lines if line.startswith("fact")] == [text for _, text in facts]
    assert [line for line in lines if not line.startswith("fact")] == noise_lines(sentences)
    assert " ".join(noise_lines(sentences)).count(".") == sentences
