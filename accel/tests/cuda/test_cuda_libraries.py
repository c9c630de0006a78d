"""FlashInfer and FlashAttention get the blocks, rows and windows of a step as their interfaces say.

Stand-ins for both compute from those arguments alone, by the definition, in float64.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sagellm.accel.cuda import library_attention
from sagellm.accel.cuda.library_attention import FlashAttention, FlashInfer
from sagellm.accel.cuda.paged_kv import LayerKV, PagedKV
from sagellm.core import AttentionSpec, InputBatch, KVGroup, KVLayout, UnsupportedModelError

CPU = torch.device("cpu")
HEADS, KV_HEADS, D, NUM_BLOCKS = 4, 2, 8, 7
SPECS = (
    AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D, scale=0.3),
    AttentionSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D, scale=0.5, sliding_window=5, soft_cap=4.0
    ),
)


def attend(query, keys, values, scale, window, cap):
    """Attend to (tokens, KV heads, D) from a sequence's last rows, `window` tokens back."""
    keys, values = (each.double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    back = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))[None]
    is_hidden = (back < 0) | ((back > window) if window >= 0 else False)
    weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


class PrefillWrapper:
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, workspace, kv_layout):
        assert (workspace.dtype, kv_layout) == (torch.uint8, "HND")

    def plan(self, rows, blocks, indices, last, num_heads, num_kv_heads, head_dim, page_size, **settings):
        assert (num_heads, num_kv_heads, head_dim, settings["causal"]) == (HEADS, KV_HEADS, D, True)
        assert rows.dtype == blocks.dtype == indices.dtype == last.dtype == torch.int32
        self.given = rows.tolist(), blocks.tolist(), indices.long(), last.tolist(), page_size, settings

    def run(self, query, kv):
        rows, blocks, indices, last, page_size, settings = self.given
        out = []
        for each in range(len(last)):
            pages = indices[blocks[each] : blocks[each + 1]]
            length = (len(pages) - 1) * page_size + last[each]
            keys, values = (part[pages].transpose(1, 2).flatten(0, 1)[:length] for part in kv)
            window, cap = settings["window_left"], settings["logits_soft_cap"]
            part = query[rows[each] : rows[each + 1]]
            out.append(attend(part, keys, values, settings["sm_scale"], window, cap))
        return torch.cat(out)


def varlen(query, keys, values, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **settings):
    """FlashAttention's flash_attn_varlen_func with a block table."""
    rows, tokens = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert settings["causal"]
    assert settings["block_table"].dtype == torch.int32
    out = []
    for each, table in enumerate(settings["block_table"].long()):
        length = tokens[each + 1] - tokens[each]
        assert length <= max_seqlen_k
        assert rows[each + 1] - rows[each] <= max_seqlen_q
        parts = (part[table].flatten(0, 1)[:length] for part in (keys, values))
        part, window = query[rows[each] : rows[each + 1]], settings["window_size"][0]
        out.append(attend(part, *parts, settings["softmax_scale"], window, settings["softcap"]))
    return torch.cat(out)


@pytest.fixture
def installed(monkeypatch):
    modules = {
        "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper},
        "flash_attn": {"flash_attn_varlen_func": varlen},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(library_attention, "find_spec", lambda name: name)


def layout_of(block_size, dtype="bfloat16"):
    group = KVGroup(layer_ids=(0, 1), num_kv_heads=KV_HEADS, head_dim=D, dtype=dtype)
    return KVLayout(group=group, block_size=block_size)


SPEC = SimpleNamespace(attention=SPECS)


@pytest.mark.parametrize(("library", "block_size"), [(FlashInfer, 8), (FlashAttention, 256)])
def test_a_library_attends_to_the_blocks_of_each_sequence(installed, library, block_size):
    layout = layout_of(block_size)
    kv = PagedKV(layout, NUM_BLOCKS, CPU)
    generator = torch.Generator().manual_seed(0)
    kv.values.copy_(torch.randn(kv.values.shape, generator=generator))
    query_lens, seq_lens, tables = [1, 3, 4], [2 * block_size, block_size + 1, 4], [[3, 1], [6, 2], [4, 0]]
    batch = InputBatch(
        input_ids=torch.zeros(8, dtype=torch.int64),
        position_ids=torch.zeros(8, dtype=torch.int64),
        slot_mapping=torch.zeros(8, dtype=torch.int64),
        block_tables=torch.tensor(tables),
        query_lens=query_lens,
        seq_lens=seq_lens,
        logits_indices=torch.zeros(0, dtype=torch.int64),
    )
    query = torch.randn(8, HEADS, D, generator=generator)
    plan = library(SPEC, layout, torch.bfloat16).plan(batch)
    shape = (NUM_BLOCKS, 2, 2, KV_HEADS, block_size, D)
    stored = kv.bytes[:, : layout.scales_offset_bytes].view(torch.bfloat16).view(shape)
    for layer, spec in enumerate(SPECS):
        expected = []
        for part, table, length in zip(query.split(query_lens), tables, seq_lens, strict=True):
            keys, values = (
                stored[table, layer, which].transpose(1, 2).flatten(0, 1)[:length] for which in (0, 1)
            )
            window = -1 if spec.sliding_window is None else spec.sliding_window - 1
            expected.append(attend(part, keys, values, spec.scale, window, spec.soft_cap))
        torch.testing.assert_close(
            plan.run(query, LayerKV(spec, kv.views(layer), {}, {})), torch.cat(expected)
        )


def test_what_a_library_cannot_take_is_refused_with_the_reason(installed):
    with pytest.raises(UnsupportedModelError, match="multiple of 256"):
        FlashAttention(SPEC, layout_of(16), torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="both in bfloat16"):
        FlashInfer(SPEC, layout_of(16, "float16"), torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="both in bfloat16"):
        FlashInfer(SPEC, layout_of(16, "float32"), torch.float32)


@pytest.mark.parametrize("library", [FlashInfer, FlashAttention])
def test_a_library_that_is_not_installed_is_refused(library, monkeypatch):
    monkeypatch.setattr(library_attention, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=f"{library.package}, which is not installed"):
        library.require()
