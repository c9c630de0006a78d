"""A compiled library: one call computes a whole forward pass, another one samples from all its logits."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.accel.native.backend import NativeForwardBackend as NativeForwardBackend
    from sagellm.accel.native.library import NativeLibrary as NativeLibrary, examine as examine
    from sagellm.accel.native.sampling import NativeDraw as NativeDraw

_MODULE_OF = {
    "NativeDraw": ".sampling",
    "NativeForwardBackend": ".backend",
    "NativeLibrary": ".library",
    "examine": ".library",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
