"""An arm of a comparison: one contender at one budget in one regime, as a configuration."""

from collections.abc import Sequence
from dataclasses import dataclass

from bpkv_trt.config import BpkvConfig, check_budgets, parse_budget
from bpkv_trt.errors import ConfigError
from bpkv_trt.evaluation.contender import Contender
from bpkv_trt.policies.registry import policy_class, refuse_idle, settled


@dataclass(frozen=True)
class Arm:
    """What one trial runs with; `config` is settled."""

    contender: str
    regime: str  # as compared: several regimes of one configuration are joined by commas
    budget: str
    config: BpkvConfig

    def seeded(self, seed: int) -> BpkvConfig:
        """The configuration for a sample: its random choices are the sample's own unless `seed` was given."""
        return self.config if "seed" in self.config.model_fields_set else self.config.replace(seed=seed)


def arms_of(
    contenders: Sequence[Contender], common: BpkvConfig, regimes: Sequence[str], budgets: Sequence[str]
) -> tuple[Arm, ...]:
    """Every contender in every regime at every budget; `common` holds the options that all share.

    In `generation` alone a budget is that of the answer; wherever a prompt is compacted it is that of the prompt.
    Raises ConfigError, naming the contender, where its policy and the options or a regime do not go together.
    """
    named = [",".join(common.replace(regime=regime).regime) for regime in regimes]  # in whichever order they were given
    if twice := [each for each in dict.fromkeys(named) if named.count(each) > 1]:
        raise ConfigError(f"regime has {', '.join(twice)} more than once; give each once.")
    check_budgets(budgets)
    arms = tuple(
        _arm(contender, common, regime, budget) for contender in contenders for regime in named for budget in budgets
    )
    _check_contenders(arms)
    _check_sinks(arms, common)
    return arms


def refuse_idle_options(contenders: Sequence[Contender], common: BpkvConfig, arms: Sequence[Arm]) -> None:
    """Raise ConfigError for a common option that no arm uses, or one of a contender that none of its own arms uses."""
    refuse_idle(common.model_fields_set, [arm.config for arm in arms])
    for contender in contenders:
        try:
            refuse_idle(contender.options, [arm.config for arm in arms if arm.contender == contender.label])
        except ConfigError as error:
            raise ConfigError(f"In the contender {contender.label}: {error}") from None


def _check_contenders(arms: Sequence[Arm]) -> None:
    """One contender by two names would count as two that agree."""
    first: dict[str, str] = {}
    for arm in arms:
        seeded = "seed" in arm.config.model_fields_set
        same = first.setdefault(f"{arm.config.model_dump_json()} {seeded}", arm.contender)
        if same != arm.contender:
            raise ConfigError(f"policies has {same} and {arm.contender}, which are the same contender; give it once.")


def _arm(contender: Contender, common: BpkvConfig, regime: str, budget: str) -> Arm:
    parse_budget(budget, "budgets")  # refused by the name of the option
    answer_only = common.replace(regime=regime).regime == ("generation",)
    if answer_only and parse_budget(budget, "budgets").kind != "tokens":
        raise ConfigError(
            f"budgets has {budget}, and the regime generation bounds an answer whose length is not known while it is "
            "written: give tokens per head, such as 64t, or compare other regimes."
        )
    name = "generation_budget" if answer_only else "budget"
    own = {"policy": contender.policy, "regime": regime, name: budget, **contender.options}
    try:
        config = settled(common.replace(**own))
    except ConfigError as error:
        raise ConfigError(
            f"The contender {contender.label} cannot be compared at {budget}, {regime}: {error}"
        ) from None
    return Arm(contender.label, ",".join(config.regime), budget, config)


def _check_sinks(arms: Sequence[Arm], common: BpkvConfig) -> None:
    for arm in arms:
        if "query_moments" in policy_class(arm.config.policy).requires and arm.config.sinks != common.sinks:
            raise ConfigError(
                f"In the contender {arm.contender}: {arm.config.policy} works with query moments, which are gathered "
                f"once for all, without the first {common.sinks} tokens, so it cannot have sinks of its own. "
                "Give --sinks for all."
            )
