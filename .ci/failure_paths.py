"""Has parts of one package fail in an environment that has its run-time dependencies alone.

    python .ci/failure_paths.py prefix-cache

What is imported when something fails is imported at no other time, so what it lacks shows only here.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from sagellm.core import (
    DEFAULT,
    BlockAllocationRequest,
    BlockHeader,
    CachedNode,
    ConfigError,
    EngineError,
    InvalidInputError,
    KVTierProtocol,
    NodeRanking,
    OutOfBlocksError,
    PluginError,
    PluginRegistry,
    Provider,
    RequestRows,
    TierRequest,
    UnknownProviderError,
    UnsupportedModelError,
    hookimpl,
    pack,
    run_to_end,
)
from sagellm.core.protocols.draft_proposer import NullDraftProposer
from sagellm.core.protocols.eviction import NullEvictionPolicy
from sagellm.core.protocols.kv_tier import NullKVTier
from sagellm.core.protocols.lifetime import NullLifetimePredictor
from sagellm.core.protocols.scheduler_ir import NullSchedulerPass

TOOLS = ("pytest", "hypothesis")
POLICY_CALLS = (
    *("on_insert", "on_split", "on_hit", "on_resize", "on_remove"),
    *("add_candidate", "remove_candidate", "victim", "victims", "num_victim_blocks"),
)
TIER_CALLS = ("submit", "poll", "contains", "stored", "metrics")


# -- what fails


def fail(*_: object, **__: object) -> NoReturn:
    """Take the place of a method."""
    raise RuntimeError("on purpose")


class FailingPolicy(NullEvictionPolicy):
    """Evicts the least recently used leaf first, and one method fails."""

    def __init__(self, call: str = "") -> None:
        self._ranking = NodeRanking(attrgetter("last_access_ns"))
        setattr(self, call, fail)

    def add_candidate(self, node: CachedNode) -> None:
        """Rank it."""
        self._ranking.add(node)

    def remove_candidate(self, node: CachedNode) -> None:
        """Forget it."""
        self._ranking.discard(node)

    def victim(self) -> CachedNode | None:
        """Return the first."""
        return self._ranking.first()


class FailingPredictor(NullLifetimePredictor):
    """Knows nothing, and one method fails."""

    def __init__(self, call: str = "") -> None:
        super().__init__()
        setattr(self, call, fail)


class FailingProposer(NullDraftProposer):
    """Has no guess, and one method fails."""

    def __init__(self, call: str = "") -> None:
        super().__init__()
        setattr(self, call, fail)


class FailingTier(NullKVTier):
    """Has no room, and one method fails."""

    def __init__(self, max_bytes: int = 1 << 20, call: str = "") -> None:
        super().__init__(max_bytes)
        setattr(self, call, fail)


class FailingPass(NullSchedulerPass):
    """Fails in its first step."""

    def __init__(self) -> None:
        self._is_first = True

    def run(self, ir: Any) -> Any:
        """Fail once, then decide nothing."""
        if self._is_first:
            self._is_first = False
            fail()
        return ir


class Plugin:
    """Offers everything above as `failing`."""

    @hookimpl
    def sagellm_providers(self) -> list[Provider]:
        """Return a provider of each kind."""
        kinds = {
            "draft_proposer": FailingProposer,
            "eviction_policy": FailingPolicy,
            "lifetime_predictor": FailingPredictor,
            "kv_tier": FailingTier,
            "scheduler_pass": FailingPass,
        }
        return [
            Provider(kind, "failing", f"failure_paths:{made.__name__}", "") for kind, made in kinds.items()
        ]


# -- how it is seen


class Log(logging.Handler):
    """Keeps the errors that sagellm logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.errors.append(record.getMessage())


@contextmanager
def logged(part: str, *, at_most: int = 1) -> Iterator[None]:
    """Expect an error to be logged that has such a part, and few others."""
    logger, log = logging.getLogger("sagellm"), Log()
    logger.addHandler(log)
    logger.propagate = False
    yield
    logger.removeHandler(log)
    assert 1 <= len(log.errors) <= at_most, log.errors
    assert part in log.errors[0], log.errors


def expect(error: type[Exception], part: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Expect a call to raise an error with a message that has such a part."""
    message = f"no {error.__name__}"
    try:
        call(*args, **options)
    except error as raised:
        message = str(raised)
    assert part in message, f"{message!r} instead of {part!r}"


HEADER = BlockHeader(
    parent_hash=bytes(16),
    token_ids=pack([1] * 4),
    namespace=DEFAULT,
    model_fingerprint="",
    layout="",
    dtype="",
)


def store_and_fetch(tier: KVTierProtocol) -> None:
    """Expect what was put to come back."""
    fetched = memoryview(bytearray(4))
    assert run_to_end(tier, [TierRequest("put", HEADER, memoryview(b"1234"))]) == ("done",)
    assert run_to_end(tier, [TierRequest("get", HEADER, fetched)]) == ("done",)
    assert bytes(fetched) == b"1234"


@contextmanager
def broken_plugin() -> Iterator[None]:
    """Install a plugin, `broken`, that does not import."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder, "broken-1.0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[sagellm]\nbroken = broken_plugin\n")
        Path(folder, "broken_plugin.py").write_text("import missing\n")
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        yield


# -- what each package does


def core_protocols() -> None:
    """A plugin fails when it is loaded, and when it is called; a module that moved is not installed."""
    from sagellm.core import call_plugin

    with broken_plugin():
        errors = [str(each.error) for each in PluginRegistry.load().plugins if each.distribution == "broken"]
        assert "No module named 'missing'" in errors[0], errors
    expect(PluginError, "it: call failed; SystemExit: 3", call_plugin, "it", "call", sys.exit, 3)
    expect(ImportError, "pip install sagellm-testing", import_module, "sagellm.core.testing")


def testing() -> None:
    """A plugin that is to be checked is not installed, or fails when it is loaded."""
    from sagellm.testing.conformance import Conformance

    expect(UnknownProviderError, "sagellm-core-protocols", Conformance, "sagellm-core")
    with broken_plugin():
        expect(PluginError, "No module named 'missing'", list, Conformance("broken").run())


def prefix_cache() -> None:
    """A policy fails in each method; so do a sink of events and a keeper of evicted blocks."""
    from sagellm.kvmgr.prefix_cache import RadixPrefixCache

    def use(cache: RadixPrefixCache) -> list[Any]:
        """Do what calls every method of a policy."""
        random, given, next_block = Random(0), [], 0
        for _ in range(60):
            tokens = [random.randrange(3) for _ in range(random.randint(1, 8))]
            next_block += len(tokens)
            given.append(cache.insert_prefix(tokens, range(next_block - len(tokens), next_block)).block_ids)
            match = cache.lock(cache.match_prefix(tokens), num_lookup_tokens=len(tokens))
            given.append(cache.evict(random.randint(1, 9)))
            cache.unlock(match)
            cache.check_integrity()
        return given

    expected = use(RadixPrefixCache(24, 1))
    for call in POLICY_CALLS:
        with logged("eviction policy FailingPolicy failed"):
            assert use(RadixPrefixCache(24, 1, eviction_policy=FailingPolicy(call))) == expected, call
    for listen in (RadixPrefixCache.subscribe, RadixPrefixCache.keep_evicted):
        cache = RadixPrefixCache(24, 1)
        listen(cache, fail)
        with logged(""):
            assert use(cache) == expected


def eviction_policy() -> None:
    """A predictor fails under the policy that asks it; options are wrong."""
    from sagellm.kvmgr.eviction import PredictiveEvictionPolicy, QoSEvictionPolicy

    policy = PredictiveEvictionPolicy(lifetime_predictor=FailingPredictor("predict"))
    node = CachedNode(node_id=1, num_blocks=1, depth=1, created_ns=0, last_access_ns=0)  # type: ignore[arg-type]
    expect(RuntimeError, "on purpose", policy.on_insert, node)
    expect(ConfigError, "horizon_s", PredictiveEvictionPolicy, horizon_s=0)
    expect(ConfigError, "within", QoSEvictionPolicy, within="nothing")


def kv_pool() -> None:
    """Tiers fail, with and without a thread of their own; a server is away; torch is not installed."""
    from sagellm.kvmgr.kv_pool import BackgroundTier, HBMBackend, PagedKVPool, TieredKVStorage
    from sagellm.kvmgr.kv_pool.tiers.providers import file_tier, host_tier, redis_tier

    for call in TIER_CALLS:
        with logged("the KV tier 'failing' failed"):
            tiers = TieredKVStorage({"failing": FailingTier(call=call), "host": host_tier(1 << 20)})
            store_and_fetch(tiers)
            assert tiers.metrics().num_failed > 0
            tiers.close()
    with logged("a KV tier raised an error"):
        background = BackgroundTier(FailingTier(call="submit"), timeout_s=60)
        assert run_to_end(background, [TierRequest("put", HEADER, memoryview(b"1234"))]) == ("failed",)
        background.close()
    with tempfile.TemporaryDirectory() as folder:
        tier = file_tier(1 << 20, folder=folder)
        store_and_fetch(tier)
        tier.close()
        expect(ConfigError, "cannot be opened", file_tier, 1 << 20, folder="/dev/null")
        away = redis_tier(1 << 20, url=f"unix://{folder}/nothing")
        assert run_to_end(away, [TierRequest("put", HEADER, memoryview(b"1234"))]) == ("failed",)
        away.close()
    too_many = BlockAllocationRequest(num_blocks=2, sequence_id="a")
    expect(OutOfBlocksError, "2 blocks", PagedKVPool(1, 16).allocate, too_many)
    if find_spec("torch") is None:
        expect(ConfigError, "sagellm-kv-pool[torch]", HBMBackend, 1 << 20)


def scheduler_ir() -> None:
    """A pass fails when it starts, when it decides and when it is told the plan, or breaks a rule."""
    from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, ScheduleRequest

    class Unready(NullSchedulerPass):
        start = fail

    class Forgetful(NullSchedulerPass):
        observe = fail

    class Rude(NullSchedulerPass):
        def run(self, ir: Any) -> Any:
            return ir.lower(max_num_seqs=9999)

    request = ScheduleRequest("a", token_ids=[1, 2, 3], max_tokens=4)

    def plan(scheduler: BaseSchedulerIR) -> list[int]:
        made = scheduler.schedule(pending_requests=[request], running_requests=[], available_memory=9)
        return [each.num_tokens for each in made.scheduled_requests]

    expect(
        EngineError,
        "'null' failed: RuntimeError: on purpose",
        BaseSchedulerIR().add_optimization_pass,
        Unready(),
    )
    for failing, part in (
        (FailingPass(), "'null' failed: RuntimeError: on purpose"),
        (Forgetful(), "'null' failed: RuntimeError: on purpose"),
        (Rude(), "lower max_num_seqs to 9999"),
    ):
        scheduler = BaseSchedulerIR()
        scheduler.add_optimization_pass(failing)
        expect(EngineError, part, plan, scheduler)
        scheduler.set_passes([])
        assert plan(scheduler) == [3]


def lifetime_predictor() -> None:
    """What is told is impossible; options are wrong."""
    from sagellm.core import PredictionRequest
    from sagellm.kvmgr.lifetime import StatisticalLifetimePredictor, TransformerLifetimePredictor

    update = StatisticalLifetimePredictor().update
    expect(InvalidInputError, "actual_length", update, sequence_id="a", actual_length=-1, actual_time=1.0)
    expect(ConfigError, "max_sequences", StatisticalLifetimePredictor, max_sequences=0)
    examples = [(PredictionRequest(sequence_id="a", token_ids=[1]), 5)]
    expect(ConfigError, "torch", TransformerLifetimePredictor.train, examples, Path("weights"))
    expect(ConfigError, "no file", TransformerLifetimePredictor, weights="absent")


def accel() -> None:
    """Weights are wrong; no GPU, no triton, no such variant of the native library."""
    import torch

    from sagellm.accel import FP8Quantizer, Int4Quantizer, Int8Quantizer, MagnitudeSparsifier
    from sagellm.accel.cuda.support import check_machine
    from sagellm.accel.native.library import best_or_named

    for quantizer in (Int8Quantizer(), Int4Quantizer(asymmetric=True), FP8Quantizer()):
        expect(InvalidInputError, "NaN", quantizer.quantize, torch.full((128, 128), torch.nan))
    expect(
        InvalidInputError,
        "row 0 of the weight holds NaN",
        MagnitudeSparsifier().sparsify,
        torch.full((4, 8), torch.nan),
    )
    expect(UnsupportedModelError, "not on cpu", check_machine, torch.device("cpu"), is_interpreted=False)
    if find_spec("triton") is None:
        expect(
            UnsupportedModelError,
            "sagellm-accel[cuda]",
            check_machine,
            torch.device("cuda"),
            is_interpreted=False,
        )
    expect(UnsupportedModelError, "no variant 'mmx'", best_or_named, "mmx")


def comm() -> None:
    """The driver of a GPU fails, and the machine has no files that say what it is."""
    from types import SimpleNamespace

    from sagellm.comm import LocalTopology

    nvml = SimpleNamespace(nvmlInit=fail, NVMLError=OSError)
    with tempfile.TemporaryDirectory() as nothing:
        for topology in (LocalTopology(nvml=nvml), LocalTopology(Path(nothing), nvml=nvml)):
            assert topology.read().gpus == ()
            assert any("on purpose" in each for each in topology.metrics().warnings)


def engines() -> None:
    """Modules fail under an engine, which answers all the same; commands of other packages are not here."""
    expected = generate()
    for call in POLICY_CALLS:
        with logged("eviction policy FailingPolicy failed"):
            assert generate(eviction_policy=f"failing{{call={call}}}") == expected, call
    for call in TIER_CALLS:
        with logged("the KV tier 'failing' failed"):
            assert generate(kv_tiers=f"failing{{max_bytes=1000000,call={call}}}") == expected, call
    for call in ("predict", "update"):
        with logged("the lifetime predictor failed, 1 times", at_most=3):  # the 1st, 2nd and 4th time
            assert generate(lifetime_predictor=f"failing{{call={call}}}") == expected, call
    for call in ("arrived", "propose", "departed"):
        with logged("is not asked any more"):
            drafting = {"speculation": f"failing{{call={call}}}", "adaptive_speculation": False}
            assert generate(**drafting) == expected, call
    with logged("failed and is removed until passes are set again"):
        assert generate(scheduler_passes="failing") == expected
    refuses("llm serve", "pip install sagellm-server")
    refuses("llm bench", "pip install sagellm-lab")
    refuses("plugins check sagellm-prefix-cache", "pip install sagellm-testing")


def server() -> None:
    """Spans are wanted without their extra, a key file is missing, no engine runs."""
    if find_spec("opentelemetry") is None:
        refuses("llm serve --otlp-traces-endpoint http://127.0.0.1:1", "sagellm-server[otel]")
    refuses("llm serve --api-key-file /nothing", "/nothing")
    refuses("llm cache stats", "no engine runs", status=1)


def adapters() -> None:
    """Passes and a policy fail, and what asks them goes on without; settings and names are wrong."""
    from sagellm.adapters import ChunkTree, PassDriver, PassSettings

    registry = PluginRegistry.load()
    registry.register(Plugin(), distribution="failure-paths")

    def drive(given: dict[str, str]) -> PassDriver:
        settings = PassSettings.of(given, "here")
        return PassDriver(settings, registry=registry, block_size=16, now=float)

    expect(ConfigError, "passes", drive, {})
    expect(ConfigError, "order", drive, {"passes": "oder=shortest"})
    expect(UnknownProviderError, "shortest", drive, {"passes": "order=shortes"})
    driver = drive({"passes": "failing"})
    nothing = RequestRows.of(())
    with logged("goes on without it"):
        limits = {"available_memory": 1, "max_num_batched_tokens": 1, "max_num_seqs": 1}
        assert driver.decide(nothing, nothing, **limits) is None
    assert not driver.has_passes
    assert "on purpose" in driver.failures["null"]  # whose class it derives from
    tree: ChunkTree[str] = ChunkTree(FailingPolicy("victim"), 4)
    tree.insert(["a", "b"], [1, 2], None)
    for key in "ab":
        tree.unpin(key)
    with logged("eviction policy FailingPolicy failed"):
        assert tree.evict(2, ()) == ["b", "a"]


def lab() -> None:
    """A plot is wanted without its extra, a trace is missing."""
    refuses("llm simulate /dev/null --plot plot.svg", "sagellm-lab[plot]")
    refuses("llm simulate /nothing --capacity 100", "/nothing")


def generate(**settings: Any) -> list[Any]:
    """Return the tokens of requests that share prefixes and evict each other's, or how one failed."""
    from sagellm.engines import LLMEngine, SamplingParams

    registry = PluginRegistry.load()
    registry.register(Plugin(), distribution="failure-paths")
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLMEngine("embedded", registry=registry, num_blocks=9, block_size=8, **settings) as engine:
        outputs = [engine.generate([list(prompt)], greedy)[0].outputs[0] for prompt in PROMPTS]
        engine.metrics()
        assert engine.client.core.kv.available_blocks == 9, "a block is lost"  # type: ignore[attr-defined]
    return [output.error or output.token_ids for output in outputs]


PROMPTS = [(*range(20, 48), *end) for end in ((1, 2, 3, 4), (7, 8), (1, 2, 3, 4, 5, 6, 7, 8))]
PROMPTS += [tuple(range(60, 90)), tuple(range(100, 130)), PROMPTS[0]]


def refuses(command: str, part: str, *, status: int = 2) -> None:
    """Expect a command to exit with a status and to print such a part."""
    from sagellm.engines.cli import main as sage

    printed, found = StringIO(), None
    try:
        with redirect_stderr(printed):
            sage(command.split())
    except SystemExit as ended:
        found = ended.code
    assert found == status, printed.getvalue()
    assert part in printed.getvalue(), printed.getvalue()


PACKAGES = {
    "core-protocols": core_protocols,
    "prefix-cache": prefix_cache,
    "kv-pool": kv_pool,
    "eviction-policy": eviction_policy,
    "scheduler-ir": scheduler_ir,
    "lifetime-predictor": lifetime_predictor,
    "accel": accel,
    "comm": comm,
    "engines": engines,
    "server": server,
    "adapters": adapters,
    "lab": lab,
    "testing": testing,
}


def main() -> None:
    """Run the failures of the package that the command line names."""
    package = sys.argv[1].rpartition("/")[2]
    tools = [name for name in TOOLS if find_spec(name) is not None]
    if tools and package != "testing":
        sys.exit(f"{', '.join(tools)} can be imported here; most people do not have them")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SAGELLM_RUNTIME_DIR"] = folder
        PACKAGES[package]()


if __name__ == "__main__":
    main()
