"""What every package keeps to, whatever it contains."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]
PACKAGES = [each if isinstance(each, str) else each["path"] for each in HATCH["workspace"]["members"]]
PROJECTS = {name: tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"] for name in PACKAGES}
MODULES = {
    name: next(iter(project["entry-points"]["sagellm"].values())).removesuffix(".plugin")
    for name, project in PROJECTS.items()
}
# Bookkeeping runs on virtual time too, so clock, random numbers and files are handed in.
DETERMINISTIC = [
    "prefix-cache/src",
    "kv-pool/src",
    "eviction-policy/src",
    "scheduler-ir/src",
    "lifetime-predictor/src",
    "engines/src/sagellm/engines/engine_core",
]

# Test code that looks at the wall clock or sleeps for a time, and why that depends on no machine's speed.
LOOK_AT_CLOCKS = {
    "accel/tests/native/test_native_backend.py": "more time allows more beats",
    "core-protocols/testing/src/sagellm/testing/conformance/process.py": "ends a process that hangs",
    "core-protocols/testing/src/sagellm/testing/kv_tier_model.py": "gives up after minutes",
    "core-protocols/testing/src/sagellm/testing/topology.py": "the best of five, beside a piece of work",
    "core-protocols/testing/src/sagellm/testing/patience.py": "gives up after minutes",
    "core-protocols/tests/test_core_runtime.py": "one time lies between two others",
    "engines/src/sagellm/engines/testing/steps.py": "between two looks",
    "engines/lab/tests/bench/conftest.py": "servers that are told how long they take, on virtual time",
    "engines/server/tests/http/test_server_connections.py": "on virtual time",
    "engines/server/tests/remote/preloaded.py": "a program that waits for its other half",
    "engines/server/tests/remote/test_admin.py": "sets the clock of a file",
    "engines/server/tests/remote/test_supervision.py": "one time lies between two others",
    "engines/tests/test_progress.py": "more time allows more lines",
    "integration-tests/planted_bugs.py": "tells how long a search took",
    "integration-tests/planted_served_bugs.py": "tells how long a search took",
}
CLOCKS = {f"time.{name}{unit}" for name in ("time", "monotonic", "perf_counter") for unit in ("", "_ns")}
SLEEPS = {"time.sleep", "asyncio.sleep"}

TEST_FOLDERS = (
    *(f"{name}/tests" for name in PACKAGES),
    *("integration-tests", "examples"),
    *("core-protocols/testing/src/sagellm/testing", "engines/src/sagellm/engines/testing"),
)

HARD_LINES = 800
SOURCE_SUFFIXES = {".py", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp"}


def sources(*folders: str) -> list[Path]:
    where = folders or tuple(f"{name}/src" for name in PACKAGES)
    found = (path for folder in where for path in sorted((ROOT / folder).rglob("*")))
    return [path for path in found if path.suffix in SOURCE_SUFFIXES]


def trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sources(*folders):
        if path.suffix == ".py":
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def bound_names(node: ast.ImportFrom) -> list[str]:
    """Names that an import binds; with a star, those that the package makes public too."""
    if node.names[0].name == "*":
        public = importlib.import_module("sagellm.core").__all__
        return [name for name in vars(importlib.import_module(node.module or "")) if name in public]
    return [alias.asname or alias.name for alias in node.names]


def called(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.lineno, ast.unparse(node.func)


def tracked_files() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_source_file_has_more_than_800_lines():
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    too_long = {name: size for name, size in sizes.items() if size > HARD_LINES}
    assert not too_long


def surfaces() -> list[str]:
    """Every package, also inside the nine, that makes its names public by an `__all__`."""
    inits = [path for path in sources() if path.name == "__init__.py" and "__all__" in path.read_text()]
    return [".".join(path.parent.parts[path.parts.index("src") + 1 :]) for path in inits]


@pytest.mark.parametrize("module_name", surfaces())
def test_the_public_surface_is_sorted_and_resolves(module_name):
    module = importlib.import_module(module_name)
    names = module.__all__

    def by_kind(name: str) -> tuple[int, str]:  # constants, classes, the rest: ruff's order
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert names in (sorted(names), sorted(names, key=by_kind))
    assert len(names) == len(set(names))
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize("module_name", surfaces())
def test_what_type_checkers_see_is_what_is_public(module_name):
    module = importlib.import_module(module_name)
    tree = ast.parse(Path(module.__file__).read_text())
    guarded = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for block in guarded for node in ast.walk(block) if isinstance(node, ast.ImportFrom))
    nodes = list(imports)
    typed = {name for node in nodes for name in bound_names(node)} - {"*"}
    for node in nodes:
        if node.names[0].name == "*":  # then the names stand in the package's own table
            typed |= set(module._NAMES[node.module.removeprefix(f"{module_name}.")].split())
    own = {"__version__", "lazy", "main", "main_llm"}  # defined where they are public
    assert typed | own == set(module.__all__) | own


def test_all_packages_have_one_version():
    versions = {name: importlib.import_module(module).__version__ for name, module in MODULES.items()}
    assert len(set(versions.values())) == 1, versions


def test_installed_metadata_agrees_with_the_source():
    for name, module in MODULES.items():
        installed = importlib.metadata.version(PROJECTS[name]["name"])
        assert installed == importlib.import_module(module).__version__, name


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_named_after_its_folder_and_has_one_entry_point(package):
    project = PROJECTS[package]
    assert project["name"] == f"sagellm-{package.rpartition('/')[2]}"
    also = {"pytest11"} if package.endswith("testing") else set()  # the plugin of pytest is no provider
    assert set(project["entry-points"]) == {"sagellm"} | also
    assert len(project["entry-points"]["sagellm"]) == 1
    entry_points = importlib.metadata.distribution(project["name"]).entry_points.select(group="sagellm")
    assert [entry_point.value for entry_point in entry_points] == [f"{MODULES[package]}.plugin"]


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "core-protocols"])
def test_a_package_declares_the_range_of_core_that_it_works_with(package):
    core = importlib.import_module("sagellm.core").__version__
    major, minor, _ = core.split(".")
    wanted = f"sagellm-core-protocols>={major}.{minor},<{major}.{int(minor) + 1}"
    assert wanted in PROJECTS[package]["dependencies"]
    readme = (ROOT / package / "README.md").read_text().replace(" ", "")
    assert f">={major}.{minor},<{major}.{int(minor) + 1}" in readme


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_a_typed_part_of_the_namespace(package):
    source = ROOT / package / "src" / "sagellm"
    assert not (source / "__init__.py").exists()
    assert not (source / "kvmgr" / "__init__.py").exists()
    assert (ROOT / package / "src" / Path(*MODULES[package].split(".")) / "py.typed").exists()


def test_plugin_modules_import_core_alone():
    for name, tree in trees():
        if Path(name).name == "plugin.py":
            foreign = [m for m in imported_modules(tree) if not m.startswith(("sagellm.core", "__future__"))]
            assert not foreign, name


def test_only_plugin_modules_implement_the_hooks_that_offer():
    found = [
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("sagellm_providers", "sagellm_commands")
    ]
    assert {Path(name).name for name in found} == {"plugin.py", "hookspecs.py"}
    assert len(set(found)) == len(PACKAGES) + 1


def test_nothing_unpickles_or_evaluates():
    forbidden_modules = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    forbidden_calls = {"eval", "exec", "compile", "torch.load", "numpy.load", "np.load"}
    forbidden_calls |= {f"yaml.{name}" for name in ("load", "safe_load", "full_load", "load_all")}
    for name, tree in trees():
        modules = {module.split(".")[0] for module in imported_modules(tree)}
        assert not modules & forbidden_modules, name
        bad = [(line, call) for line, call in called(tree) if call in forbidden_calls or "recv_pyobj" in call]
        assert not bad, name


def test_no_file_is_read_or_written_in_the_encoding_of_the_locale():
    folders = [*(f"{name}/src" for name in PACKAGES), "examples", "benchmarks"]
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--preview",
        "--select",
        "PLW1514",
        *folders,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bookkeeping_takes_clock_randomness_and_files_from_outside():
    forbidden_modules = {"time", "random", "secrets", "datetime", "tempfile", "threading.Timer"}
    forbidden_calls = ("open", "np.random", "numpy.random", "torch.rand", "os.urandom", "uuid.uuid4")
    for name, tree in trees(*DETERMINISTIC):
        modules = set(imported_modules(tree))
        assert not modules & forbidden_modules, name
        bad = [
            (line, call)
            for line, call in called(tree)
            if call in forbidden_calls or call.startswith(tuple(f"{prefix}." for prefix in forbidden_calls))
        ]
        assert not bad, name


def looks_at_clock(node: ast.AST) -> bool:
    """Whether a call reads the wall clock, or sleeps for longer than it takes to let others run."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" or (node.module == "asyncio" and "sleep" in bound_names(node))
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return name in CLOCKS or (name in SLEEPS and ast.unparse(node.args[0]) != "0")


def test_no_test_depends_on_how_fast_the_machine_is():
    """Wait with the kit, hand in a clock, or count; what must look at the time says why above."""
    found = {name for name, tree in trees(*TEST_FOLDERS) if any(map(looks_at_clock, ast.walk(tree)))}
    assert found == LOOK_AT_CLOCKS.keys()


def test_nothing_is_left_to_be_done():
    marker = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    for path in sources():
        if "testing" in path.parts:  # contract tests have a `make` that their users fill in
            continue
        assert not marker.search(path.read_text()), path.relative_to(ROOT)


def test_test_modules_have_names_of_their_own():
    names = [path.name for path in (*ROOT.glob("*/tests/**/test_*.py"), *ROOT.glob("*/*/tests/**/test_*.py"))]
    names += [path.name for path in (ROOT / "integration-tests").glob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_text_speaks_of_the_product_alone():
    machine_paths = re.compile(r"(?<![\w.~}])/(?:work|home|root|Users|mnt|opt/(?:wheels|pypi))/")
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found = machine_paths.search(text)
        assert not found, f"{path.relative_to(ROOT)}: {text[found.start() : found.start() + 60]!r}"
        assert ".." + "/shared" not in text, path.relative_to(ROOT)
