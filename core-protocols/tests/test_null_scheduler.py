"""The scheduler and the pass that do nothing keep the contract as well."""

from __future__ import annotations

from typing import Any

from sagellm.core import NullSchedulerIR, NullSchedulerPass, SchedulerIRProtocol, SchedulerPassProtocol
from sagellm.core.testing.scheduler import SchedulerPlanContract
from sagellm.core.testing.scheduler_pass import SchedulerPassContract


class TestNullSchedulerIR(SchedulerPlanContract):
    def make(self, **options: Any) -> SchedulerIRProtocol:
        return NullSchedulerIR(**options)


class TestNullSchedulerPass(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return NullSchedulerPass()
