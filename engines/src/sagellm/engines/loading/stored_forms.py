"""In which formats the weights of a checkpoint are stored, in words."""

from __future__ import annotations

from collections import Counter

from sagellm.core import StoredTensor, WeightSource
from sagellm.core.protocols.weight_form import ActivationForm


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
