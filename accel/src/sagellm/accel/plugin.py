"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(
            "forward_backend",
            "native",
            "sagellm.accel.native.backend:NativeForwardBackend",
            "compiled kernels for AVX2, AVX-512 and AMX; one call per step",
        ),
        Provider(
            "forward_backend",
            "cuda",
            "sagellm.accel.cuda.backend:CudaForwardBackend",
            "Triton kernels and CUDA graphs, on a GPU",
        ),
        Provider("quantizer", "int8", "sagellm.accel.int8:Int8Quantizer", "8-bit weights, one scale per row"),
        Provider("quantizer", "int4", "sagellm.accel.int4:Int4Quantizer", "4-bit weights in groups of 128"),
        Provider("quantizer", "fp8", "sagellm.accel.fp8:FP8Quantizer", "weights in E4M3, a scale per row"),
        Provider(
            "quantizer",
            "fp8_e5m2",
            "sagellm.accel.fp8:FP8E5M2Quantizer",
            "weights in E5M2, a scale per row",
        ),
    ]
