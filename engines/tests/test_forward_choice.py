"""Which forward backend runs a model, and why another does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagellm.accel.native import library
from sagellm.accel.native.library import Examination, NativeLibrary
from sagellm.core import WHOLE, PluginRegistry, Provider, Shard, UnsupportedModelError, hookimpl
from sagellm.core.protocols.forward import NullForwardBackend
from sagellm.engines import EngineConfig, LLMEngine
from sagellm.engines.cli.doctor.model import examine_model
from sagellm.engines.cli.doctor.report import ExaminationContext
from sagellm.engines.forward.choice import make_backend
from sagellm.engines.loading import open_checkpoint
from sagellm.engines.models import Qwen3Family
from sagellm.engines.modules import Modules
from sagellm.engines.testing import make_checkpoint

CPU = torch.device("cpu")


class PlainOnly(NullForwardBackend):
    features = frozenset({"qk_norm"})


def float16_only(spec, weights, *, dtype, **_):
    if dtype != torch.float16:
        raise UnsupportedModelError(f"it computes in float16, not {dtype}")
    return PlainOnly(spec, weights)


def broken(*_, **__):
    raise ZeroDivisionError("no luck")


class Acme:
    """Provides backends of this module by name."""

    def __init__(self, *names: str) -> None:
        self.names = names

    @hookimpl
    def sagellm_providers(self) -> list[Provider]:
        return [Provider("forward_backend", name, f"{__name__}:{name}", "") for name in self.names]


@pytest.fixture
def opened(checkpoint):
    return open_checkpoint(checkpoint, [Qwen3Family()])


@pytest.fixture
def registry(monkeypatch):
    """Resolves what `Acme` names here, as this module cannot be imported by its name."""
    found = PluginRegistry.load()
    resolve = found.resolve

    def resolved(kind, name):
        own = name.removeprefix("acme:")
        return globals()[own] if own in ("PlainOnly", "float16_only", "broken") else resolve(kind, name)

    monkeypatch.setattr(found, "resolve", resolved)
    return found


def choose(registry, opened, backend, **changes):
    modules = Modules(registry, EngineConfig.from_flat(forward_backend=backend))
    given = {"device": CPU, "dtype": opened.dtype, "attention": None, "quantizer": None, "shard": WHOLE}
    return make_backend(modules, opened.spec, opened.weights, **(given | changes))


def windowed(opened):
    attention = tuple(replace(each, sliding_window=4) for each in opened.spec.attention)
    return replace(opened, spec=replace(opened.spec, attention=attention))


def test_auto_takes_the_first_that_can(registry, opened):
    registry.register(Acme("PlainOnly", "broken", "float16_only"), distribution="acme")
    chosen = choose(registry, opened, "auto")
    assert (type(chosen.backend), chosen.name, chosen.refusals) == (PlainOnly, "acme:PlainOnly", {})


def test_auto_takes_torch_where_no_other_can_and_keeps_every_reason(registry, opened, caplog):
    registry.register(Acme("PlainOnly", "broken", "float16_only"), distribution="acme")
    chosen = choose(registry, windowed(opened), "auto")
    assert chosen.name == "torch"
    assert chosen.refusals.pop("acme:broken").startswith("forward_backend 'broken' of acme")
    assert "sagellm-accel:native" in chosen.refusals  # the checkpoint's heads have an odd size
    del chosen.refusals["sagellm-accel:native"]
    assert chosen.refusals == {
        "acme:PlainOnly": "it lacks sliding_window, which Qwen3ForCausalLM needs",
        "acme:float16_only": "it computes in float16, not torch.float32",
        "sagellm-accel:cuda": "it has to be named",
    }
    assert "the forward backend acme:PlainOnly is not used: it lacks sliding_window" in caplog.text


def test_a_backend_that_is_named_is_not_replaced(registry, opened):
    registry.register(Acme("PlainOnly"), distribution="acme")
    with pytest.raises(
        UnsupportedModelError, match=r"forward\.backend is 'PlainOnly', which .*it lacks sliding_window"
    ):
        choose(registry, windowed(opened), "PlainOnly")


def test_torch_refuses_what_it_lacks_before_it_reads_a_weight(registry, opened):
    attention = tuple(replace(each, soft_cap=30.0) for each in opened.spec.attention)
    capped = replace(opened, spec=replace(opened.spec, attention=attention), weights=None)
    for backend in ("torch", "auto"):
        with pytest.raises(UnsupportedModelError, match="torch: it lacks soft_cap"):
            choose(registry, capped, backend)


def test_a_refusal_advises_only_what_could_run_the_model(registry, opened):
    registry.register(Acme("PlainOnly"), distribution="acme")
    with pytest.raises(UnsupportedModelError, match=r"\); 'auto' would try sagellm-engines:torch$"):
        choose(registry, windowed(opened), "PlainOnly")
    attention = tuple(replace(each, soft_cap=30.0) for each in opened.spec.attention)
    capped = replace(opened, spec=replace(opened.spec, attention=attention), weights=None)
    with pytest.raises(UnsupportedModelError, match=r"\); no other installed backend can$"):
        choose(registry, capped, "torch")


def test_a_second_kv_group_is_refused_by_name_and_torch_is_taken(registry, opened):
    registry.register(Acme("PlainOnly"), distribution="acme")
    chosen = choose(registry, opened, "auto", extra_features={"kv_groups"})
    assert chosen.name == "torch"
    assert chosen.refusals == {
        "acme:PlainOnly": "it lacks kv_groups, which the configuration asks for",
        "sagellm-accel:native": "it lacks kv_groups, which the configuration asks for",
        "sagellm-accel:cuda": "it has to be named",
    }


def test_torch_has_no_parts_of_a_model(registry, opened):
    with pytest.raises(UnsupportedModelError, match="cannot hold a part of a model"):
        choose(registry, replace(opened, weights=None), "torch", shard=Shard(0, 2))


def test_the_doctor_says_which_backends_run_the_configured_model(registry, checkpoint, monkeypatch):
    registry.register(Acme("PlainOnly", "float16_only"), distribution="acme")
    config = EngineConfig.from_flat(model=str(checkpoint))
    context = ExaminationContext(registry=registry, config=config, topology=None)
    facts = examine_model(context).facts
    assert facts["architecture"] == "Qwen3ForCausalLM"
    assert facts["forward backend acme:PlainOnly"] == "runs it"
    assert facts["forward backend sagellm-engines:torch"] == "runs it"
    monkeypatch.setattr(PlainOnly, "features", frozenset())
    facts = examine_model(context).facts
    reason = "not usable: it lacks qk_norm, which Qwen3ForCausalLM needs"
    assert facts["forward backend acme:PlainOnly"] == reason


def test_the_doctor_says_why_the_native_library_does_not_run_the_model(
    registry, checkpoint, tmp_path, monkeypatch
):
    def told(path):
        config = EngineConfig.from_flat(model=str(path))
        facts = examine_model(ExaminationContext(registry=registry, config=config, topology=None)).facts
        return facts["forward backend sagellm-accel:native"]

    assert told(checkpoint).startswith("not usable: the head size is ")
    path = make_checkpoint(tmp_path / "qwen2", family="qwen2")
    none = Examination(None, {"amx": "it was not built"})
    monkeypatch.setattr(library, "examine", lambda: none)
    assert told(path) == "not usable: no variant of the native library runs here (amx: it was not built)"
    monkeypatch.setattr(library, "examine", lambda: Examination("avx2", {}))
    monkeypatch.setattr(library, "load", lambda variant: NativeLibrary(variant, None))
    assert told(path) == "runs it"


def test_the_doctor_goes_on_without_the_model(registry, tmp_path):
    config = EngineConfig.from_flat(model=str(tmp_path))
    section = examine_model(ExaminationContext(registry=registry, config=config, topology=None))
    assert [problem.severity for problem in section.problems] == ["warning"]


def test_auto_skips_a_backend_that_cannot_keep_kv_as_configured(registry, opened):
    registry.register(Acme("PlainOnly"), distribution="acme")
    with pytest.raises(UnsupportedModelError, match="it lacks kv_int8, which the configuration asks for"):
        choose(registry, opened, "auto", extra_features={"kv_int8"})


def test_a_kv_format_that_no_backend_has_is_refused_with_the_reason(checkpoint):
    with pytest.raises(UnsupportedModelError, match="lacks kv_int8"):
        LLMEngine(str(checkpoint), forward_backend="torch", kv_cache_dtype="int8", num_blocks=8)


def test_a_named_attention_backend_is_not_ignored_by_one_that_has_its_own(tmp_path):
    path = str(make_checkpoint(tmp_path / "qwen2", family="qwen2"))
    for given, taken in (({}, "sagellm-accel:native"), ({"attention_backend": "naive"}, "torch")):
        engine = LLMEngine(path, num_blocks=8, **given)
        info = engine.client.core.info
        reason = info.refusals.get("sagellm-accel:native", "")
        is_native = info.settings["forward.backend"] == taken
        assert is_native or "it was not built" in reason or "lacks" in reason
        engine.close()
    assert reason == "it lacks attention_backends, which the configuration asks for"
    with pytest.raises(UnsupportedModelError, match="lacks attention_backends"):
        LLMEngine(path, num_blocks=8, forward_backend="native", attention_backend="naive")
