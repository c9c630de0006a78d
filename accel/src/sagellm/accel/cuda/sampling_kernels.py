"""Choosing a token for each row of logits, exactly, without sorting and without the host.

`count_tokens` keeps the counts that penalties need; `change` and `edit` make penalties, masks and changes of
single logits, in place.

`block_statistics` reads a row once. `select_candidates` keeps the entries that top-k or the nucleus can
reach, and `draw` filters them in the order temperature, min-p, top-k, top-p, and inverts the cumulative sum
in the order of ids. If the candidates do not decide a row, `draw` reads the whole row instead.

`score_blocks` and `score_tokens` give log-probabilities: the second takes the largest logits one after the
other, each from the block whose largest is next.

Thresholds are found by bisection over the bits of the float32 logits, read as integers of the same order, so
that they are exact. Sums of weights are in float64 and in a fixed order.
"""

from __future__ import annotations

import triton.language as tl

from sagellm.accel.cuda.kernel import device_function, kernel

BLOCK = tl.constexpr(128)
"""Neighbours of which `block_statistics` keeps the maximum and the mass."""

NUCLEUS_BLOCKS = tl.constexpr(64)
"""Without top-k, candidates are the logits that reach the maxima of this many blocks."""

LOWEST_KEY = tl.constexpr(-(1 << 31))
NO_KEY = tl.constexpr(1 << 40)
NO_ID = tl.constexpr((1 << 31) - 1)
LOWEST_PLACE = tl.constexpr(-(1 << 63))
ABOVE_ALL_PLACES = tl.constexpr((1 << 63) - 1)

# Columns of the settings, (rows, 5) float64.
TEMPERATURE = tl.constexpr(0)  # 0: greedy
MIN_P = tl.constexpr(1)
TOP_K = tl.constexpr(2)  # 0: none
DROPPED_SHARE = tl.constexpr(3)  # 1 - top-p; negative: none
UNIFORM = tl.constexpr(4)
NUM_SETTINGS = tl.constexpr(5)

# Columns of what is changed, (changed, 8) float64.
ROW = tl.constexpr(0)  # of the logits
COUNTS_ROW = tl.constexpr(1)  # -1: no penalties
MASK_ROW = tl.constexpr(2)  # -1: no mask
DRAFTS_BEGIN = tl.constexpr(3)
NUM_DRAFTS = tl.constexpr(4)
REPETITION = tl.constexpr(5)
FREQUENCY = tl.constexpr(6)
PRESENCE = tl.constexpr(7)
NUM_CHANGES = tl.constexpr(8)

OUTPUT_BITS = tl.constexpr((1 << 30) - 1)
"""Of a count; the bit above says that the token is in the prompt."""


@kernel
def count_tokens(
    counts: tl.tensor,  # (any, vocab) int32
    begins: tl.tensor,  # (tokens,) int64: row of the counts · vocab
    sources: tl.tensor,  # (tokens,) int64: a token, or -1 - the seat whose last token it is
    last: tl.tensor,  # (seats,) int64
    num_tokens: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    """Count tokens of outputs."""
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = place < num_tokens
    source = tl.load(sources + place, mask=inside, other=0)
    token = tl.where(source < 0, tl.load(last - 1 - source, mask=inside & (source < 0), other=0), source)
    tl.atomic_add(counts + tl.load(begins + place, mask=inside, other=0) + token, 1, mask=inside)


@kernel
def change(  # noqa: PLR0913
    logits: tl.tensor,  # (rows, vocab) float32, changed in place
    plan: tl.tensor,
    counts: tl.tensor,  # (any, vocab) int32
    drafts: tl.tensor,  # (any,) int64
    masks: tl.tensor,  # (any, num_words) int32
    vocab_size: tl.tensor,
    num_words: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Penalise tokens that occurred, and forbid those outside the mask; a grid of (changed, tiles)."""
    one = plan + tl.program_id(0).to(tl.int64) * NUM_CHANGES
    counts_row, mask_row = tl.load(one + COUNTS_ROW).to(tl.int64), tl.load(one + MASK_ROW).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    place = logits + tl.load(one + ROW).to(tl.int64) * vocab_size + ids
    values = tl.load(place, mask=inside, other=0.0)
    if counts_row >= 0:
        count = tl.load(counts + counts_row * vocab_size + ids, mask=inside, other=0)
        begin = tl.load(one + DRAFTS_BEGIN).to(tl.int64)
        for draft in range(0, tl.load(one + NUM_DRAFTS).to(tl.int32)):
            count += (ids == tl.load(drafts + begin + draft)).to(tl.int32)
        repetition = tl.load(one + REPETITION).to(tl.float32)
        penalised = tl.where(values < 0.0, values * repetition, tl.div_rn(values, repetition))
        values = tl.where(count > 0, penalised, values)
        in_output = (count & OUTPUT_BITS).to(tl.float64)
        presence = tl.where(in_output > 0.0, tl.load(one + PRESENCE), 0.0)
        values -= (tl.load(one + FREQUENCY) * in_output + presence).to(tl.float32)
    if mask_row >= 0:
        words = tl.load(masks + mask_row * num_words + ids // 32, mask=inside, other=0)
        values = tl.where(((words >> (ids % 32)) & 1) != 0, values, -float("inf"))
    tl.store(place, values, mask=inside)


@kernel
def edit(
    logits: tl.tensor,
    edited: tl.tensor,  # (edits,) int64
    addends: tl.tensor,  # (edits,) float32
    num_edits: tl.tensor,
    EDITS: tl.constexpr,
) -> None:
    """Add to single logits, or forbid them."""
    edit = tl.program_id(0) * EDITS + tl.arange(0, EDITS)
    inside = edit < num_edits
    place = logits + tl.load(edited + edit, mask=inside, other=0)
    addend = tl.load(addends + edit, mask=inside, other=0.0)
    values = tl.load(place, mask=inside, other=0.0)
    is_forbidden = addend == -float("inf")
    tl.store(place, tl.where(is_forbidden, -float("inf"), values + addend), mask=inside)


@device_function
def order_key(values: tl.tensor) -> tl.tensor:
    """Return int64s in the order of float32s; 0.0 and -0.0 share one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@device_function
def weights_of(scaled: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """Return exp(scaled - largest) as float64; scaled may be -inf."""
    return tl.exp(scaled - largest).to(tl.float64)


@device_function
def maxima_and_masses(scaled: tl.tensor) -> tl.tensor:
    """Return the maximum of each block of (blocks, BLOCK), NaN if it holds one, and its mass."""
    largest = tl.max(scaled, 1)
    pivot = tl.where(largest > -float("inf"), largest, 0.0)
    mass = tl.sum(weights_of(scaled, pivot[:, None]), 1)
    has_nan = tl.max((scaled != scaled).to(tl.int32), 1) > 0
    return tl.where(has_nan, float("nan"), largest), mass


@kernel
def block_statistics(  # noqa: PLR0913
    logits: tl.tensor,  # (rows, vocab) float32
    settings: tl.tensor,
    maxima: tl.tensor,  # (rows, blocks) float32 of logit / temperature
    masses: tl.tensor,  # (rows, blocks) float64 sums of exp(logit / temperature - the block's maximum)
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    TILE_BLOCKS: tl.constexpr,
) -> None:
    """Find each block's maximum, NaN if it holds one, and mass; a grid of (rows, tiles of blocks)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * vocab_size + ids, mask=ids < vocab_size, other=-float("inf"))
    temperature = tl.load(settings + row * NUM_SETTINGS + TEMPERATURE).to(tl.float32)
    scaled = tl.div_rn(values, tl.where(temperature > 0.0, temperature, 1.0))
    largest, mass = maxima_and_masses(scaled)
    place = row * num_blocks + block
    tl.store(maxima + place, largest, mask=block < num_blocks)
    tl.store(masses + place, mass, mask=block < num_blocks)


@kernel
def select_candidates(  # noqa: PLR0913
    logits: tl.tensor,
    settings: tl.tensor,
    maxima: tl.tensor,
    candidates: tl.tensor,  # (rows, CAPACITY) float32 logit / temperature
    candidate_ids: tl.tensor,  # (rows, CAPACITY) int32, rising
    num_candidates: tl.tensor,  # (rows,) int32; -1: too many, or the row needs none
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS: tl.constexpr,  # a power of two, no smaller than num_blocks
    TILE_BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Collect the logits that reach the k-th largest block maximum; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    setting = settings + row * NUM_SETTINGS
    temperature = tl.load(setting + TEMPERATURE).to(tl.float32)
    top_k = tl.load(setting + TOP_K).to(tl.int32)
    is_whole = (top_k == 0) & (tl.load(setting + MIN_P) == 0.0) & (tl.load(setting + DROPPED_SHARE) < 0.0)
    needed = tl.where(top_k > 0, top_k, tl.minimum(NUCLEUS_BLOCKS, num_blocks))
    count = -1
    if (temperature > 0.0) & (is_whole == 0) & (needed <= num_blocks):
        block = tl.arange(0, BLOCKS)
        of_row = maxima + row * num_blocks
        block_maxima = tl.load(of_row + block, mask=block < num_blocks, other=-float("inf"))
        keys = order_key(block_maxima)
        low = tl.full((), LOWEST_KEY, tl.int64)
        high = tl.max(keys, 0) + 1
        while high - low > 1:
            middle = low + (high - low) // 2
            if tl.sum((keys >= middle).to(tl.int32), 0) >= needed:
                low = middle
            else:
                high = middle
        count = 0
        for start in range(0, num_blocks, TILE_BLOCKS):
            near = start + tl.arange(0, TILE_BLOCKS)
            largest = tl.load(of_row + near, mask=near < num_blocks, other=-float("inf"))
            is_chosen = (order_key(largest) >= low) & (near < num_blocks)
            if (tl.max(is_chosen.to(tl.int32), 0) > 0) & (count <= CAPACITY):
                ids = tl.reshape(near[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], [TILE_BLOCKS * BLOCK])
                chosen = tl.broadcast_to(is_chosen[:, None], [TILE_BLOCKS, BLOCK])
                mask = tl.reshape(chosen, [TILE_BLOCKS * BLOCK]) & (ids < vocab_size)
                values = tl.load(logits + row * vocab_size + ids, mask=mask, other=-float("inf"))
                scaled = tl.div_rn(values, temperature)
                is_kept = mask & (order_key(scaled) >= low)
                place = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
                is_kept &= place < CAPACITY
                tl.store(candidates + row * CAPACITY + place, scaled, mask=is_kept)
                tl.store(candidate_ids + row * CAPACITY + place, ids, mask=is_kept)
                count = tl.max(place, 0) + 1
        if count > CAPACITY:
            count = -1
    tl.store(num_candidates + row, count)


@device_function
def read_tile(source: tl.tensor, start: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return keys, weights and ids of a tile of a row's candidates or, if they do not decide, of the row.

    `source` is how many there are, whether they are candidates, where these, their ids and the logits are,
    the temperature, and the largest scaled logit. Beyond the end, keys are the lowest and weights are 0.
    """
    length, is_compact, candidates, candidate_ids, row_logits, temperature, largest = source
    place = start + tl.arange(0, TILE)
    mask = place < length
    compact, whole = mask & is_compact, mask & (is_compact == 0)
    chosen = tl.load(candidates + place, mask=compact, other=-float("inf"))
    ids = tl.load(candidate_ids + place, mask=compact, other=0)
    logits = tl.load(row_logits + place, mask=whole, other=-float("inf"))
    scaled = tl.where(is_compact, chosen, tl.div_rn(logits, temperature))
    keys = tl.where(mask, order_key(scaled), LOWEST_KEY)
    return keys, weights_of(scaled, largest), tl.where(is_compact, ids, place)


@device_function
def first_above(cumulative: tl.tensor, target: tl.tensor, weights: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return the first id whose cumulative weight exceeds the target; if none does, the last with weight."""
    found = tl.min(tl.where(cumulative > target, ids, NO_ID), 0)
    last = tl.max(tl.where(weights > 0.0, ids, 0), 0)
    return tl.where(found < NO_ID, found, last)


@device_function
def draw_whole(  # noqa: PLR0913
    row_logits: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    temperature: tl.tensor,
    largest: tl.tensor,
    uniform: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Draw from all tokens: first a block, by the cumulative sum of masses, then a token inside it."""
    block = tl.arange(0, BLOCKS)
    mask = block < num_blocks
    block_maxima = tl.load(maxima + block, mask=mask, other=-float("inf"))
    weights = tl.load(masses + block, mask=mask, other=0.0) * weights_of(block_maxima, largest)
    cumulative = tl.cumsum(weights, 0)
    target = uniform * tl.max(cumulative, 0)
    chosen = first_above(cumulative, target, weights, block)
    before = tl.sum(tl.where(block == chosen, cumulative - weights, 0.0), 0)
    ids = chosen * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(row_logits + ids, mask=ids < vocab_size, other=-float("inf"))
    inside = weights_of(tl.div_rn(logits, temperature), largest)
    return first_above(before + tl.cumsum(inside, 0), target, inside, ids)


@device_function
def first_largest(
    row_logits: tl.tensor,
    maxima: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    largest: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Return the lowest id of the largest logit."""
    block = tl.arange(0, BLOCKS)
    block_maxima = tl.load(maxima + block, mask=block < num_blocks, other=-float("inf"))
    chosen = tl.min(tl.where((block_maxima == largest) & (block < num_blocks), block, BLOCKS), 0)
    ids = chosen * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(row_logits + ids, mask=ids < vocab_size, other=-float("inf"))
    return tl.min(tl.where((logits == largest) & (ids < vocab_size), ids, NO_ID), 0)


@device_function
def key_of(value: tl.tensor) -> tl.tensor:
    """Return the key of one number."""
    return tl.max(order_key(tl.zeros((1,), tl.float32) + value), 0)


@device_function
def kth_key(source: tl.tensor, largest: tl.tensor, top_k: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return the key of the k-th largest scaled logit."""
    low, high = tl.full((), LOWEST_KEY, tl.int64), key_of(largest) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        count = 0
        for start in range(0, source[0], TILE):
            keys, _, _ = read_tile(source, start, TILE)
            count += tl.sum((keys >= middle).to(tl.int32), 0)
        if count >= top_k:
            low = middle
        else:
            high = middle
    return low


@device_function
def mass_above(
    key: tl.tensor, source: tl.tensor, least_key: tl.tensor, min_p: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Return the weight of what survives top-k and min-p and is larger than a key."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, source[0], TILE):
        keys, weights, _ = read_tile(source, start, TILE)
        mass += tl.sum(tl.where((keys > key) & (keys >= least_key) & (weights >= min_p), weights, 0.0), 0)
    return mass


@device_function
def border(  # noqa: PLR0913
    source: tl.tensor,
    largest: tl.tensor,
    least_key: tl.tensor,
    min_p: tl.tensor,
    total: tl.tensor,
    dropped_share: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the smallest key of the nucleus, and how many of that key, of the lowest ids, it drops."""
    low, high = least_key - 1, key_of(largest)
    while high - low > 1:
        middle = low + (high - low) // 2
        if total - mass_above(middle, source, least_key, min_p, TILE) > dropped_share * total:
            high = middle
        else:
            low = middle
    # This is the smallest key that would be kept; the border is the smallest one that there is from it on.
    border_key = tl.full((), NO_KEY, tl.int64)
    for start in range(0, source[0], TILE):
        keys, weights, _ = read_tile(source, start, TILE)
        is_inside = (keys >= high) & (keys >= least_key) & (weights >= min_p)
        border_key = tl.minimum(border_key, tl.min(tl.where(is_inside, keys, NO_KEY), 0))
    num_ties = 0
    weight = tl.full((), 0.0, tl.float64)
    for start in range(0, source[0], TILE):
        keys, weights, _ = read_tile(source, start, TILE)
        num_ties += tl.sum((keys == border_key).to(tl.int32), 0)
        weight = tl.maximum(weight, tl.max(tl.where(keys == border_key, weights, 0.0), 0))
    above = mass_above(border_key, source, least_key, min_p, TILE)
    room = (total - above - dropped_share * total) / tl.maximum(weight, 1e-300)
    num_kept = tl.ceil(tl.minimum(tl.maximum(room, 1.0), num_ties.to(tl.float64))).to(tl.int32)  # type: ignore[attr-defined]
    return border_key, num_ties - num_kept


@device_function
def draw_kept(  # noqa: PLR0913
    source: tl.tensor,
    uniform: tl.tensor,
    least_key: tl.tensor,
    min_p: tl.tensor,
    border_key: tl.tensor,
    num_dropped: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Draw from what survives: all above the border, and what lies on it except the first `num_dropped`."""
    total, target = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    token, is_found = 0, 0
    for turn in range(2):  # the first adds up the weights, the second finds the target
        total = total * 0.0
        num_ties = 0
        for start in range(0, source[0], TILE):
            keys, weights, ids = read_tile(source, start, TILE)
            survives = (keys >= least_key) & (weights >= min_p)
            is_tie = survives & (keys == border_key)
            rank = num_ties + tl.cumsum(is_tie.to(tl.int32), 0)
            is_kept = survives & ((keys > border_key) | (is_tie & (rank > num_dropped)))
            kept = tl.where(is_kept, weights, 0.0)
            cumulative = total + tl.cumsum(kept, 0)
            if (turn == 1) & (is_found == 0):
                found = tl.min(tl.where((cumulative > target) & (kept > 0.0), ids, NO_ID), 0)
                last = tl.max(tl.where(kept > 0.0, ids, 0), 0)
                is_found = (found < NO_ID).to(tl.int32)
                token = tl.where(found < NO_ID, found, tl.maximum(token, last))
            num_ties += tl.sum(is_tie.to(tl.int32), 0)
            total += tl.sum(kept, 0)
        target = uniform * total
    return token


@device_function
def draw_filtered(  # noqa: PLR0913
    source: tl.tensor,
    largest: tl.tensor,
    mass: tl.tensor,
    top_k: tl.tensor,
    min_p: tl.tensor,
    dropped_share: tl.tensor,
    uniform: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Draw from what top-k, min-p and top-p keep; `mass` is the weight of the whole row."""
    least_key = tl.full((), LOWEST_KEY, tl.int64)
    if top_k > 0:
        least_key = kth_key(source, largest, top_k, TILE)
    total = mass
    if (top_k > 0) | (min_p > 0.0):
        total = mass_above(tl.full((), LOWEST_KEY, tl.int64), source, least_key, min_p, TILE)
    border_key = tl.full((), LOWEST_KEY, tl.int64) - 1
    num_dropped = 0
    if dropped_share >= 0.0:
        border_key, num_dropped = border(source, largest, least_key, min_p, total, dropped_share, TILE)
    return draw_kept(source, uniform, least_key, min_p, border_key, num_dropped, TILE)


@device_function
def deciding(  # noqa: PLR0913
    candidates: tl.tensor,
    count: tl.tensor,
    largest: tl.tensor,
    min_p: tl.tensor,
    dropped_share: tl.tensor,
    mass: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the number of candidates if all that min-p and top-p keep is among them, else -1."""
    kept = tl.full((), 0.0, tl.float64)
    smallest = tl.full((), float("inf"), tl.float32)
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        scaled = tl.load(candidates + place, mask=place < count, other=-float("inf"))
        kept += tl.sum(weights_of(scaled, largest), 0)
        smallest = tl.minimum(smallest, tl.min(tl.where(place < count, scaled, float("inf")), 0))
    # What is not a candidate is smaller than all of them, so min-p or top-p must have ended before.
    is_ended = weights_of(smallest, largest) < min_p
    if min_p == 0.0:
        is_ended = mass - kept <= dropped_share * mass
    return tl.where(is_ended, count, -1)


@kernel
def draw(  # noqa: PLR0913
    logits: tl.tensor,
    settings: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
    candidates: tl.tensor,
    candidate_ids: tl.tensor,
    num_candidates: tl.tensor,
    tokens: tl.tensor,  # (rows,) int64; -1: the row is not a distribution
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Choose a token; a program per row."""
    row = tl.program_id(0).to(tl.int64)
    setting = settings + row * NUM_SETTINGS
    temperature = tl.load(setting + TEMPERATURE).to(tl.float32)
    min_p = tl.load(setting + MIN_P).to(tl.float32).to(tl.float64)
    top_k = tl.load(setting + TOP_K).to(tl.int32)
    dropped_share, uniform = tl.load(setting + DROPPED_SHARE), tl.load(setting + UNIFORM)
    row_logits = logits + row * vocab_size
    of_maxima, of_masses = maxima + row * num_blocks, masses + row * num_blocks
    block = tl.arange(0, BLOCKS)
    mask = block < num_blocks
    block_maxima = tl.load(of_maxima + block, mask=mask, other=-float("inf"))
    largest = tl.max(block_maxima, 0)
    has_nan = tl.max((block_maxima != block_maxima).to(tl.int32), 0) > 0
    token = -1
    if (has_nan == 0) & (largest > -float("inf")) & (largest < float("inf")):
        if temperature == 0.0:
            token = first_largest(row_logits, of_maxima, vocab_size, num_blocks, largest, BLOCKS)
        elif (top_k == 0) & (min_p == 0.0) & (dropped_share < 0.0):
            token = draw_whole(
                row_logits,
                of_maxima,
                of_masses,
                vocab_size,
                num_blocks,
                temperature,
                largest,
                uniform,
                BLOCKS,
            )
        else:
            chosen, chosen_ids = candidates + row * CAPACITY, candidate_ids + row * CAPACITY
            block_weights = weights_of(block_maxima, largest)
            mass = tl.sum(tl.load(of_masses + block, mask=mask, other=0.0) * block_weights, 0)
            count = tl.load(num_candidates + row)
            if (top_k == 0) & (count >= 0):
                count = deciding(chosen, count, largest, min_p, dropped_share, mass, TILE)
            is_compact = count >= 0
            length = tl.where(is_compact, count, vocab_size)
            source = (length, is_compact, chosen, chosen_ids, row_logits, temperature, largest)
            token = draw_filtered(source, largest, mass, top_k, min_p, dropped_share, uniform, TILE)
    tl.store(tokens + row, token)


@kernel
def score_blocks(  # noqa: PLR0913
    logits: tl.tensor,  # (any, vocab) float32
    tokens: tl.tensor,  # (any,) int64; a negative one counts as 0
    rows: tl.tensor,  # (2, scored) int64: a row of the logits, and where its token is
    maxima: tl.tensor,  # (scored, blocks) float32
    masses: tl.tensor,  # (scored, blocks) float64
    num_above: tl.tensor,  # (scored, tiles) int32: logits that are at least the token's
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    TILE_BLOCKS: tl.constexpr,
) -> None:
    """Find each block's maximum and mass, and the token's rank; a grid of (scored, tiles of blocks)."""
    one, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_logits = logits + tl.load(rows + one) * vocab_size
    token = tl.load(tokens + tl.load(rows + tl.num_programs(0) + one))
    chosen = tl.load(row_logits + tl.maximum(token, 0))
    block = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(row_logits + ids, mask=ids < vocab_size, other=-float("inf"))
    is_above = (values >= chosen) & (ids < vocab_size)
    tl.store(num_above + one * tl.num_programs(1) + tile, tl.sum(tl.sum(is_above.to(tl.int32), 1), 0))
    largest, mass = maxima_and_masses(values)
    place = one * num_blocks + block
    tl.store(maxima + place, largest, mask=block < num_blocks)
    tl.store(masses + place, mass, mask=block < num_blocks)


@device_function
def place_of(keys: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return int64s in the order of keys, and of equal keys the lower id above the higher."""
    return (keys << 32) | (ids ^ NO_ID)


@device_function
def id_at(place: tl.tensor) -> tl.tensor:
    """Return the id in a place."""
    return (place & NO_ID) ^ NO_ID


@kernel
def score_tokens(  # noqa: PLR0913
    logits: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
    num_above: tl.tensor,
    scores: tl.tensor,  # (scored, 2 + 2 · num_top) float64
    num_top: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_tiles: tl.tensor,
    BLOCKS: tl.constexpr,  # a power of two, no smaller than num_blocks, nor num_tiles
) -> None:
    """Write a token's log-probability and rank, then the largest logits' and their ids; a program each."""
    one = tl.program_id(0).to(tl.int64)
    row_logits = logits + tl.load(rows + one) * vocab_size
    token = tl.load(tokens + tl.load(rows + tl.num_programs(0) + one))
    written = scores + one * (2 + 2 * num_top)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    block_maxima = tl.load(maxima + one * num_blocks + block, mask=inside, other=-float("inf"))
    largest = tl.max(block_maxima, 0)
    block_masses = tl.load(masses + one * num_blocks + block, mask=inside, other=0.0)
    partition = largest.to(tl.float64) + tl.log(tl.sum(block_masses * weights_of(block_maxima, largest), 0))
    chosen = tl.load(row_logits + tl.maximum(token, 0)).to(tl.float64)
    rank = tl.sum(tl.load(num_above + one * num_tiles + block, mask=block < num_tiles, other=0), 0)
    tl.store(written, chosen - partition)
    tl.store(written + 1, rank.to(tl.float64))
    # The largest entry of each block that is left, with the block for its id.
    left = tl.where(inside, place_of(order_key(block_maxima), block), LOWEST_PLACE)
    taken = tl.full((), ABOVE_ALL_PLACES, tl.int64)
    for number in range(num_top):
        of = id_at(tl.max(left, 0))
        ids = of * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(row_logits + ids, mask=ids < vocab_size, other=-float("inf"))
        places = tl.where(ids < vocab_size, place_of(order_key(values), ids), LOWEST_PLACE)
        places = tl.where(places < taken, places, LOWEST_PLACE)
        taken = tl.max(places, 0)
        following = tl.max(tl.where(places < taken, places, LOWEST_PLACE), 0)
        left = tl.where(block == of, place_of(following >> 32, of), left)
        value = tl.load(row_logits + id_at(taken)).to(tl.float64)
        tl.store(written + 2 + number, value - partition)
        tl.store(written + 2 + num_top + number, id_at(taken).to(tl.float64))
