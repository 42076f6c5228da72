"""The context that a GPU of 24 GiB has room for beside a hybrid model of 27B in Q4_K, with and without a draft.

docs/SMALL_GPUS.md has these figures.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.decoder.config.rope import Rotary
from adapters.models.drafts.dflash.checkpoint import list_draft_tensors
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.families.qwen3_5 import FAMILY, Qwen35Config
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.open_checkpoint import DECIDING
from engine.loading.drafts.find_draft import FoundDraft
from engine.loading.memory.device_survey import Placement, choose_chunk
from engine.loading.memory_estimate import choose_fit, estimate_placed_weights
from engine.settings.options import build_options

GPU, BF16 = torch.device("cuda:0"), torch.bfloat16
MEMORY, FREE = 24 << 30, int(0.97 * (24 << 30))
Q4_K, Q6_K = StepLayout("uint4", 32, per=8, inner=True, least="own"), StepLayout("int8", 16, per=16, inner=True)
PUBLISHED = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=MEMORY))
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", lambda _: 1.0)
    monkeypatch.setattr("engine.loading.memory_estimate.free_memory", lambda _: FREE)
    monkeypatch.setattr("engine.loading.memory_estimate.host_memory", lambda: 64 << 30)


def make_config() -> tuple[Qwen35Config, dict[str, StepLayout]]:
    """Return the configuration, and the layouts of a file in Q4_K whose head is in Q6_K."""
    config = FAMILY.parse(PUBLISHED)
    assert isinstance(config, Qwen35Config)
    inner = (name for name, shape in config.tensors().items() if name.startswith("model.layers.") and len(shape) == 2)
    layouts = {name: Q4_K for name in inner if name.split(".")[-2] not in DECIDING}
    return config, layouts | {"lm_head.weight": Q6_K}


def make_draft() -> FoundDraft:
    """Return a DFlash draft of the published geometry: five layers, 1.7B weights, 20 KiB of rows for a token."""
    shape = DFlashConfig(
        5120, 17408, 5, 32, 8, 128, Rotary(128, 1e6), (AttentionMask(),) * 5, (1, 16, 31, 46, 61), 16, 248319
    )
    weights = sum(map(math.prod, list_draft_tensors(shape).values()))
    return cast("FoundDraft", SimpleNamespace(shape=shape, weights=weights))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("kv_dtype", "alone", "drafted"),
    [("auto", 65536, 24576), ("int8", 131072, 32768), ("int4", 262144, 49152), ("int3.5", 262144, 49152)],
)
def test_one_slot_holds_long_contexts_and_shorter_ones_with_a_draft(kv_dtype: str, alone: int, drafted: int) -> None:
    config, layouts = make_config()
    plan = (Placement(range(config.num_layers), GPU),)
    assert 14.5 < estimate_placed_weights(config, BF16, plan[0], layouts) / 2**30 - 2.37 < 15
    options = build_options(device="cpu", kv_dtype=kv_dtype, slots=1, state_checkpoints=1)
    found = [choose_fit(options, config, BF16, plan, draft, layouts=layouts) for draft in (None, make_draft())]
    assert [one.context for one in found] == [alone, drafted]
    assert all(one.fits for one in found)


def test_heads_of_256_without_windows_have_longer_chunks() -> None:
    config, _ = make_config()
    plan = (Placement(range(config.num_layers), GPU),)
    assert choose_chunk(build_options(device="cpu").runtime, plan, config) == 2048
    assert choose_chunk(build_options(device="cpu", chunk=512).runtime, plan, config) == 512


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("kv_dtype", "slots", "context"), [("auto", 4, 49152), ("int8", 8, 49152), ("int4", 8, 98304)])
def test_what_no_option_says_is_several_slots_that_share_the_pool(
    kv_dtype: str, slots: int, context: int, caplog: pytest.LogCaptureFixture
) -> None:
    config, layouts = make_config()
    plan = (Placement(range(config.num_layers), GPU),)
    options: Any = build_options(device="cpu", kv_dtype=kv_dtype)
    found = choose_fit(options, config, BF16, plan, None, layouts=layouts)
    assert (found.slots, found.context) == (slots, context)
    assert context <= found.rows < 2 * context
    assert "because memory allows no more" in caplog.text
