"""What a layer does between its products: norms, rotation, storing KV, the gate, rounding to FP8."""

from __future__ import annotations

import triton.language as tl

from sagellm.accel.cuda.kernel import device_function, kernel

FP8_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)


@kernel
def add_norm(  # noqa: PLR0913
    x: tl.tensor,  # (rows, SIZE)
    residual: tl.tensor,  # (rows, SIZE); x is added to it in place
    weight: tl.tensor,  # (SIZE,)
    out: tl.tensor,  # (rows, SIZE)
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """Add a row to its residual, and normalise the sum by its root mean square; a program per row."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    total = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        total = total.to(residual.dtype.element_ty)
        tl.store(residual + place, total, mask=mask)
        total = total.to(tl.float32)
    rate = 1.0 / tl.sqrt(tl.sum(total * total, 0) / SIZE + eps)
    normalised = total * rate * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, normalised.to(out.dtype.element_ty), mask=mask)


@device_function
def store_head(
    place: tl.tensor,  # of each of the head's values
    scale_place: tl.tensor,
    values: tl.tensor,  # float32, 0 where masked
    mask: tl.tensor,
    is_stored: tl.tensor,
    SCALED_MAX: tl.constexpr,  # largest stored value; 0: stored as it is
) -> tl.tensor:
    """Write a key or a value of one head, scaled to fill its number format if that has 8 bits.

    That of E4M3 is as the CPU kernels store it: by the power of two that brings the largest magnitude above
    224 and to at most 448, without denormals, and NaN throughout where one value is not finite.
    """
    stored = values
    if SCALED_MAX == INT8_MAX:
        scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-20) / SCALED_MAX
        stored = tl.floor(values / scale + 0.5)
        tl.store(scale_place, scale, mask=is_stored)
    elif SCALED_MAX:
        largest = tl.max(tl.abs(values).to(tl.int32, bitcast=True), 0)  # as integers, NaN is the largest
        is_finite = largest < 0x7F800000
        # The exponent, one more where the mantissa is above that of 448
        raised = (tl.minimum(largest, 0x7F7FFFFF) + 0x1FFFFF) & 0x7F800000
        exponent = tl.maximum(raised, 22 << 23) - (8 << 23)
        scaled = values * ((254 << 23) - exponent).to(tl.float32, bitcast=True)
        magnitude = tl.abs(scaled)
        least = tl.where(magnitude > 0.0078125, tl.where(scaled < 0, -0.015625, 0.015625), 0.0)
        stored = tl.where(magnitude < 0.015625, least, scaled)
        stored = tl.where(is_finite, stored, float("nan"))
        scale = tl.where(is_finite, exponent, 0x7FC00000).to(tl.float32, bitcast=True)
        tl.store(scale_place, scale, mask=is_stored)
    tl.store(place, stored.to(place.dtype.element_ty), mask=mask & is_stored)


@kernel
def rotate_and_store(  # noqa: PLR0913
    qkv: tl.tensor,  # (rows, heads + 2 KV heads, 2 * HALF)
    query: tl.tensor,  # (rows, heads, 2 * HALF)
    kv: tl.tensor,
    kv_scales: tl.tensor,
    positions: tl.tensor,  # (rows,)
    slots: tl.tensor,  # (rows,) block * BLOCK_SIZE + offset; below 0: not stored
    cosines: tl.tensor,  # (positions, HALF) float32
    sines: tl.tensor,
    query_norm: tl.tensor,  # (2 * HALF,)
    key_norm: tl.tensor,
    eps: tl.tensor,
    layer_offset: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    value_offset: tl.tensor,
    scales_offset: tl.tensor,
    scale_stride: tl.tensor,
    value_scale_offset: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SCALED_MAX: tl.constexpr,
) -> None:
    """Normalise and rotate a query or key head, and store keys and values; a grid of (rows, heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, 2 * BLOCK_HALF)
    # Both halves are read beside each other: `swapped` holds for each dimension its partner in the rotation.
    is_second = dim >= BLOCK_HALF
    within = tl.where(is_second, dim - BLOCK_HALF, dim)
    mask = within < HALF
    own = within + tl.where(is_second, HALF, 0)
    partner = within + tl.where(is_second, 0, HALF)
    begin = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF)
    values = tl.load(begin + own, mask=mask, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        swapped = tl.load(begin + partner, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            rate = 1.0 / tl.sqrt(tl.sum(values * values, 0) / (2 * HALF) + eps)
            norm = query_norm
            if head >= NUM_HEADS:
                norm = key_norm
            values *= rate * tl.load(norm + own, mask=mask, other=0.0).to(tl.float32)
            swapped *= rate * tl.load(norm + partner, mask=mask, other=0.0).to(tl.float32)
        angle = tl.load(positions + row) * HALF + within
        cosine = tl.load(cosines + angle, mask=mask, other=0.0)
        sine = tl.load(sines + angle, mask=mask, other=0.0)
        values = values * cosine + swapped * tl.where(is_second, sine, -sine)
    if head < NUM_HEADS:
        rotated = query + (row * NUM_HEADS + head) * (2 * HALF) + own
        tl.store(rotated, values.to(query.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        block, token = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        stored_head = (head - NUM_HEADS) % NUM_KV_HEADS
        is_value = (head - NUM_HEADS) // NUM_KV_HEADS
        place = kv + layer_offset + block * block_stride + stored_head * head_stride
        place += is_value * value_offset + token * (2 * HALF)
        scale_place = kv_scales + scales_offset + block * scale_stride + stored_head * BLOCK_SIZE
        scale_place += is_value * value_scale_offset + token
        store_head(place + own, scale_place, values, mask, slot >= 0, SCALED_MAX)


@kernel
def silu_and_mul(
    gate_up: tl.tensor,  # (rows, 2 * SIZE)
    out: tl.tensor,  # (rows, SIZE)
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute `silu(gate) * up`; a grid of (rows, pieces of SIZE)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@kernel
def round_to_fp8(
    x: tl.tensor,  # (rows, SIZE)
    out: tl.tensor,  # (rows, SIZE) float8_e4m3fn
    scales: tl.tensor,  # (rows,) float32
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Round rows to FP8, each with the scale that makes its largest value 448; a program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    values = tl.load(x + row * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-20) / FP8_MAX
    tl.store(scales + row, scale)
    tl.store(out + row * SIZE + column, (values / scale).to(out.dtype.element_ty), mask=mask)
