"""Forward passes by a compiled library: one call computes a whole step."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.accel.native.backend import NativeForwardBackend as NativeForwardBackend
    from sagellm.accel.native.library import NativeLibrary as NativeLibrary, examine as examine

_MODULE_OF = {
    "NativeForwardBackend": ".backend",
    "NativeLibrary": ".library",
    "examine": ".library",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
