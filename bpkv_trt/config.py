"""What a run keeps and how it chooses: one validated, immutable object."""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from bpkv_trt.core.budget import Budget, Scope
from bpkv_trt.errors import ConfigError, quoted
from bpkv_trt.yaml_file import yaml_mapping

Regime = Literal["prefill", "deferred", "generation"]
Preset = Literal["default", "paper"]
_UNITS = {unit.lower(): unit for unit in ("kB", "MB", "GB", "KiB", "MiB", "GiB", "t")}
_UNIT = re.compile(r"([kmg]i?b|t)$", re.I)
SENTENCES = 5  # of mistakes told at once
PROBES = 64  # over all scoring positions, where nothing is said of each
POOLING = 5  # rows, where nothing is said and nothing was rehearsed
ReadoutKind = Literal["direct", "exact"]


def _budget(value: object, info: ValidationInfo) -> Budget:
    if isinstance(value, Budget):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float) or len(str(value)) > 100:
        raise ConfigError(
            f"{info.field_name} is {quoted(value)}; a budget is written as text, such as 0.2, 512t or 64MiB."
        )
    return parse_budget(str(value), str(info.field_name))


def parse_budget(text: str, what: str) -> Budget:
    """As `Budget.parse`, with a hint where only the letter case is wrong: kB and KiB are not what people type."""
    try:
        return Budget.parse(text, what)
    except ConfigError:
        near = _UNIT.sub(lambda found: _UNITS[found[0].lower()], text.strip())
        if near == text.strip():
            raise
        Budget.parse(near, what)  # wrong in other ways too
        raise ConfigError(f"{what} is {text!r}, and units go by letter case; did you mean {near}?") from None


def check_budgets(texts: Sequence[str]) -> None:
    """Raise ConfigError where one of several `budgets` is none, or is given twice, be it in other words."""
    first: dict[Budget, str] = {}
    for text in texts:
        budget = parse_budget(text, "budgets")
        if budget in first:
            raise ConfigError(f"budgets has {first[budget]} and {text}, which are the same; give each once.")
        first[budget] = text


def _regimes(value: object) -> tuple[Regime, ...]:
    """Accept `prefill,generation` as well as a sequence; the order of application does not depend on it."""
    names = value.split(",") if isinstance(value, str) else value
    choice = f"choose from {', '.join(get_args(Regime))}, one or several, comma-separated"
    if not isinstance(names, Iterable):
        raise ConfigError(f"regime is {quoted(value)}; {choice}.")
    given = [name.strip() if isinstance(name, str) else name for name in names]
    if "" in given or not given:
        raise ConfigError(f"regime is {quoted(value)}, with nothing where a name should be; {choice}.")
    if unknown := [name for name in given if name not in get_args(Regime)]:
        raise ConfigError(f"regime is {quoted(value)}, and {quoted(unknown[0])} is not a regime; {choice}.")
    return tuple(regime for regime in get_args(Regime) if regime in given)


def _path(value: object) -> object:
    if isinstance(value, str) and not value.strip():  # to pathlib it is the current directory
        raise ConfigError("layer_table is empty; give the name of a file, or leave it out.")
    return value


BudgetField = Annotated[Budget, BeforeValidator(_budget), PlainSerializer(str, return_type=str)]
Regimes = Annotated[tuple[Regime, ...], BeforeValidator(_regimes)]


class BpkvConfig(BaseModel):
    """Options of compaction. Invalid ones raise ConfigError, with the option, its value and what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    # What this package is for; the others are peers to compare with.
    policy: str = Field("bpkv", description="how entries are scored")
    # The budget at which the published comparisons of eviction policies separate.
    budget: BudgetField = Field(
        Budget.parse("0.2"),
        description="what may stay of the prompt's cache: 0.2, 20%, 512t (tokens per head) or 64MiB",
    )
    # A chain of reasoning stays within a few hundred tokens of its own past.
    generation_budget: BudgetField = Field(
        Budget.parse("512t"), description="what may stay of the answer's cache, in tokens per head"
    )
    # A long prompt is the bulk of the cache, and a long answer must not undo what its compaction freed.
    regime: Regimes = Field(
        ("prefill", "generation"), description="when: prefill, deferred, generation, or several, comma-separated"
    )
    # Heads differ in how much they need; letting all compete keeps what matters wherever it is.
    scope: Scope = Field("global", description="where entries compete: head, layer or global; peers have their own")
    # Ours, by the evidence in profiles/quality/NOTES.md; `paper` is the method as its authors describe it.
    preset: Preset = Field("default", description="options where none are given: default, or paper (as published)")
    # The true derivative ranks evictions far better; an engine, which cannot be differentiated, needs `direct`.
    readout: ReadoutKind = Field("exact", description="how a shift reaches the logits: direct or exact")
    # Trained models park attention on the first tokens; without them answers collapse.
    sinks: int = Field(4, ge=0, description="first tokens that are never evicted")
    # The current sentence; four times the scoring positions, so that none of them scores its own neighbours away.
    recent: int = Field(32, ge=1, description="last tokens that are never evicted")
    # Few positions beat many in our measurements (3 to 16 rather than 64), and cost grows with them.
    positions: int = Field(8, ge=1, description="last positions whose next-token distribution is preserved")
    # What an answer needs of a prompt shows in the answer: most short ones lie within 32 tokens, a page of the pool.
    lookahead: int = Field(
        32, ge=0, le=512, description="tokens drafted before a compaction of the prompt, preserved too, then taken back"
    )
    # What any answer may look up is what the model looks up to repeat its prompt; 512 tokens tell of the others.
    rehearsal: int = Field(
        512, ge=0, description="tokens of a prompt that the model repeats, in passages, before it is compacted; 0: none"
    )
    # As many logits as the cost model of the readout assumes; every event reports the mass they cover.
    top_k: int = Field(32, ge=2, le=2**18, description="logits that the distribution is followed on")
    # Over some 40 positions one each ranks as eight do (profiles/quality/NOTES.md); over few, each needs more.
    probes: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="random probes of the exact readout at every position, by default 64 over all, at least 1",
    )
    # An answer that is found is read on: the rows beside a wanted one are wanted next. A rehearsal tells so itself.
    pooling: int | None = Field(
        None,
        ge=1,
        le=63,
        description="neighbouring rows over which scores are averaged, odd, by default 5, and 1 beside a rehearsal",
    )
    # A draft may take another turn than the answer; the larger part is for what other answers need.
    safeguard: float = Field(
        0.6,
        ge=0,
        le=1,
        description="share of what is kept that goes by attention alone: that of the rehearsal, or, without one, of "
        "every head's latest tokens",
    )
    # An eviction that leaves a head less than 2 % of its attention is outside the first-order formula.
    epsilon: float = Field(0.02, gt=0, lt=1, description="least share of its attention that an eviction leaves a head")
    # The evictions next to the boundary are the ones whose interactions change the outcome.
    refine: int = Field(64, ge=0, le=2**16, description="evictions chosen one at a time at the boundary")
    # Rare enough for scoring to be small beside decoding the tokens between.
    interval: int = Field(128, ge=1, description="tokens between compactions of the answer")
    # As many decoded tokens as positions of the prompt: half of those scored are then the answer's beginning.
    defer: int = Field(8, ge=1, description="tokens decoded before a deferred compaction")
    # Uniform unless a file says otherwise.
    layer_table: Annotated[Path | None, BeforeValidator(_path)] = Field(
        None, description="weights of layers or KV heads, a JSON or safetensors file"
    )
    # TensorRT-LLM's tokens per block; half a page is lost per head, 16 rows, little beside hundreds kept.
    page_size: int = Field(32, ge=1, le=1024, description="rows in a page of the pool")
    # Any fixed number: two runs must agree.
    seed: int = Field(0, ge=0, lt=2**63, description="seed of sampling and of random policies and probes")

    def __init__(self, **options: Any) -> None:
        if flags := [name for name, value in options.items() if isinstance(value, bool)]:
            raise ConfigError(f"{flags[0]} is {options[flags[0]]}, but no option is a switch: give a number or a name.")
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(paragraph(error, type(self).model_fields)) from None

    @model_validator(mode="after")
    def _consistent(self) -> "BpkvConfig":
        if {"prefill", "deferred"} <= set(self.regime):
            raise ConfigError("regime has prefill and deferred, but a prompt is compacted once: choose one of them.")
        if self.recent < self.scoring_positions:
            defer = f" and defer is {self.defer}" if "deferred" in self.regime else ""
            raise ConfigError(
                f"recent is {self.recent} and positions is {self.positions}{defer}, but the scoring positions must lie "
                f"within the recent window: give recent >= {self.scoring_positions}, or fewer of them."
            )
        if self.regime == ("generation",):
            self._refuse_for_answers("lookahead", "rehearsal")
        if self.rehearsal and "rehearsal" in self.model_fields_set and self.safeguard == 0:
            raise ConfigError(
                f"rehearsal is {self.rehearsal} and safeguard is 0, so nothing would go by it: leave rehearsal out, or "
                "give a safeguard."
            )
        if self.pooling is not None and self.pooling % 2 == 0:
            raise ConfigError(f"pooling is {self.pooling}, but rows are averaged around each: give an odd number.")
        if self.generation_budget.kind != "tokens":
            raise ConfigError(
                f"generation_budget is {self.generation_budget}, but how long an answer becomes is not known while it "
                "is written: give tokens per head, such as 512t."
            )
        self._covers(self.budget, "budget", self.sinks + self.recent, "sinks + recent")
        self._covers(self.generation_budget, "generation_budget", self.recent, "recent")
        return self

    def _refuse_for_answers(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) and name in self.model_fields_set:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and regime is generation, which compacts no prompt, so it would "
                    f"change nothing: leave {name} out, or add prefill or deferred to regime."
                )

    @staticmethod
    def _covers(budget: Budget, name: str, protected: int, what: str) -> None:
        if budget.kind == "tokens" and budget.amount < protected:
            raise ConfigError(
                f"{name} is {budget}, but {protected} tokens per head are protected ({what}): give at least "
                f"{protected}t, or protect fewer."
            )

    @property
    def scoring_positions(self) -> int:
        """The most positions that one compaction preserves: a deferred one also scores the tokens decoded before it."""
        return self.positions + self.defer if "deferred" in self.regime else self.positions

    @property
    def replayed_positions(self) -> int:
        """The most tokens that a host is asked to run again: the scoring positions, drafted ones included."""
        return self.scoring_positions + self.drafted

    @property
    def drafted(self) -> int:
        """The most tokens drafted for a compaction; an answer's does not look ahead, a deferred one may do so twice."""
        if self.regime == ("generation",):
            return 0
        return self.lookahead * (2 if "deferred" in self.regime else 1)

    @property
    def rehearsed(self) -> int:
        """The most tokens repeated for a compaction; an answer's repeats nothing, nor does one that secures nothing."""
        return 0 if self.regime == ("generation",) or self.safeguard == 0 else self.rehearsal

    def probes_at(self, positions: int) -> int:
        """Probes of each of so many scoring positions."""
        return self.probes or max(1, PROBES // positions)

    def pooled_rows(self, rehearsed: bool) -> int:
        """Neighbouring rows over which scores are averaged, 1 for none."""
        return self.pooling or (1 if rehearsed else POOLING)

    @property
    def protected(self) -> int:
        """Tokens of every head that a compaction of the prompt never evicts."""
        return self.sinks + self.recent

    def replace(self, **changes: Any) -> "BpkvConfig":
        """The same configuration with some options changed, validated again."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return BpkvConfig(**{**given, **changes})

    @classmethod
    def from_yaml(cls, path: Path | str, **overrides: Any) -> "BpkvConfig":
        """Read options from a YAML mapping; `overrides` win over the file. Raises ConfigError."""
        options = cls.options_in(path)
        try:
            return cls(**{**options, **overrides})
        except ConfigError as error:
            raise ConfigError(f"In the configuration {path}: {error}") from None

    @staticmethod
    def options_in(path: Path | str) -> dict[str, Any]:
        """The options of a YAML mapping by name, yet to be validated. Raises ConfigError where it is none."""
        return yaml_mapping(Path(path), "configuration", "--config", "budget: 0.2")

    def to_yaml(self) -> str:
        """YAML that `from_yaml` reads back to an equal configuration: the options that were given.

        The others are left out, since a policy or a preset may settle what was not given.
        """
        return str(yaml.safe_dump(self.model_dump(mode="json", exclude_unset=True), sort_keys=False))


def paragraph(error: ValidationError, options: Collection[str]) -> str:
    """One sentence per invalid option, in place of pydantic's listing; `options` are those that there are."""
    sentences = []
    for problem in error.errors(include_url=False):
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            sentences.append(_no_option(name, options))
        elif problem["type"] == "missing":
            sentences.append(f"{name} is missing; give it.")
        else:
            rule = problem["msg"][0].lower() + problem["msg"][1:]
            sentences.append(f"{name} is {quoted(problem['input'])}: {rule}.")
    return " ".join(sentences[:SENTENCES])


def _no_option(name: str, options: Collection[str]) -> str:
    if near := difflib.get_close_matches(name[:100].replace("-", "_").lower(), options, n=1):
        return f"{name:.100} is not an option; did you mean {near[0]}?"
    return f"{name:.100} is not an option; the options are {', '.join(options)}."
