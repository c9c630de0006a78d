"""Runs the conformance kit on an installed plugin in a separate process.

from sagellm.testing.conformance import Conformance

for report in Conformance("acme-mru-policy").run():
    print(report.provider, [fault.sentence for fault in report.faults])
"""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.testing.conformance.report import (
        CheckResult as CheckResult,
        Fault as Fault,
        ProviderReport as ProviderReport,
    )
    from sagellm.testing.conformance.supervisor import Conformance as Conformance

_MODULE_OF = {
    "CheckResult": ".report",
    "Conformance": ".supervisor",
    "Fault": ".report",
    "ProviderReport": ".report",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
