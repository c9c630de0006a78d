"""FLOPs and MFU against counts done by hand, for two published shapes."""

import pytest

from sagellm.core import InvalidInputError, ModelGeometry
from sagellm.engines.metrics.flops import (
    attention_flops,
    decode_flops,
    layer_flops,
    logits_flops,
    mlp_flops,
    prefill_flops,
    projection_flops,
)
from sagellm.engines.metrics.roofline import MFUResult, bandwidth_use, roofline_ratio

QWEN3_0_6B = ModelGeometry(
    num_layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    max_model_len=40_960,
)
QWEN2_5_0_5B = ModelGeometry(
    num_layers=24,
    hidden_size=896,
    intermediate_size=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=151_936,
    max_model_len=32_768,
)


def test_qwen3_0_6b_by_hand():
    # q = 16 · 128 = 2048, kv = 8 · 128 = 1024
    # into q, k, v: 2 · 1024 · (2048 + 2 · 1024) = 2 · 1024 · 4096 = 8,388,608
    # out again:    2 · 2048 · 1024                               = 4,194,304
    assert projection_flops(QWEN3_0_6B) == 8_388_608 + 4_194_304 == 12_582_912
    # gate, up, down: 2 · 3 · 1024 · 3072 = 6 · 3,145,728
    assert mlp_flops(QWEN3_0_6B) == 18_874_368
    # scores and weighted sum at context c: 4 · 2048 · c = 8192 c
    assert attention_flops(QWEN3_0_6B, 512) == 8192 * 512 == 4_194_304
    # a layer at c = 512: 12,582,912 + 18,874,368 + 4,194,304
    assert layer_flops(QWEN3_0_6B, 512) == 35_651_584
    # logits: 2 · 1024 · 151,936
    assert logits_flops(QWEN3_0_6B) == 311_164_928


def test_qwen3_0_6b_prefill_of_512_and_decode_by_hand():
    # linear work of a token: 28 · (12,582,912 + 18,874,368) = 28 · 31,457,280 = 880,803,840
    # 512 tokens of it: 512 · 880,803,840                    = 450,971,566,080
    # contexts 1 + 2 + … + 512 = 512 · 513 ÷ 2               = 131,328
    # attention: 28 · 8192 · 131,328                         = 30,123,491,328
    # one row of logits                                      =     311,164,928
    assert prefill_flops(QWEN3_0_6B, 512) == 450_971_566_080 + 30_123_491_328 + 311_164_928 == 481_406_222_336
    # one token at c = 256: 880,803,840 + 28 · 8192 · 256 + 311,164,928, the middle one 58,720,256
    assert decode_flops(QWEN3_0_6B, 256) == 1_250_689_024


def test_qwen2_5_0_5b_by_hand():
    # q = 14 · 64 = 896, kv = 2 · 64 = 128
    # into q, k, v: 2 · 896 · (896 + 256) = 1792 · 1152 = 2,064,384
    # out again:    2 · 896 · 896                       = 1,605,632
    assert projection_flops(QWEN2_5_0_5B) == 2_064_384 + 1_605_632 == 3_670_016
    # gate, up, down: 6 · 896 · 4864 = 6 · 4,358,144
    assert mlp_flops(QWEN2_5_0_5B) == 26_148_864
    # attention at context c: 4 · 896 · c = 3584 c
    assert attention_flops(QWEN2_5_0_5B, 1000) == 3_584_000
    # a layer at c = 1000: 3,670,016 + 26,148,864 + 3,584,000
    assert layer_flops(QWEN2_5_0_5B, 1000) == 33_402_880
    # logits: 2 · 896 · 151,936
    assert logits_flops(QWEN2_5_0_5B) == 272_269_312


def test_qwen2_5_0_5b_prefill_of_2048_and_decode_by_hand():
    # linear work of a token: 24 · (3,670,016 + 26,148,864) = 24 · 29,818,880 = 715,653,120
    # 2048 tokens of it                                     = 1,465,657,589,760
    # contexts 1 + 2 + … + 2048 = 2048 · 2049 ÷ 2           = 2,098,176
    # attention: 24 · 3584 · 2,098,176 = 86,016 · 2,098,176 = 180,476,706,816
    # one row of logits                                     =     272,269,312
    assert prefill_flops(QWEN2_5_0_5B, 2048) == 1_465_657_589_760 + 180_476_706_816 + 272_269_312
    assert prefill_flops(QWEN2_5_0_5B, 2048) == 1_646_406_565_888
    # one token at c = 100: 715,653,120 + 86,016 · 100 + 272,269,312
    assert decode_flops(QWEN2_5_0_5B, 100) == 996_524_032


@pytest.mark.parametrize("geometry", [QWEN3_0_6B, QWEN2_5_0_5B])
def test_prefill_sums_causal_contexts_token_by_token(geometry):
    one_by_one = sum(geometry.num_layers * layer_flops(geometry, context) for context in range(1, 101))
    assert prefill_flops(geometry, 100, num_logits_rows=0) == one_by_one
    first = prefill_flops(geometry, 60, num_logits_rows=0)
    rest = prefill_flops(geometry, 40, num_cached_tokens=60, num_logits_rows=0)
    assert first + rest == one_by_one
    assert prefill_flops(geometry, 1, num_cached_tokens=99) == decode_flops(geometry, 100)
    assert prefill_flops(geometry, 0, num_logits_rows=0) == 0


def test_negative_counts_are_refused():
    with pytest.raises(InvalidInputError):
        prefill_flops(QWEN3_0_6B, -1)


def test_mfu_by_hand_for_both_shapes():
    # 481,406,222,336 FLOPs in 0.5 s are 962,812,444,672 FLOP/s; of 2.4e12 that is 0.40117…
    result = MFUResult(
        flops=prefill_flops(QWEN3_0_6B, 512), time_s=0.5, peak_flops_per_s=2.4e12, peak_source="measured"
    )
    assert result.flops_per_s == 962_812_444_672
    assert result.mfu == pytest.approx(0.962812444672 / 2.4)
    # 1,646,406,565,888 FLOPs in 2 s are 823,203,282,944 FLOP/s; of 2.4e12 that is 0.34300…
    other = MFUResult(
        flops=prefill_flops(QWEN2_5_0_5B, 2048), time_s=2, peak_flops_per_s=2.4e12, peak_source="measured"
    )
    assert other.mfu == pytest.approx(0.823203282944 / 2.4)


def test_mfu_prints_its_peak_and_that_attention_is_causal():
    result = MFUResult(
        flops=481_406_222_336, time_s=0.5, peak_flops_per_s=2.4e12, peak_source="measured in this run"
    )
    assert str(result) == (
        "MFU 40.1%: 481.406 GFLOP in 0.5000 s = 0.963 of 2.400 TFLOP/s (measured in this run), "
        "attention counted as causal"
    )


def test_an_mfu_above_1_is_kept_and_called_an_error():
    parts = {"time_s": 1.0, "peak_flops_per_s": 1e12, "peak_source": "measured"}
    above = MFUResult(flops=1_370_000_000_000, **parts)
    assert above.mfu == 1.37
    assert "an MFU of 1.37 cannot be true" in above.error
    assert str(above).endswith(f"; {above.error}")
    assert MFUResult(flops=10**12, **parts).error is None


@pytest.mark.parametrize(
    "wrong", [{"time_s": 0}, {"peak_flops_per_s": -1}, {"flops": 0}, {"time_s": float("nan")}]
)
def test_mfu_of_nothing_is_refused(wrong):
    parts = {"flops": 1, "time_s": 1.0, "peak_flops_per_s": 1.0, "peak_source": "test"} | wrong
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        MFUResult(**parts)


def test_bandwidth_use_and_roofline_by_hand():
    # 1.2 GB in 50 ms are 24 GB/s, two thirds of 36 GB/s
    assert bandwidth_use(1_200_000_000, 0.05, 36e9) == pytest.approx(2 / 3)
    # bytes need 1.2 / 36 = 33.3 ms, FLOPs 1.25 / 2400 s = 0.52 ms: the bytes decide
    limits = {
        "num_bytes": 1_200_000_000,
        "bandwidth_bytes_per_s": 36e9,
        "peak_flops_per_s": 2.4e12,
        "time_s": 0.05,
    }
    assert roofline_ratio(flops=1_250_000_000, **limits) == pytest.approx(2 / 3)
    # 96 GFLOP need 40 ms: now the arithmetic decides
    assert roofline_ratio(flops=96_000_000_000, **limits) == pytest.approx(0.8)
