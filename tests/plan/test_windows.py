"""Sliding windows of which only some layers have one (Megatron-core's window_attn_skip_freq)."""

from __future__ import annotations

import pytest

from workbench.errors import PlanError
from workbench.plan.model.model_shape import Shape, shape_from

WRITTEN = {"layers": 36, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256}


def attended(length: int, **fields: int) -> float:
    return Shape.model_validate({**WRITTEN, **fields}).attended_keys(length)


def test_a_window_bounds_what_is_attended_to() -> None:
    assert attended(4096) == 4096
    assert attended(4096, window=128) == 128
    assert attended(64, window=128) == 64


def test_every_second_layer_of_gpt_oss_attends_to_all() -> None:
    assert attended(4096, window=128, full_attention_every=2) == (128 + 4096) / 2
    assert attended(64, window=128, full_attention_every=2) == 64
    assert attended(4096, window=128, full_attention_every=1) == 4096


def test_layers_that_are_left_over_have_the_window() -> None:
    seen = attended(4096, layers=5, window=128, full_attention_every=3)
    assert seen == pytest.approx((4 * 128 + 4096) / 5)


def test_layers_without_a_window_need_one_that_the_others_have() -> None:
    with pytest.raises(PlanError, match="give window"):
        shape_from({**WRITTEN, "full_attention_every": 2})
