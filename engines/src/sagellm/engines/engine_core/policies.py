"""Shows and switches the policies of a running engine, between two steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sagellm.core import (
    ConfigError,
    EngineError,
    EvictionPolicyProtocol,
    FinishReason,
    InvalidInputError,
    ProviderSpec,
    SageLLMError,
    get_logger,
)
from sagellm.core.plugins.failure import contained
from sagellm.core.plugins.option_text import split
from sagellm.engines.config.shown import shown
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.engine_core.guards import MAX_KEPT, Guard, LatestRequests, Limit
from sagellm.engines.engine_core.policy_metrics import KINDS, PolicyMetrics, kind_of
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.engine_core.shadows import ShadowCaches

_logger = get_logger(__name__)

_MAX_CHANGES = 100
_MAX_LIMITS = _MAX_SHADOWS = 16
_CHECK_NS = 200_000_000
"""Between two looks at a guard's figures."""


@dataclass(frozen=True, kw_only=True)
class PolicyChange:
    """One switch. `made_by` is "operator" or "guard"; `has_learnt`: what a shadow knew came along."""

    at_ns: int
    kind: str
    before: str
    after: str
    made_by: Literal["operator", "guard"]
    why: str = ""
    took_ns: int = 0
    has_learnt: bool = False


@dataclass(slots=True)
class _Guarded:
    """A switch with a guard, and what it goes back to."""

    guard: Guard
    before: str


class PolicyAdmin:
    """Shows and switches policies, and goes back when a guard's limit is broken.

    A switch happens between two steps and loses neither a request nor a token. An eviction policy is told of
    all that is cached in order of last use, a predictor of all that is live, and a proposer of drafts of each
    sequence when it is first asked about it; a pass that stays keeps its state. An eviction policy whose
    shadow runs begins with what that has learnt; otherwise what had been learnt is gone. If anything raises,
    the old one stays.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core, self._modules = core, core.parts.passes.modules
        self._clock = core.parts.runtime.clock
        self._requests = LatestRequests()
        self._guarded: dict[str, _Guarded] = {}
        self._changes: deque[PolicyChange] = deque(maxlen=_MAX_CHANGES)
        self._since_ns: dict[str, int] = {}  # of those that were switched
        self._started = {kind: self._name(kind) for kind in KINDS}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._checked_ns = 0
        self._switches: dict[str, Callable[[str], bool | None]] = {
            "eviction": self._set_eviction,
            "passes": core.parts.passes.set_passes,
            "predictor": self._set_predictor,
            "drafts": self._set_drafts,
        }
        core.watchers.add(self)
        core.add_metrics("policies", self.metrics)

    def policies(self) -> dict[str, Any]:
        """Return what is in force, the guards, the latest changes, and what shadows would have saved."""
        now_ns = self._clock.now_ns()
        since = self._since_ns
        shadows = self._core.shadows
        return {
            "policies": {
                kind: {
                    "name": self._name(kind),
                    "for_s": (now_ns - since[kind]) / 1e9 if kind in since else None,
                    "failure": self._failure(kind),
                    "setting": KINDS[kind].setting,
                    "flag": KINDS[kind].flag,
                    "guard": None if kind not in self._guarded else self._plain(self._guarded[kind]),
                }
                for kind in KINDS
            },
            "changes": [asdict(each) | {"ago_s": (now_ns - each.at_ns) / 1e9} for each in self._changes],
            "shadows": None if shadows is None else asdict(shadows.metrics()),
        }

    def set(
        self,
        kind: str,
        name: str,
        *,
        guards: list[str] | None = None,
        window_s: float = 30.0,
        min_requests: int = 20,
    ) -> dict[str, Any]:
        """Switch a kind of policy to a name with its options; guards hold until one trips or the next switch.

        "default" is what the engine began with. A policy that is in force already stays as it is, with its
        guard, unless guards are given. Returns what `policies` does, and what was `set`. Raises ConfigError,
        LookupError, PluginError or InvalidInputError, and changes nothing then.
        """
        kind = kind_of(kind)
        if not isinstance(name, str) or not name.strip():
            raise InvalidInputError(f"the policy is {shown(name)}; it must be a name, such as lru")
        name = self._started[kind] if name.strip() == "default" else name.strip()
        guard = self._guard(guards or [], window_s, min_requests)
        before, guarded = self._name(kind), self._guarded.get(kind)
        is_new = before != self._whole_name(kind, name) or bool(self._failure(kind))
        if not is_new and guards and guarded is None:
            raise ConfigError(
                f"{name} is in force already, so there is nothing that a guard could go back to; guard the "
                "switch to another policy"
            )
        back_to = before if guarded is None or is_new else guarded.before
        if is_new:
            self._switch(kind, name, "operator")
            self._guarded.pop(kind, None)
        if guard is not None:
            self._guarded[kind] = _Guarded(guard, back_to)
        ended = guarded.before if guarded is not None and is_new else None
        done = {"kind": kind, "is_new": is_new, "ended_guard": ended}
        return self.policies() | {"set": done}

    def shadow(self, names: str, *, sample: float = 1.0) -> dict[str, Any]:
        """Run eviction policies beside the live one from now on, in place of those that do; "off" ends it.

        They begin with what is cached. Raises ConfigError, LookupError or PluginError; nothing changes then.
        """
        if not isinstance(names, str):
            raise InvalidInputError(
                f"the shadows are {shown(names)}; they must be a text, such as lru,s3fifo"
            )
        specs = tuple(map(ProviderSpec.of, split(names)))
        if not specs:
            raise ConfigError("no shadow is named; name eviction policies, or off to end those that run")
        if [spec.name for spec in specs] in (["off"], ["none"]):
            self._modules.config = self._modules.changed({"prefix_cache.shadow": ()})
            self._core.run_shadows(None)
            return self.policies()
        if len(specs) > _MAX_SHADOWS:
            raise ConfigError(f"{len(specs):,} shadows are named; at most {_MAX_SHADOWS} run at once")
        changed = self._modules.changed({"prefix_cache.shadow": specs, "prefix_cache.shadow_sample": sample})
        shadows = ShadowCaches(self._modules, specs, self._core.kv, sample=sample)
        shadows.begin_like(self._core.kv.cache)
        self._modules.config = changed
        self._core.run_shadows(shadows)
        return self.policies()

    def changes_between(self, begin_ns: int, end_ns: int) -> list[PolicyChange]:
        """Return the switches in an interval on the engine's clock."""
        return [each for each in self._changes if begin_ns <= each.at_ns <= end_ns]

    def metrics(self) -> PolicyMetrics:
        """Return what is in force, and how often it was switched."""
        return PolicyMetrics(
            policies={kind: self._name(kind) for kind in KINDS},
            num_changes={
                kind: {who: self._counts[kind, who] for who in ("operator", "guard")} for kind in KINDS
            },
            num_guards=len(self._guarded),
        )

    def arrived(self, sequence: Sequence) -> None:
        """Nothing is known of it yet."""

    def ended(self, sequence: Sequence, reason: FinishReason, finished_ns: int) -> None:
        """Note how it ended, for guards."""
        self._requests.add(sequence, reason, finished_ns)

    def stepped(self, now_ns: int) -> None:
        """Look at the guards, five times a second."""
        if not self._guarded or now_ns - self._checked_ns < _CHECK_NS:
            return
        self._checked_ns = now_ns
        live = list(self._core.live_sequences())
        for kind, guarded in list(self._guarded.items()):
            with contained() as failure:
                failed = self._failure(kind)
                breach = guarded.guard.breach(self._requests, live, now_ns)
                why = f"it failed: {failed}" if failed else breach
            if failure.error is not None:
                del self._guarded[kind]
                _logger.error("the guard of %s failed and is gone", kind, exc_info=failure.error)
            elif why is not None:
                del self._guarded[kind]
                self._go_back(kind, guarded.before, why)

    def _go_back(self, kind: str, before: str, why: str) -> None:
        now = self._name(kind)
        with contained() as failure:
            self._switch(kind, before, "guard", why)
        if failure.error is None:
            _logger.warning("the guard of %s %s tripped: %s; back to %s", kind, now, why, before)
        else:
            told = self._modules.registry.describe(failure.error)
            _logger.error("the guard of %s tripped: %s; but %s cannot return: %s", kind, why, before, told)

    def _switch(self, kind: str, name: str, made_by: Literal["operator", "guard"], why: str = "") -> None:
        before, began_ns = self._name(kind), self._clock.now_ns()
        has_learnt = None
        with contained() as failure:
            has_learnt = self._switches[kind](name)
        if (error := failure.error) is not None:
            if isinstance(error, SageLLMError):
                raise error
            told = self._modules.registry.describe(error)
            raise EngineError(f"{name} cannot take over, so nothing changed: {told}") from error
        took_ns = self._clock.now_ns() - began_ns
        after = self._name(kind)
        self._changes.append(
            PolicyChange(
                at_ns=self._clock.now_ns(),
                kind=kind,
                before=before,
                after=after,
                made_by=made_by,
                why=why,
                took_ns=took_ns,
                has_learnt=bool(has_learnt),
            )
        )
        self._since_ns[kind] = self._changes[-1].at_ns
        self._counts[kind, made_by] += 1
        if made_by == "operator":
            _logger.info(
                "%s: %s instead of %s, from the next step on (%.1f ms)", kind, after, before, took_ns / 1e6
            )

    def _set_eviction(self, text: str) -> bool:
        """Switch; return whether the new one began with what its shadow has learnt."""
        changed = self._modules.changed({"prefix_cache.eviction_policy": (spec := ProviderSpec.of(text))})
        if not self._modules.config.prefix_cache.enabled:
            raise ConfigError("prefix caching is off (prefix_cache.enabled), so nothing is ever evicted")
        policy, shadows = self._modules.eviction_policy(spec), self._core.shadows
        learnt = None if shadows is None else shadows.learnt(spec.text)
        learns = learnt is not None and type(policy).learn_from is not EvictionPolicyProtocol.learn_from
        if learns:
            policy.learn_from(learnt)
        self._core.kv.replace_policy(policy, spec.name)
        if shadows is not None:
            shadows.begin_window()
        self._modules.config = changed
        return learns

    def _set_predictor(self, text: str) -> None:
        changed = self._modules.changed({"predictor.name": (spec := ProviderSpec.of(text))})
        self._core.replace_predictor(self._modules.make("lifetime_predictor", spec))
        self._modules.config = changed

    def _set_drafts(self, text: str) -> None:
        spec = None if text in ("none", "off") else ProviderSpec.of(text)
        changed = self._modules.changed({"speculation.proposer": spec})
        self._core.replace_proposer(spec)
        self._modules.config = changed

    def _name(self, kind: str) -> str:
        config = self._modules.config
        if kind == "passes":
            return self._core.parts.passes.text
        if kind == "eviction":
            return config.prefix_cache.eviction_policy.text if config.prefix_cache.enabled else "off"
        spec = config.predictor.name if kind == "predictor" else config.speculation.proposer
        return "none" if spec is None else spec.text

    def _plain(self, guarded: _Guarded) -> dict[str, Any]:
        guard, now_ns = guarded.guard, self._clock.now_ns()
        window = guard.window(self._requests, self._core.live_sequences(), now_ns)
        limits = []
        for each in guard.limits:
            now, num_requests = each.now(window)
            limits.append(asdict(each) | {"now": now, "num_requests": num_requests})
        return {
            "limits": limits,
            "window_s": guard.window_s,
            "min_requests": guard.min_requests,
            "back_to": guarded.before,
        }

    def _whole_name(self, kind: str, name: str) -> str:
        """Return a name as `_name` would give it."""
        if kind == "passes":
            return self._core.parts.passes.whole_text(name)
        return "none" if kind == "drafts" and name == "off" else ProviderSpec.of(name).text

    def _failure(self, kind: str) -> str:
        """Return why a policy that is in force does not decide any more; empty if it does."""
        if kind == "eviction":
            return self._core.kv.cache.metrics().policy_failure
        return self._core.parts.passes.failure if kind == "passes" else ""

    def _guard(self, texts: list[str], window_s: float, min_requests: int) -> Guard | None:
        if not texts:
            return None
        if not 0 < window_s <= 86_400:
            raise ConfigError(f"the guard's window is {window_s:g} s; it must be above 0, and at most a day")
        if type(min_requests) is not int or not 1 <= min_requests <= MAX_KEPT:
            raise ConfigError(
                f"min_requests is {shown(min_requests)}; it must be a whole number from 1 to {MAX_KEPT:,}, "
                "the requests that are remembered"
            )
        if len(texts) > _MAX_LIMITS:
            raise ConfigError(f"{len(texts):,} guards are given; at most {_MAX_LIMITS} are kept")
        now_ns = self._clock.now_ns()
        before = self._requests.window(now_ns - round(window_s * 1e9), self._core.live_sequences(), now_ns)
        limits = tuple(Limit.read(text, before, min_requests) for text in texts)
        return Guard(limits=limits, window_s=window_s, min_requests=min_requests, since_ns=now_ns)
