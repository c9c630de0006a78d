"""A request as every package sees it, and what is reported when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sagellm.core._lazy import lazy
from sagellm.core._moved import with_moved_names
from sagellm.core.ids import RequestId
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.step_cost import StepWork
from sagellm.core.tenant import DEFAULT_TENANT, Tenant
from sagellm.core.tokens import TokenIds

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
"""Why a request ended, in the OpenAI API's terms where it has one."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue. Its tokens exist once, packed, from admission to the end."""

    request_id: RequestId
    token_ids: TokenIds
    max_tokens: int
    priority: int = 0  # larger is more urgent
    arrival_ns: int = 0  # Clock.now_ns()
    namespace: Namespace = DEFAULT
    tenant: Tenant = DEFAULT_TENANT
    deadline_ns: int | None = None  # Clock.now_ns() after which the answer is of no use


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What observers receive about a finished request. It holds no text and no token ids."""

    request_id: RequestId
    namespace: Namespace
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrival_ns: int
    first_token_ns: int | None
    finished_ns: int
    tenant: str = DEFAULT_TENANT.name
    priority: int = 0
    scheduled_ns: int | None = None  # start of the first step that computed any of it


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What observers receive about one engine step."""

    step: int
    started_ns: int
    finished_ns: int
    num_running: int
    num_waiting: int
    num_scheduled_tokens: int
    num_preempted: int
    num_free_blocks: int
    work: StepWork | None = None  # None if nothing was computed


__getattr__ = with_moved_names(
    __name__, lazy(__name__, {}), {"sagellm.engines.engine_core.sequence": "RequestStatus"}
)
