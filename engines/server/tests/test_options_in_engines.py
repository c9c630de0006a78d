"""Options reach providers from a configuration; a provider with options is two files: class and plugin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sagellm.core import ConfigError, ProviderSpec, QuantizationGranularity, UnsupportedModelError
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.cli.sampling_flags import SAMPLING_NAMES
from sagellm.engines.sampling.params import PARAMETERS
from sagellm.server.http.body_params import _AS_THEY_ARE
from sagellm.server.http.body_schema import CompletionBody

NO_MODEL = "/there/is/no/model"
IMPLEMENTATION = """
from dataclasses import dataclass

from sagellm.accel import Int8Quantizer
from sagellm.core.protocols.scheduler_ir import NullSchedulerPass
from sagellm.engines.forward.torch_backend import TorchForwardBackend

MADE = []


@dataclass(frozen=True)
class Notes(NullSchedulerPass):
    text: str
    ageing_s: float = 30.0

    def __post_init__(self):
        MADE.append(self)


class Rounding(Int8Quantizer):
    def __init__(self, config=None, *, seed: int = 0):
        super().__init__(config)
        MADE.append((self._config, seed))


class Noted(TorchForwardBackend):
    def __init__(self, spec, weights, *, note: str = "none", **given):
        super().__init__(spec, weights, **given)
        MADE.extend([note] if note != "none" else [])
"""
PLUGIN = """
from sagellm.core import Provider, hookimpl

@hookimpl
def sagellm_providers():
    return [
        Provider("scheduler_pass", "notes", "acme_options:Notes", "takes a note"),
        Provider("quantizer", "rounding", "acme_options:Rounding", "int8, rounded at random"),
        Provider("forward_backend", "noted", "acme_options:Noted", "torch, with a note"),
    ]
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Install a pass and a quantizer with options: two files. Return what is made of them."""
    info = tmp_path / "acme_options-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-options\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sagellm]\nacme = acme_options_plugin\n")
    (tmp_path / "acme_options.py").write_text(IMPLEMENTATION)
    (tmp_path / "acme_options_plugin.py").write_text(PLUGIN)
    for name in ("acme_options", "acme_options_plugin"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    import acme_options

    return acme_options.MADE


def test_a_pass_and_a_quantizer_get_their_options(make_engine, made):
    with make_engine(
        scheduler_passes="notes{text=first},notes{text: second, ageing_s: 3}",
        quantization={
            "name": "rounding",
            "options": {"seed": 7, "granularity": "per_group", "group_size": 8},
        },
    ) as engine:
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    (config, seed), *passes = made
    assert (config.granularity, config.group_size, seed) == (QuantizationGranularity.PER_GROUP, 8, 7)
    assert [(each.text, each.ageing_s) for each in passes] == [("first", 30.0), ("second", 3.0)]


@pytest.mark.parametrize(
    ("quantization", "least", "most"),
    [
        ("fp8", 8.0, 16.0),
        ("fp8_e5m2", 2048.0, 4096.0),
        ("int8{asymmetric=true}", 0.45, 0.5 + 1e-4),
        ("int4{asymmetric=true, search_scales=false, group_size=8}", 0.45, 0.5 + 1e-4),
    ],
)
def test_what_native_does_not_make_runs_with_torch(make_engine, quantization, least, most):
    prompt, params = [[5, 6, 7, 8, 9]], SamplingParams(max_tokens=2, temperature=0)
    with make_engine(quantization=quantization) as engine:
        metrics = engine.metrics().modules["quantizer"]
        assert least < metrics.max_error_steps <= most
        assert metrics.quantized_bytes < metrics.original_bytes / 2
        assert engine.config.forward.backend.name.endswith("torch")
        tokens = engine.generate(prompt, params)[0].outputs[0].token_ids
    with make_engine(quantization=quantization, forward_backend="torch") as engine:
        assert engine.generate(prompt, params)[0].outputs[0].token_ids == tokens
    with pytest.raises(UnsupportedModelError, match="symmetric int8 with a scale for each output"):
        make_engine(quantization=quantization, forward_backend="native")


def test_options_of_int4_reach_it_and_leave_its_groups(make_engine):
    with make_engine(quantization="int4{search_scales=false, clip_ratio=1.0}") as engine:
        metrics = engine.metrics().modules["quantizer"]
        assert 0.45 < metrics.max_error_steps <= 0.5 + 1e-4
        assert engine.config.model.quantization.options == {"search_scales": False, "clip_ratio": 1.0}
    with make_engine(quantization="int4") as engine:
        assert engine.metrics().modules["quantizer"].max_error_steps > 0.6


def test_the_configuration_of_an_engine_keeps_the_options_of_its_backend(make_engine, made):
    with make_engine(forward_backend="noted{note=seen}") as engine:
        assert engine.config.forward.backend == ProviderSpec("noted", {"note": "seen"})
    assert made == ["seen"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"scheduler_passes": "notes{text=a, aging_s=3}"},
            "scheduler.passes: scheduler_pass 'notes' has no option 'aging_s'; "
            "it takes text (a text; required), ageing_s (a number; default 30.0). Did you mean 'ageing_s'?",
        ),
        (
            {"scheduler_passes": "notes{ageing_s=3}"},
            "scheduler.passes: scheduler_pass 'notes' needs the option text (a text; required)",
        ),
        (
            {"quantization": "rounding{seed=x}"},
            "model.quantization: quantizer 'rounding': seed is 'x'; it must be a whole number",
        ),
        (
            {"kv_pool": "paged{pages=3}"},
            "kv.pool: kv_pool 'paged' has no option 'pages'; it takes no options.",
        ),
    ],
)
@pytest.mark.usefixtures("made")
def test_a_mistake_is_told_by_its_setting_before_a_model_is_looked_for(settings, message):
    with pytest.raises(ConfigError) as caught:
        LLMEngine(model=NO_MODEL, device="cpu", **settings)
    assert str(caught.value) == message


def test_one_declaration_makes_a_parameter_of_python_flags_and_bodies():
    assert set(PARAMETERS) == SAMPLING_NAMES
    for name, each in PARAMETERS.items():
        declared = SamplingParams.__dataclass_fields__[name].type
        if each.type in (int, float, bool):
            assert declared.split(" ")[0] == each.type.__name__, "the flag has the type of the field"
            assert name in CompletionBody.__struct_fields__
            assert name in _AS_THEY_ARE or name in ("max_tokens", "logprobs")
