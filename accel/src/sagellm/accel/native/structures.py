"""The structures of the library's C interface, `native/sage.h`."""

from __future__ import annotations

import ctypes
from typing import get_args

from sagellm.core.protocols.forward import Operation

_INT32, _INT64, _FLOAT, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Linear(ctypes.Structure):
    """A packed matrix (n outputs, k inputs), and what happens to its inputs before the product."""

    _fields_ = [
        *((name, _INT32) for name in ("kind", "is_gated")),
        *((name, _INT64) for name in ("n", "k", "group")),
        ("data", _POINTER),
        ("bias", _POINTER),
        *((name, _INT32) for name in ("code", "has_half_scales", "has_zeros", "has_offsets", "is_unsigned")),
        ("scale_group", _INT64),
        *((name, _INT32) for name in ("has_one_scale", "input_code")),
        ("input_group", _INT64),
        ("input_scale", _FLOAT),
        ("order", _POINTER),
    ]


class CodedRows(ctypes.Structure):
    """Some outputs of a weight, as a checkpoint has them."""

    _fields_ = [
        (name, _POINTER) for name in ("codes", "scales", "zeros", "offsets", "factors", "offset_factors")
    ]


class Norm(ctypes.Structure):
    """A norm; without a weight there is none."""

    _fields_ = [("weight", _POINTER), ("eps", _FLOAT)]


class Layer(ctypes.Structure):
    """One layer of a decoder."""

    _fields_ = [
        *((name, Norm) for name in ("input_norm", "query_norm", "key_norm", "forward_norm")),
        ("qkv", Linear * 3),
        *((name, Linear) for name in ("output", "gate_up", "up", "down")),
        *((name, _POINTER) for name in ("cos", "sin")),
        *((name, _INT64) for name in ("rotary_dim", "window")),
        *((name, _FLOAT) for name in ("scale", "soft_cap")),
    ]


class Model(ctypes.Structure):
    """A decoder; `embedding` null: its rows are those of `embedding_codes`, and without these of the head."""

    _fields_ = [
        *(
            (name, _INT64)
            for name in ("num_layers", "hidden", "vocab", "num_heads", "num_kv_heads", "head_dim")
        ),
        ("layers", _POINTER),
        ("norm", Norm),
        ("head", Linear),
        ("embedding", _POINTER),
        ("embedding_kind", _INT32),
        ("embedding_codes", Linear),
        *((name, _INT32) for name in ("has_separate_norms", "has_separate_stores")),
    ]


class KV(ctypes.Structure):
    """The KV of all blocks; strides in bytes."""

    _fields_ = [
        ("kind", _INT32),
        ("base", _POINTER),
        *((name, _INT64) for name in ("block_size", "block", "layer", "kv", "head", "token")),
        *((name, _INT64) for name in ("scales", "layer_scales", "kv_scales", "head_scales")),
    ]


class Step(ctypes.Structure):
    """The tokens of one step, all sequences one after another."""

    _fields_ = [
        *((name, _INT64) for name in ("num_tokens", "num_seqs", "num_wanted", "table_stride")),
        *((name, _POINTER) for name in ("input_ids", "positions", "slots", "block_tables")),
        *((name, _POINTER) for name in ("query_lens", "seq_lens", "wanted", "logits")),
        *((name, _INT64) for name in ("num_hidden_layers", "num_hidden_rows")),
        *((name, _POINTER) for name in ("hidden_layers", "hidden_rows", "hidden")),
        ("num_threads", _INT32),
    ]


class Draw(ctypes.Structure):
    """Rows of logits from which tokens are chosen."""

    _fields_ = [
        *((name, _INT64) for name in ("num_rows", "vocab")),
        *((name, _POINTER) for name in ("logits", "settings", "keys", "positions", "tokens", "scratch")),
        *((name, _POINTER) for name in ("places", "replaced", "replaced_rows", "masks", "mask_rows")),
        *((name, _POINTER) for name in ("edits", "edit_offsets", "num_top", "logprobs")),
        ("most_top", _INT64),
        ("num_threads", _INT32),
    ]


OPERATIONS: tuple[Operation, ...] = get_args(Operation)
"""The library numbers them in this order, in the laps of a step: (operation, end) as int64."""

Beat = ctypes.CFUNCTYPE(None)
