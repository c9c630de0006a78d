"""The formats that `quantize` writes, by name, and how compressed-tensors describes them.

Source: the library compressed-tensors (0.20), its `QuantizationArgs` and compressors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from sagellm.core import ConfigError, ProviderSpec, nearest
from sagellm.core.plugins.options import Limits, check_fields
from sagellm.core.protocols.weight_form import CodeType

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_GROUPS = frozenset({"group_size", "clip_ratio", "search_scales"})


@dataclass(frozen=True, kw_only=True)
class SavedFormat:
    """How linears are stored: the codes and who shares a scale, the layout, and what activations become.

    `options` names the fields that a user may set, as in `int4{group_size=32, asymmetric=true}`.
    """

    name: str
    code: CodeType
    layout: str
    summary: str
    options: frozenset[str] = frozenset({"clip_ratio"})
    activations: CodeType | None = None  # rounded token by token; None: as they are
    group_size: Annotated[int, Limits(ge=0)] = 0  # inputs that share a scale; 0: all of an output
    clip_ratio: Annotated[float, Limits(gt=0, le=1)] = 1.0  # of the largest weight
    asymmetric: bool = False  # with zero points
    search_scales: bool = False  # the scale of the least squared error

    @property
    def text(self) -> str:
        """The name with the options that differ from the format's own, which `read_format` reads."""
        known = FORMATS[self.name]
        given = {name: getattr(self, name) for name in sorted(self.options)}
        return ProviderSpec(
            self.name, {name: value for name, value in given.items() if value != getattr(known, name)}
        ).text

    def scheme(self, targets: list[str]) -> dict[str, Any]:
        """Return the entry of `config_groups` for linears in this format."""
        inputs = None if self.activations is None else _numbers(self.activations, "token", is_dynamic=True)
        weights = _numbers(self.code, "group" if self.group_size else "channel", is_dynamic=False)
        if self.group_size:
            weights["group_size"] = self.group_size
        weights["symmetric"] = not self.asymmetric
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": self.layout,
        }


def _numbers(code: CodeType, strategy: str, *, is_dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": code.bits,
        "type": "int" if code in (CodeType.INT4, CodeType.INT8) else "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "dynamic": is_dynamic,
    }


FORMATS = {
    each.name: each
    for each in (
        SavedFormat(
            name="int8",
            code=CodeType.INT8,
            layout=PACKED,
            summary="weights of 8 bits, a scale for each output (W8A16)",
            options=frozenset({"clip_ratio", "group_size"}),
        ),
        SavedFormat(
            name="w8a8",
            code=CodeType.INT8,
            layout=INTEGERS,
            activations=CodeType.INT8,
            summary="the same, and activations of 8 bits, a scale for each token",
        ),
        SavedFormat(
            name="int4",
            code=CodeType.INT4,
            layout=PACKED,
            group_size=128,
            search_scales=True,
            summary="weights of 4 bits, a scale for each 128 inputs of an output (W4A16)",
            options=_GROUPS | {"asymmetric"},
        ),
        SavedFormat(
            name="w4a8",
            code=CodeType.INT4,
            layout=INTEGERS,
            activations=CodeType.INT8,
            group_size=128,
            search_scales=True,
            summary="the same, stored a byte each, and activations of 8 bits",
            options=_GROUPS,
        ),
        SavedFormat(
            name="fp8",
            code=CodeType.FP8_E4M3,
            layout=FLOATS,
            activations=CodeType.FP8_E4M3,
            summary="weights in FP8 (E4M3), a scale for each output, and activations, a scale for each token",
        ),
    )
}


def read_format(text: str, flag: str) -> SavedFormat:
    """Return the format that a flag names. Raises ConfigError for unknown names and options."""
    try:
        spec = ProviderSpec.of(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
    known = FORMATS.get(spec.name)
    if known is None:
        raise ConfigError(
            f"{flag} is {spec.name!r}; it must be one of {', '.join(FORMATS)}.{nearest(spec.name, FORMATS)}"
        )
    for name in spec.options:
        if name not in known.options:
            raise ConfigError(
                f"{flag}: {known.name} has no option {name!r}; it takes {', '.join(sorted(known.options))}."
                f"{nearest(name, known.options)}"
            )
    made = replace(known, **spec.options)
    try:
        check_fields(made)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {known.name}: {error}") from None
    return made
