"""In which formats the weights of a checkpoint are stored: in words, and with activations rounded too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from sagellm.core import StoredTensor, WeightSource
from sagellm.core.protocols.weight_form import ActivationForm, CodeType, WeightForm

_GROUP_MULTIPLES = {CodeType.INT4: 32, CodeType.UINT4: 32, CodeType.INT6: 16, CodeType.INT8: 16}
"""Products of integers take group sizes that are multiples of these."""


def stored_forms(weights: WeightSource) -> list[str]:
    """Return the formats, each with the number of its tensors, the most frequent first."""
    counted = Counter(_form_of(stored) for stored in weights.tensors.values())
    return [f"{number} in {form}" for form, number in counted.most_common()]


def _form_of(stored: StoredTensor) -> str:
    form = stored.form
    if form is None:
        return stored.dtype
    text = form.code.upper()
    text += f" in groups of {form.group_size}" if form.group_size else ""
    extras = [
        *(["with zero points"] if form.has_zeros else []),
        *(["with offsets"] if form.has_offsets else []),
        *(["in act order"] if form.has_order else []),
        *([_activations(form.activations)] if form.activations is not None else []),
    ]
    return ", ".join((text, *extras))


def _activations(form: ActivationForm) -> str:
    if form.scale is not None:
        return f"activations in {form.code.upper()} by a known scale"
    return f"activations in {form.code.upper()} by " + (
        f"{form.group_size} inputs" if form.group_size else "token"
    )


def with_int8_activations(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors, where integers with plain activations are to be multiplied by int8 ones.

    Activations have a scale for each of the weight's groups, or for a token where there are none or columns
    are in another order. Groups that are not a multiple of 32 inputs (int8: 16) stay as they are.
    """
    return {name: replace(stored, form=_rounded(stored.form)) for name, stored in tensors.items()}


def _rounded(form: WeightForm | None) -> WeightForm | None:
    if form is None or form.activations is not None or form.code not in _GROUP_MULTIPLES:
        return form
    if form.group_size % _GROUP_MULTIPLES[form.code]:
        return form
    group_size = 0 if form.has_order else form.group_size
    return replace(form, activations=ActivationForm(code=CodeType.INT8, group_size=group_size))
