"""`doctor`: facts, problems, remedies, and an exit code that says whether something is broken."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagellm.accel import widening
from sagellm.core import PluginRegistry
from sagellm.core.chaos import Chaos
from sagellm.engines.cli.doctor import command, hardware, software
from sagellm.engines.cli.doctor.model import examine_model
from sagellm.engines.cli.doctor.plugins import examine_plugins
from sagellm.engines.cli.doctor.report import ExaminationContext, Section, as_text, examine
from sagellm.engines.config import EngineConfig
from sagellm.engines.forward import free_cores
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.quantized import quantized_copy


def healthy(context):
    return Section("health", {"pulse": 60, "fever": False, "allergies": []})


def limping(context):
    section = Section("legs")
    section.warn("one leg is short", "walk in circles")
    return section


def broken(context):
    section = Section("arms")
    section.error("an arm is missing", "grow one")
    return section


def failing(context):
    raise ValueError("no stethoscope")


def context_with(registry=None, topology=None, **settings):
    return ExaminationContext(
        registry=registry or PluginRegistry(), config=EngineConfig.from_flat(**settings), topology=topology
    )


def problems_of(section):
    return [(problem.severity, problem.what) for problem in section.problems]


@pytest.mark.parametrize(("examination", "code"), [(healthy, 0), (limping, 0), (broken, 1), (failing, 1)])
def test_only_errors_make_it_fail(sage, monkeypatch, examination, code):
    monkeypatch.setattr(command, "EXAMINATIONS", (examination,))
    assert sage("doctor").code == code
    shown = sage("llm", "doctor", "--json")
    assert (shown.code, shown.json["healthy"]) == (code, code == 0)


def test_problems_come_last_with_their_remedies():
    text = as_text([healthy(None), broken(None), limping(None)])
    assert text.splitlines() == [
        "health",
        "  pulse      60",
        "  fever      no",
        "  allergies  none",
        "",
        "error: an arm is missing",
        "  to fix it: grow one",
        "warning: one leg is short",
        "  to fix it: walk in circles",
    ]
    assert as_text([healthy(None)]).endswith("Nothing is wrong.")


def test_an_examination_that_fails_is_a_finding():
    section = examine(failing, context_with())
    assert problems_of(section) == [("error", "failing could not be examined: ValueError: no stethoscope")]


def test_a_library_that_does_not_import_is_a_finding_with_its_name():
    def lungs(context):
        raise ImportError("libbreath.so is missing", name="breath")

    [problem] = examine(lungs, context_with()).problems
    assert problem.remedy == "reinstall it: pip install --force-reinstall breath"


def test_a_real_run_tells_all_subjects(sage):
    titles = [section["title"] for section in sage("doctor", "--json").json["sections"]]
    assert titles == [
        "software", "devices", "cpu", "threads", "native", "products", "memory", "plugins", "model", "hub",
        "configuration",
    ]  # fmt: skip


def test_a_sound_installation_is_healthy(sage):
    result = sage("doctor")
    assert result.code == 0, result.out


def test_a_broken_plugin_makes_it_fail_and_is_named(sage, install):
    install("broken-plugin", "raise RuntimeError('no moon tonight')")
    result = sage("doctor")
    assert result.code == 1
    assert "no moon tonight" in result.out
    assert "SAGELLM_PLUGINS_DENY=broken-plugin" in result.out


def test_a_setting_that_names_nothing_installed_makes_it_fail(sage, monkeypatch):
    monkeypatch.setenv("SAGELLM_SCHEDULER__PASSES", "[absent]")
    result = sage("doctor")
    assert result.code == 1
    assert "scheduler.passes is 'absent': no installed scheduler_pass is called 'absent'" in result.out


def test_options_that_would_be_used_are_told_and_wrong_ones_are_findings(sage, monkeypatch):
    monkeypatch.setenv("SAGELLM_KV__TIERS", "redis{max_bytes=1GiB, url='redis://me:Geheim1@cache/0'}")
    monkeypatch.setenv("SAGELLM_PREFIX_CACHE__EVICTION_POLICY", "qos{within=reuse}")
    monkeypatch.setenv("SAGELLM_PREDICTOR__NAME", "statistical{windows=5}")
    result = sage("doctor")
    assert result.code == 1
    assert "prefix_cache.eviction_policy qos" in result.out
    assert "weights=None, default_weight=1.0, within=reuse" in result.out
    assert "predictor.name: lifetime_predictor 'statistical' has no option 'windows'" in result.out
    assert "Geheim1" not in result.out + result.err


def test_a_wrong_configuration_is_a_finding(sage, tmp_path):
    (tmp_path / "sagellm.yaml").write_text("kv: {block_size: 0}")
    result = sage("doctor")
    assert (result.code, "kv.block_size is 0" in result.out) == (1, True)


def test_settings_that_differ_are_told(sage, tmp_path):
    (tmp_path / "sagellm.yaml").write_text("kv: {block_size: 8}")
    sections = {section["title"]: section["facts"] for section in sage("doctor", "--json").json["sections"]}
    assert sections["configuration"]["kv.block_size"] == "8 (file sagellm.yaml)"
    assert sections["configuration"]["files read"] == ["sagellm.yaml"]


def test_a_device_that_is_not_there_is_an_error():
    found = dict(problems_of(hardware.examine_devices(context_with(device="cuda:99"))))
    assert "model.device is cuda:99" in found["error"]


def test_no_topology_reader_is_an_error():
    assert problems_of(hardware.examine_cpu(context_with()))[0][0] == "error"
    assert hardware.examine_memory(context_with()).problems == []


def machine(**changes):
    cpu = SimpleNamespace(
        model="CPU",
        architecture="x86_64",
        num_sockets=1,
        num_cores=1,
        num_threads=1,
        allowed_cpu_ids=(0,),
        flags=(),
    )
    sizes = {"memory_bytes": 8 << 30, "memory_limit_bytes": 4 << 30, "memory_available_bytes": 1 << 30}
    return SimpleNamespace(cpu=cpu, **{**sizes, **changes})


def test_little_memory_and_its_limit_are_told():
    section = hardware.examine_memory(context_with(topology=machine()))
    assert section.facts == {"installed": "8 GiB", "cgroup limit": "4 GiB", "available": "1 GiB"}
    assert problems_of(section) == [("warning", "1 GiB of memory are available, little for a model")]
    roomy = machine(memory_limit_bytes=8 << 30, memory_available_bytes=6 << 30)
    section = hardware.examine_memory(context_with(topology=roomy))
    assert (section.facts["cgroup limit"], section.problems) == ("none", [])


def test_a_cpu_without_avx2_is_told():
    assert "no AVX2" in problems_of(hardware.examine_cpu(context_with(topology=machine())))[0][1]


@pytest.mark.parametrize(
    ("threads", "told"), [(64, "they wait for each other"), (1, "torch takes 1 of 8 cores")]
)
def test_threads_are_compared_with_cores(monkeypatch, threads, told):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(free_cores, "read_cpu_time", lambda: None)
    monkeypatch.setattr(hardware, "read_cpu_limit", lambda: None)
    [(severity, what)] = problems_of(hardware.examine_threads(context_with()))
    assert (severity, told in what) == ("warning", True)


@pytest.fixture
def busy_machine(monkeypatch):
    """Four CPUs with four threads of torch, of which others keep two busy."""
    import torch

    for name in free_cores.FIXING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    readings = iter(free_cores.CPUTime(at_s=at, busy_s=3.0 * at, own_s=at) for at in (1.0, 2.0))
    monkeypatch.setattr(free_cores, "read_cpu_time", lambda: next(readings))
    monkeypatch.setattr(hardware, "_LOAD_WINDOW_S", 0.0)
    monkeypatch.setattr(hardware, "read_cpu_limit", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)


def test_busy_neighbours_are_told_with_what_an_engine_makes_of_them(busy_machine):
    section = hardware.examine_threads(context_with())
    assert section.facts["CPUs kept busy by others"] == "2.0 of 4, now"
    assert section.facts["load average"].endswith(" for 4 CPUs, over the last minute")
    assert section.facts["threads of a step"] == "2, as many as there are free cores"
    assert problems_of(section) == [
        (
            "warning",
            "other programs keep 2.0 of 4 CPUs busy; an engine uses 2 of 4 threads meanwhile, and is slower",
        )
    ]


def test_threads_that_the_user_fixed_beside_busy_neighbours_are_told(busy_machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    section = hardware.examine_threads(context_with())
    assert section.facts["threads of a step"] == "4, fixed by OMP_NUM_THREADS"
    [problem] = section.problems
    assert problem.what.endswith("the 4 threads that OMP_NUM_THREADS asks for will wait for each other")
    assert problem.remedy.endswith("or unset OMP_NUM_THREADS")


def test_how_16_bit_weights_are_multiplied_is_told(monkeypatch):
    found = {
        "torch.bfloat16": widening.Widening(min_rows=4, direct_gflops=7.2, widened_gflops=35.0),
        "torch.float16": widening.Widening(min_rows=None, direct_gflops=200.0, widened_gflops=60.0),
    }
    monkeypatch.setattr(widening, "_measured", lambda dtype: found[str(dtype)])
    monkeypatch.setenv("SAGELLM_RATES_FILE", "/cache/rates.json")
    assert hardware.examine_products(context_with()).facts == {
        "bfloat16 weights": "7 GFLOP/s per core, widened to float32 35; widened from 4 rows on",
        "float16 weights": "200 GFLOP/s per core, widened to float32 60; widened never",
        "rates are kept in": "/cache/rates.json",
    }


def test_every_library_that_is_named_is_used_by_a_package():
    used = set()
    installed = {each.metadata["Name"] for each in metadata.distributions()}
    for distribution in {*software.PACKAGES, "sagellm-lab"} & installed:
        for requirement in metadata.requires(distribution) or ():
            used.add(re.match(r"[\w.-]+", requirement)[0].lower().replace("-", "_"))
    others = {name for name in software.OPTIONAL if not name.startswith("sagellm-")}
    if "sagellm-lab" not in installed:
        others -= {"matplotlib"}
    assert {*software.NEEDED, *others} <= used


def test_an_optional_library_is_told_with_what_needs_it(monkeypatch):
    versions = dict.fromkeys(software.PACKAGES + software.NEEDED, "1")
    monkeypatch.setattr(software, "installed_version", versions.get)
    facts = software.examine_software(context_with()).facts
    assert facts["sagellm-server"] == "not installed (optional, for serving)"
    assert facts["triton"] == "not installed (optional, for kernels on GPUs)"


def test_a_missing_package_is_an_error_and_a_mixture_a_warning(monkeypatch):
    versions = dict.fromkeys(software.PACKAGES + software.NEEDED, "1")
    versions["sagellm-comm"] = "2"
    del versions["torch"]
    monkeypatch.setattr(software, "installed_version", versions.get)
    assert problems_of(software.examine_software(context_with())) == [
        ("error", "torch is not installed"),
        ("warning", "the sageLLM packages have different versions: 1, 2"),
    ]


def test_a_file_that_hides_the_namespace_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "sagellm", SimpleNamespace(__file__="/site/sagellm/__init__.py"))
    found = problems_of(software.examine_software(context_with()))
    assert ("error", "/site/sagellm/__init__.py hides packages of the sagellm namespace") in found


def test_clashing_providers_are_told(install):
    source = (
        "from sagellm.core import Provider, hookimpl\n"
        "@hookimpl\n"
        "def sagellm_providers():\n"
        "    return [Provider('scheduler_pass', 'twin', 'builtins:dict', 'one of two')]\n"
    )
    install("twin-a", source)
    install("twin-b", source)
    section = examine_plugins(context_with(registry=PluginRegistry.load(), scheduler_passes="twin"))
    told = [what for severity, what in problems_of(section) if what.startswith("scheduler.passes")]
    assert "twin-a:twin" in told[0]
    assert "twin-b:twin" in told[0]


def test_a_hub_cache_that_cannot_be_written_is_told(monkeypatch, sage, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    sections = {section["title"]: section for section in sage("doctor", "--json").json["sections"]}
    assert sections["hub"]["facts"]["models in it"] == 0
    assert "cannot be written to" in sections["hub"]["problems"][0]["what"]


def test_faults_on_demand_are_a_warning(monkeypatch):
    monkeypatch.setenv("SAGELLM_CHAOS", "7")
    monkeypatch.setattr(software, "CHAOS", Chaos("7"))
    (problem,) = [each for each in software.examine_software(context_with()).problems if "CHAOS" in each.what]
    assert (problem.severity, problem.remedy) == ("warning", "unset SAGELLM_CHAOS")
    assert "SAGELLM_CHAOS=7" in problem.what
    monkeypatch.setenv("SAGELLM_CHAOS", "on")
    monkeypatch.setattr(software, "CHAOS", None)
    assert any(
        "'on' is not a seed" in what for _, what in problems_of(software.examine_software(context_with()))
    )


def test_the_formats_of_a_models_weights_are_told(checkpoint, tmp_path):
    wide = make_checkpoint(tmp_path / "wide", intermediate_size=160)
    quantized, _ = quantized_copy(wide, tmp_path, "gptq-int4-order")
    registry = PluginRegistry.load()
    for path, expected in (
        (quantized, ["14 in INT4 in groups of 32, with zero points, in act order", "10 in F32"]),
        (checkpoint, ["24 in F32"]),
    ):
        assert examine_model(context_with(registry, model=str(path))).facts["weights"] == expected
