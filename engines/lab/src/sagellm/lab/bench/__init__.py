"""Measures servers (`run_serve`) and engines in this process (`measure_throughput`, `measure_latency`)."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.lab.bench.compare import Comparison as Comparison, compare_results as compare_results
    from sagellm.lab.bench.errors import BenchmarkError as BenchmarkError
    from sagellm.lab.bench.figures import (
        Limits as Limits,
        ServeFigures as ServeFigures,
        Spread as Spread,
        spread as spread,
    )
    from sagellm.lab.bench.offline import (
        OfflineSettings as OfflineSettings,
        measure_latency as measure_latency,
        measure_throughput as measure_throughput,
    )
    from sagellm.lab.bench.serve import ServeResult as ServeResult, run_serve as run_serve
    from sagellm.lab.bench.settings import LoadSettings as LoadSettings
    from sagellm.lab.bench.startup import (
        StartupSettings as StartupSettings,
        measure_startup as measure_startup,
    )
    from sagellm.lab.traces.lengths import Lengths as Lengths

_MODULE_OF = {
    "BenchmarkError": ".errors",
    "Comparison": ".compare",
    "Lengths": "sagellm.lab.traces.lengths",
    "Limits": ".figures",
    "LoadSettings": ".settings",
    "OfflineSettings": ".offline",
    "ServeFigures": ".figures",
    "ServeResult": ".serve",
    "Spread": ".figures",
    "StartupSettings": ".startup",
    "compare_results": ".compare",
    "measure_latency": ".offline",
    "measure_startup": ".startup",
    "measure_throughput": ".offline",
    "run_serve": ".serve",
    "spread": ".figures",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
