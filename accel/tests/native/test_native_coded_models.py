"""Decoders whose checkpoint is quantized compute what their dequantized selves compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import native_decoders as decoders
import numpy as np
import pytest
import torch
from native_decoders import NUM_BLOCKS, Decoder, MemoryWeights, Piece, Variety, make_batch, make_decoder

from sagellm.accel.coded import expand, numbers_of
from sagellm.accel.int4 import Int4Quantizer
from sagellm.accel.native.backend import NativeForwardBackend
from sagellm.accel.native.library import VARIANTS, load
from sagellm.core import WHOLE, Shard, TensorSpec, UnsupportedModelError, WeightSource
from sagellm.core.protocols.weight_form import ActivationForm, CodedRows, CodeType, WeightForm

CPU = torch.device("cpu")
IDS = [(17 * i * i + 5 * i) % decoders.VOCAB for i in range(45)]
BLOCKS = [7, 3, 11, 0, 9, 2]

INT4, INT8 = WeightForm(code=CodeType.INT4, group_size=16), WeightForm(code=CodeType.INT8)
ZEROS = WeightForm(code=CodeType.INT4, group_size=48, has_zeros=True)
OFFSETS = WeightForm(code=CodeType.INT8, group_size=16, has_offsets=True)
FP8, FP4 = WeightForm(code=CodeType.FP8_E4M3), WeightForm(code=CodeType.FP4_E2M1, group_size=16)
INT8_TOKENS, FP8_TOKENS = ActivationForm(code=CodeType.INT8), ActivationForm(code=CodeType.FP8_E4M3)


class CodedWeights(WeightSource):
    """Weights in memory; those whose name ends as a form's key are quantized at random."""

    def __init__(self, decoder: Decoder, forms: Mapping[str, WeightForm]) -> None:
        self._plain = MemoryWeights(decoder.weights, "F32")
        self.tensors = dict(self._plain.tensors)
        self._rows: dict[str, CodedRows] = {}
        self._orders: dict[str, Any] = {}
        for name, weight in decoder.weights.items():
            for end, form in forms.items():
                if name.endswith(end):
                    self._quantize(name, weight.shape, form)

    def _quantize(self, name: str, shape: tuple[int, ...], form: WeightForm) -> None:
        random, groups = np.random.default_rng(len(self._rows)), form.num_groups(shape[1])
        codes = random.integers(0, 256, (shape[0], shape[1] * form.code.bits // 8), np.uint8)
        numbers = numbers_of(form.code)
        if form.code.bits == 8:
            codes[~np.isfinite(numbers)[codes]] = 1
        size = float(np.sqrt(np.mean(np.square(numbers[np.isfinite(numbers)])))) * np.sqrt(shape[1])
        self._rows[name] = CodedRows(
            codes=codes,
            scales=random.uniform(0.5 / size, 1.5 / size, (shape[0], groups)).astype(np.float32),
            zeros=random.integers(-3, 3, (shape[0], groups), np.int8) if form.has_zeros else None,
            offsets=random.normal(0, 0.05, (shape[0], groups)).astype(np.float32)
            if form.has_offsets
            else None,
        )
        order = np.random.default_rng(shape[1]).permutation(shape[1])
        self._orders[name] = order if form.has_order else None
        self.tensors[name] = replace(self.tensors[name], dtype=form.code.upper(), form=form)

    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> np.ndarray[Any, Any]:
        assert tensor.name not in self._rows, "codes are no tensor"
        return self._plain.get(tensor, shard)

    def coded_rows(self, tensor: TensorSpec, rows: slice, shard: Shard = WHOLE) -> CodedRows:
        return self._rows[tensor.name][rows]

    def input_order(self, tensor: TensorSpec) -> Any:
        return self._orders.get(tensor.name)

    def dequantized(self) -> dict[str, Any]:
        """Return all weights, those that are quantized as what they stand for."""
        values: dict[str, Any] = dict(self._plain.values)
        for name, rows in self._rows.items():
            form = self.tensors[name].form
            assert form is not None
            values[name] = expand(rows, form, self._orders[name])
        return values


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    try:
        load(name)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    return name


def logits_of(
    decoder: Decoder, weights: WeightSource, variant: str, dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    backend = NativeForwardBackend(decoder.spec, weights, device=CPU, dtype=dtype, variant=variant, **options)
    backend.initialize_kv_caches([decoders.layout_of(decoder.spec, "float32")], [NUM_BLOCKS])
    parts = [
        backend.forward(make_batch([Piece(IDS, BLOCKS, start, stop)]))
        for start, stop in ((0, 40), (40, 41), (41, 45))
    ]
    return torch.cat(parts)


MODELS: dict[str, tuple[Variety, dict[str, WeightForm]]] = {
    "all in int4": (Variety(), {end: INT4 for end in ("q.weight", "k.weight", "v.weight", "o.weight")}),
    "gated in int8": (Variety(has_bias=True), {"gate.weight": INT8, "up.weight": INT8}),
    "value in another form": (Variety(), {"q.weight": ZEROS, "k.weight": ZEROS, "v.weight": OFFSETS}),
    "three forms": (Variety(has_bias=True), {"q.weight": FP4, "v.weight": FP8}),
    "gate alone": (Variety(), {"gate.weight": OFFSETS, "o.weight": FP8}),
    "tied embedding": (Variety(), {"embedding": INT8}),
    "embedding and head": (Variety(is_tied=False), {"embedding": INT4, "head.weight": OFFSETS}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_bits_of_the_dequantized_model(name: str, dtype: torch.dtype, variant: str) -> None:
    variety, forms = MODELS[name]
    decoder = make_decoder(variety)
    coded = CodedWeights(decoder, forms)
    plain = MemoryWeights(coded.dequantized(), "F32")
    assert any(held.form is not None for held in coded.tensors.values())
    assert torch.equal(logits_of(decoder, coded, variant, dtype), logits_of(decoder, plain, variant, dtype))


def test_inputs_in_another_order(variant: str) -> None:
    ordered = replace(INT4, has_order=True)
    for variety in (Variety(), Variety(is_tied=False)):
        decoder = make_decoder(variety)
        ends = ("q.weight", "k.weight", "o.weight", "gate.weight", "up.weight", "embedding")
        coded = CodedWeights(decoder, {end: ordered for end in ends})
        plain = MemoryWeights(coded.dequantized(), "F32")
        logits = logits_of(decoder, coded, variant, torch.float32)
        torch.testing.assert_close(
            logits, logits_of(decoder, plain, variant, torch.float32), rtol=1e-4, atol=1e-4
        )


def rounded(x: np.ndarray[Any, Any], form: ActivationForm) -> np.ndarray[Any, Any]:
    """Round activations (rows, in) as a form says."""
    limit = 127.0 if form.code is CodeType.INT8 else 448.0
    rows = torch.from_numpy(x.astype(np.float32))
    rows = rows.view(len(x), -1, form.group_size or x.shape[1])
    scale = rows.abs().amax(-1, keepdim=True) / limit if form.scale is None else torch.tensor(form.scale)
    codes = (rows / scale).clamp(-limit, limit)
    codes = codes.round() if form.code is CodeType.INT8 else codes.to(torch.float8_e4m3fn).float()
    return (codes * scale).double().view(x.shape).numpy()


@pytest.mark.parametrize(
    "form",
    [
        replace(INT8, activations=INT8_TOKENS),  # both multiplied as integers
        replace(INT8, activations=replace(INT8_TOKENS, scale=0.05)),
        replace(WeightForm(code=CodeType.INT4, group_size=32), activations=INT8_TOKENS),
        replace(ZEROS, activations=INT8_TOKENS),
        replace(OFFSETS, activations=replace(INT8_TOKENS, group_size=16)),
        replace(FP8, activations=FP8_TOKENS),
    ],
    ids=str,
)
def test_activations_are_rounded_before_the_product(
    form: WeightForm, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "HEADS", 8)  # so that outputs of attention have groups of 32
    decoder = make_decoder(Variety())
    end = "o.weight" if form.group_size == 32 else "q.weight"
    coded = CodedWeights(decoder, {end: form})
    values = {name: value.astype(np.float64) for name, value in coded.dequantized().items()}
    original = decoders._linear

    def rounding(x: Any, linear: Any, weights: Any) -> Any:
        activations = form.activations
        assert activations is not None
        is_coded = linear.weight.name.endswith(end)
        return original(rounded(x, activations) if is_coded else x, linear, weights)

    monkeypatch.setattr(decoders, "_linear", rounding)
    expected = decoders.reference_logits(decoder.spec, values, IDS)
    logits = logits_of(decoder, coded, variant, torch.float32).double().numpy()
    unrounded = CodedWeights(decoder, {end: replace(form, activations=None)})
    plain = logits_of(decoder, unrounded, variant, torch.float32).double().numpy()
    error = np.abs(logits - expected).max()
    assert error < 1e-3
    assert error < np.abs(plain - expected).max() / 4  # which would be had without rounding


def test_a_quantizer_takes_what_is_stored_plain(variant: str) -> None:
    decoder = make_decoder(Variety())
    quantizer = Int4Quantizer()
    coded = CodedWeights(decoder, {"q.weight": INT8, "k.weight": INT8, "v.weight": INT8})
    logits_of(decoder, coded, variant, torch.bfloat16, quantizer=quantizer)
    assert quantizer.metrics().num_tensors == 2 * 4 + 1  # output, gate, up and down of two layers, the head


def test_groups_that_do_not_fit_are_refused(variant: str) -> None:
    decoder = make_decoder(Variety())
    coded = CodedWeights(decoder, {"q.weight": replace(INT4, group_size=24)})
    with pytest.raises(UnsupportedModelError, match=r"layer\.0\.q\.weight has 48 inputs in groups of 24"):
        logits_of(decoder, coded, variant, torch.float32)
