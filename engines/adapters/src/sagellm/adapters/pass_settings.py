"""What another engine's configuration says about our passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Self

from sagellm.core import ConfigError, InvalidInputError, ProviderSpec, StepCost
from sagellm.core.errors import nearest
from sagellm.core.plugins.option_text import read_slots
from sagellm.core.plugins.options import Limits, check_fields
from sagellm.core.protocols.scheduler_ir import STAGES, in_pipeline_order


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """The passes by name, and what they may know that the other engine does not say.

    Fields that are not given keep the defaults. `step_cost` has the coefficients of `StepCost`, in
    nanoseconds.
    """

    passes: tuple[ProviderSpec, ...]  # in the order in which they run
    step_target_ms: Annotated[float, Limits(gt=0)] | None = None
    step_cost: StepCost | None = None
    tenants: Mapping[str, float] = field(default_factory=dict)  # weights, by name
    print: Literal["none", "changed", "ir"] = "none"

    def __post_init__(self) -> None:
        check_fields(self)
        for name, weight in self.tenants.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.001 <= weight <= 1000:
                raise ConfigError(
                    f"tenants has {name!r}: {weight!r}; a weight is a number from 0.001 to 1000"
                )

    @classmethod
    def of(cls, given: Any, where: str) -> Self:
        """Read `{"passes": "order=shortest,share=fair-share", …}`, which stands under `where`.

        Raises ConfigError, which says what is wrong there and what is possible.
        """
        names = [each.name for each in fields(cls)]
        if not isinstance(given, Mapping) or "passes" not in given:
            told = "it is missing" if given is None else f"it is {given!r}"
            raise ConfigError(
                f'{where}: {told}; it must be a mapping with "passes", such as '
                f'{{"passes": "order=shortest,share=fair-share"}}; it takes {", ".join(names)}'
            )
        for name in given:
            if name not in names:
                raise ConfigError(
                    f"{where} has no {name!r}; it takes {', '.join(names)}.{nearest(str(name), names)}"
                )
        values = dict(given)
        try:
            values["passes"] = _pipeline(values["passes"])
            if isinstance(cost := values.get("step_cost"), Mapping):
                values["step_cost"] = StepCost.of(dict(cost))
            return cls(**values)
        except (ConfigError, InvalidInputError) as error:
            raise ConfigError(f"{where}: {error}") from None


def _pipeline(passes: Any) -> tuple[ProviderSpec, ...]:
    """Return what `order=NAME,NAME{option=value},share=none` names, in the order in which they run."""
    named = read_slots(passes, "passes", STAGES)
    if not isinstance(named["passes"], tuple):
        raise ConfigError(f"passes is {passes!r}; it must be a text such as order=NAME, or a list of names")
    kept = {stage: each for stage, each in named.items() if stage not in STAGES or each != "none"}
    return tuple(map(ProviderSpec.of, in_pipeline_order(kept)))
