"""The conformance kit on what is installed: `TestMine = installed_contract("eviction_policy", "mru")`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import sagellm.core
from sagellm.core.errors import ConfigError
from sagellm.core.ids import BlockId, RequestId, SequenceId
from sagellm.core.plugins.registry import PluginRegistry
from sagellm.core.protocols.eviction import EvictionCandidate
from sagellm.core.protocols.logits_processor import LogitsRequest
from sagellm.core.protocols.quantizer import QuantizationConfig
from sagellm.core.protocols.request_rows import ScheduleRequest
from sagellm.core.protocols.sparsifier import SparsityConfig
from sagellm.core.runtime import VirtualClock
from sagellm.core.tokens import pack
from sagellm.testing.calls import Calls
from sagellm.testing.conformance.aspects import aspect_of
from sagellm.testing.conformance.exercised import Exercised, own_methods
from sagellm.testing.draft_proposer import DraftProposerContract
from sagellm.testing.engine_adapter import EngineAdapterContract
from sagellm.testing.eviction import EvictionPolicyContract, RankingEvictionPolicyContract, make_node
from sagellm.testing.grammar import KIT_VOCABULARY, GrammarContract
from sagellm.testing.kv_allocator import KVAllocatorContract
from sagellm.testing.kv_pool import KVPoolContract
from sagellm.testing.kv_tier import KVTierContract, delete_blocks_of_the_kit, probe_tier
from sagellm.testing.lifetime import LifetimePredictorContract
from sagellm.testing.logits_processor import KIT_REQUESTS, LogitsProcessorContract
from sagellm.testing.parsers import ReasoningParserContract, ToolParserContract
from sagellm.testing.prefix_cache import KeepingPrefixCacheContract, PrefixCacheContract
from sagellm.testing.quantizer import QuantizerContract
from sagellm.testing.scheduler import SchedulerContract, SchedulerPlanContract
from sagellm.testing.scheduler_pass import SchedulerPassContract
from sagellm.testing.sparsifier import SparsifierContract
from sagellm.testing.topology import TopologyContract
from sagellm.testing.trace import TraceReaderContract, tokenize

Factory = Callable[..., Any]
OnCall = Callable[[str], None]


class _Kind(NamedTuple):
    """How a kind is tested.

    `contract` applies to implementations that do something, as `does` determines, `null` to the others.
    `probe` makes one as the contract would. Calls are recorded unless that would interfere.
    """

    contract: type
    protocol: str
    probe: Callable[[Factory], Any]
    make: Callable[..., Any]
    notes_calls: bool = False
    null: type | None = None
    does: Callable[[Any], bool] | None = None
    sample: Callable[[Any, str | None], dict[str, Any]] | None = None  # input for the contract
    has_template: bool = False  # whether the engine gives factories a chat template


def _make(self: Any, *arguments: Any, **options: Any) -> Any:
    made = self.factory(*arguments, **options)
    self.exercised.watch(made)
    return self.calls.watch(made)


def _make_pool(self: Any, total_blocks: int, block_size: int, clock: Any) -> Any:
    return _make(self, total_blocks, block_size, clock=clock)


def _make_cache(self: Any, max_blocks: int = 100, block_size: int = 4, **options: Any) -> Any:
    return _make(self, max_blocks, block_size, **{"eviction_policy": None, "clock": None} | options)


def _make_quantizer(self: Any, config: QuantizationConfig | None = None) -> Any:
    return _make(self, config or QuantizationConfig())


def _make_sparsifier(self: Any, config: SparsityConfig | None = None) -> Any:
    return _make(self, config or SparsityConfig())


def _make_tier(self: Any, max_bytes: int) -> Any:
    tier = _make(self, max_bytes)
    delete_blocks_of_the_kit(tier)
    return tier


def _make_reader(self: Any) -> Any:
    return _make(self, tokenize=tokenize)


def _names_victims(policy: Any) -> bool:
    for node_id in range(1, 4):
        node = make_node(node_id)
        policy.on_insert(node)
        policy.add_candidate(node)
    candidate = EvictionCandidate(sequence_id=SequenceId("a"), block_ids=[BlockId(0)], last_access_time=0.0)
    return policy.victim() is not None or bool(policy.select_victims([candidate], 1))


def _keeps(cache: Any) -> bool:
    return bool(cache.insert_prefix(range(8), [BlockId(0), BlockId(1)]).num_new_blocks)


def _schedules(scheduler: Any) -> bool:
    request = ScheduleRequest(RequestId("a"), pack(range(8)), 8)
    plan = scheduler.schedule(pending_requests=[request], running_requests=[], available_memory=8)
    return bool(plan.scheduled_requests)


def _probe_scheduler(factory: Factory) -> Any:
    return factory(max_num_batched_tokens=64, max_num_seqs=4, block_size=16, probe=None, clock=VirtualClock())


def _call(factory: Factory) -> Any:
    return factory()


def _requests(processor: Any, sample: str | None) -> dict[str, Any]:
    """Return the requests that activate a processor: the sample, or those of the kit."""
    requests = KIT_REQUESTS if sample is None else [_read_request(sample)]
    try:
        asking = [request for request in requests if processor.start(request) is not None]
    except Exception:  # the tests will report it
        asking = list(requests)
    found: dict[str, Any] = {"requests": lambda self: asking}
    return found if sample is None else found | {"not_asked": f"{_NOT_ASKED_BY_SAMPLE} {sample}"}


def _read_request(sample: str) -> LogitsRequest:
    try:
        given = json.loads(sample)
        if "logit_bias" in given:
            given["logit_bias"] = {int(token_id): bias for token_id, bias in given["logit_bias"].items()}
        return LogitsRequest(**given)
    except (ValueError, TypeError, AttributeError) as error:
        takes = ", ".join(field.name for field in fields(LogitsRequest))
        raise UncheckedError(
            f"the sample is {sample}; it must be a JSON object of {takes}: {error}"
        ) from error


def _texts(_: Any, sample: str | None) -> dict[str, Any]:
    """Return a text that a grammar accepts, with an output that matches it; those of the kit without."""
    if sample is None:
        return {}
    try:
        given = json.loads(sample)
        found = [(given["kind"], str(given["text"]), str(given["output"]).encode())]
    except (ValueError, TypeError, KeyError) as error:
        raise UncheckedError(
            f"the sample is {sample}; it must be a JSON object of kind, text and output: {error}"
        ) from error
    return {"texts": lambda self: found}


def _answer(_: Any, sample: str | None) -> dict[str, Any]:
    """Return the answer in the sample file; empty without one."""
    return {} if sample is None else {"sample": _read(Path(sample))}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UncheckedError(f"the sample {path} cannot be read: {error}") from error


def _trace(_: Any, sample: str | None) -> dict[str, Any]:
    """Return the sample file in the form that the contract expects; empty without one."""
    if sample is None:
        return {}
    path = Path(sample)
    text = _read(path)
    return {"file_name": path.name, "sample": lambda self: text}


_KINDS = {
    "draft_proposer": _Kind(DraftProposerContract, "DraftProposerProtocol", _call, _make, notes_calls=True),
    "eviction_policy": _Kind(
        RankingEvictionPolicyContract,
        "EvictionPolicyProtocol",
        _call,
        _make,
        notes_calls=True,
        null=EvictionPolicyContract,
        does=_names_victims,
    ),
    "engine_adapter": _Kind(EngineAdapterContract, "EngineAdapterProtocol", _call, _make),
    "grammar": _Kind(
        GrammarContract, "GrammarProtocol", lambda factory: factory(KIT_VOCABULARY), _make, sample=_texts
    ),
    "kv_allocator": _Kind(
        KVAllocatorContract, "KVAllocatorProtocol", lambda factory: factory(64), _make, notes_calls=True
    ),
    "kv_pool": _Kind(
        KVPoolContract,
        "KVPoolProtocol",
        lambda factory: factory(64, 16, clock=VirtualClock()),
        _make_pool,
        notes_calls=True,
    ),
    "kv_tier": _Kind(KVTierContract, "KVTierProtocol", probe_tier, _make_tier),
    "lifetime_predictor": _Kind(
        LifetimePredictorContract, "LifetimePredictorProtocol", _call, _make, notes_calls=True
    ),
    "logits_processor": _Kind(
        LogitsProcessorContract,
        "LogitsProcessorProtocol",
        lambda factory: factory(97),
        _make,
        sample=_requests,
    ),
    "prefix_cache": _Kind(
        KeepingPrefixCacheContract,
        "PrefixCacheProtocol",
        lambda factory: factory(100, 4, eviction_policy=None, clock=None),
        _make_cache,
        notes_calls=True,
        null=PrefixCacheContract,
        does=_keeps,
    ),
    "quantizer": _Kind(
        QuantizerContract, "QuantizerProtocol", lambda factory: factory(QuantizationConfig()), _make_quantizer
    ),
    "reasoning_parser": _Kind(
        ReasoningParserContract,
        "ReasoningParserProtocol",
        _call,
        _make,
        sample=_answer,
        has_template=True,
    ),
    "scheduler": _Kind(
        SchedulerContract,
        "SchedulerIRProtocol",
        _probe_scheduler,
        _make,
        null=SchedulerPlanContract,
        does=_schedules,
    ),
    "scheduler_pass": _Kind(SchedulerPassContract, "SchedulerPassProtocol", _call, _make),
    "sparsifier": _Kind(
        SparsifierContract, "SparsifierProtocol", lambda factory: factory(SparsityConfig()), _make_sparsifier
    ),
    "tool_parser": _Kind(
        ToolParserContract, "ToolParserProtocol", _call, _make, sample=_answer, has_template=True
    ),
    "topology": _Kind(TopologyContract, "TopologyProtocol", _call, _make),
    "trace_reader": _Kind(
        TraceReaderContract,
        "TraceReaderProtocol",
        lambda factory: factory(tokenize=tokenize),
        _make_reader,
        sample=_trace,
    ),
}

_NOT_ASKED_BY_SAMPLE = "give a sample that asks for it; start returned None for the given one,"
_HOW = "give them with --options '{NAME: VALUE}', in Python with options={…}"


class UncheckedError(Exception):
    """A provider cannot be checked by its name alone, which is not a fault of it."""


class _Installed:
    factory: Factory
    protocol: type
    methods: tuple[str, ...]  # defined by the provider, to be called by the kit
    notes_calls: bool
    calls: Calls
    exercised: Exercised

    @pytest.fixture(autouse=True)
    def _note_calls(self, request: pytest.FixtureRequest) -> Iterator[None]:
        disturbs = aspect_of(request.node.name) in ("cost", "threads")
        self.calls = Calls(is_on=self.notes_calls and not disturbs)
        self.exercised = Exercised(object if disturbs else self.protocol)
        yield
        self.exercised.stop()


def installed_contract(
    kind: str,
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    sample: str | None = None,
    on_call: OnCall = lambda _: None,
) -> type:
    """Return the contract of a kind as a test class that makes the installed provider of that name.

    It is made with `options`. `sample` is input that it needs to act on: for a trace reader the path of a
    file of its format, for a parser that of an answer, for a logits processor the fields of a LogitsRequest
    as JSON, for a grammar the kind, text and matching output. `on_call` receives the name of each method of
    the provider that is called here, before any test.
    Raises what `factory_contract` raises.
    """
    if kind not in _KINDS:
        raise UncheckedError(f"the kit has no contract for the kind {kind}")
    factory: Any = PluginRegistry.load().resolve(kind, name)
    return factory_contract(kind, factory, options, sample=sample, on_call=on_call)


def factory_contract(
    kind: str,
    factory: Factory,
    options: Mapping[str, Any] | None = None,
    *,
    sample: str | None = None,
    on_call: OnCall = lambda _: None,
) -> type:
    """Return the contract of a kind as a test class that makes what a factory makes.

    `on_call` receives the name of each method that is called to find out what it makes.

    Raises UncheckedError if the kit has no contract for the kind, the sample cannot be used, or the provider
    needs options or refuses those given (by a ConfigError, or a parameter without a default); and
    any other error of the provider.
    """
    entry = _KINDS[kind]
    if sample is not None and entry.sample is None:
        raise UncheckedError(f"a sample was given, and the contract of {kind} takes none")
    if options:
        factory = _with_options(factory, options)
    if entry.has_template and "chat_template" in signature(factory).parameters:
        factory = partial(factory, chat_template="")
    protocol = getattr(sagellm.core, entry.protocol)
    exercised = Exercised(protocol, on_call)
    make = partial(_refuse_gaps, factory)
    try:
        return _test_class(entry, protocol, factory, entry.probe(_watching(make, exercised)), sample)
    except ConfigError as error:
        if options:
            raise UncheckedError(f"options are {dict(options)}: {error}") from error
        raise UncheckedError(f"needs options: {error}; {_HOW}") from error
    finally:
        exercised.stop()


def _watching(factory: Factory, exercised: Exercised) -> Factory:
    def make(*arguments: Any, **options: Any) -> Any:
        made = factory(*arguments, **options)
        exercised.watch(made)
        return made

    return make


def _test_class(entry: _Kind, protocol: type, factory: Factory, made: Any, sample: str | None) -> type:
    if not isinstance(made, protocol):
        raise TypeError(f"{factory!r} makes a {type(made).__name__}, which is no {entry.protocol}")
    return type(
        f"Test{entry.protocol.removesuffix('Protocol')}",
        (_Installed, _contract(entry, made)),
        {
            "factory": staticmethod(factory),
            "make": entry.make,
            "notes_calls": entry.notes_calls,
            "protocol": protocol,
            "methods": tuple(sorted(own_methods(type(made), protocol))),
            **({} if entry.sample is None else entry.sample(made, sample)),
            "__doc__": f"The contract of {entry.protocol}.",
        },
    )


def _with_options(factory: Factory, options: Mapping[str, Any]) -> Factory:
    try:
        signature(factory).bind_partial(**options)
    except TypeError as error:
        takes = ", ".join(signature(factory).parameters)
        raise UncheckedError(f"options are {dict(options)}, and it takes {takes or 'none'}") from error
    return partial(factory, **options)


def _refuse_gaps(factory: Factory, *arguments: Any, **keywords: Any) -> Any:
    """Make one as the engine would, unless some required parameters can only come from options."""
    parameters = signature(factory).parameters
    given = signature(factory).bind_partial(*arguments, **keywords).arguments
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is Parameter.empty
        and parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        and name not in given
    ]
    if missing:
        raise ConfigError(", ".join(missing))
    return factory(*arguments, **keywords)


def _contract(entry: _Kind, made: Any) -> type:
    if entry.null is None or entry.does is None:
        return entry.contract
    try:
        return entry.contract if entry.does(made) else entry.null
    except Exception:  # the tests will report it
        return entry.contract
