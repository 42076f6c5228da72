"""DFlash drafts of hybrid targets: what recurrent layers leave is tapped like any other's, and restored with states."""

from __future__ import annotations

import pytest
import torch

from adapters import demo
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import BUCKETS, ShardPlacement
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint
from adapters.models.drafts.dflash.config import DFlashConfig, DraftShapes, parse_draft_config
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.families.qwen3_5 import parse
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import kernels_for, same_bits, save_model, shard_of, tokens_of
from tests.models.draft_models import FULL, random_tensors, save_draft, slides
from tests.models.hybrids import HYBRIDS

SHAPE = DFlashConfig(
    160, 320, 5, 4, 2, 128, Rotary(128, 1e7), (*[slides(96)] * 4, FULL), (0, 2, 3, 5, 7), 16, 1
)  # as drafts for Qwen3.6 are made, with a short window
PUBLISHED = {"rope_theta": 1e7, "sliding_window": 96, "use_sliding_window": True, "num_target_layers": 8}


@pytest.mark.parametrize("kernels", [ReferenceKernels(), CpuKernels(torch.float32)], ids=["reference", "cpu"])
def test_every_layer_leaves_what_transformers_has_after_it(tmp_path, kernels):
    oracle = save_model(tmp_path, "qwen3_5_text", **HYBRIDS["three of four, key heads shared, tied"])
    layers, tokens = range(oracle.config.num_hidden_layers), tokens_of(100)
    with torch.no_grad():
        expected = oracle.model(tokens[None], output_hidden_states=True).hidden_states
    shard = shard_of(tmp_path, kernels=kernels, aux_layers=layers)
    for rows_only in (True, False):
        for start, stop in ((0, 64), (64, 100)):
            step = Step((Segment(int(rows_only), start, stop - start),), 64, rows_only=rows_only)
            left = shard.forward(step, tokens[start:stop]).aux_hidden_states
            if not rows_only:
                shard.commit(step, [stop - start])
            for layer in layers[:-1]:
                found = left[layer][: stop - start]
                torch.testing.assert_close(found, expected[layer + 1][0, start:stop], rtol=1e-4, atol=2e-4)
            with torch.no_grad():  # of the last one transformers tells what the final norm makes of it
                normed = oracle.model.norm(left[layers[-1]][: stop - start])
            torch.testing.assert_close(normed, expected[-1][0, start:stop], rtol=1e-4, atol=2e-4)


def test_a_published_draft_is_taken_for_a_published_target():
    target = parse(
        {
            "model_type": "qwen3_5",
            "text_config": {
                "model_type": "qwen3_5_text",
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
                "max_position_embeddings": 262144,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            },
        }
    )
    raw = {
        "model_type": "qwen3",
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "rope_theta": 1e7,
        "block_size": 16,
        "num_target_layers": 64,
        "vocab_size": 248320,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    }
    found = parse_draft_config(raw, DraftShapes(5120, 17408, 5, 32, 8, 128, 5), target)
    assert (found.head_dim, found.rotary.theta, found.aux_layers) == (128, 1e7, (1, 16, 31, 46, 61))
    assert [mask.window for mask in found.masks] == [2048] * 4 + [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_proposes_the_same_after_rows_and_state_came_back_together(tmp_path, dtype):
    save_draft(tmp_path, SHAPE, random_tensors(SHAPE), vocab_size=4096, **PUBLISHED)
    checkpoint, capacity = Checkpoint.open(demo.FOLDERS["demo-hybrid"]), 512
    config, draft_checkpoint = checkpoint.config, DraftCheckpoint.open(tmp_path, checkpoint.config)
    assert draft_checkpoint.config == SHAPE
    listed = config.products(BUCKETS, capacity=capacity, dtype=dtype, threads=torch.get_num_threads())
    placement = {"dtype": dtype, "slots": 2, "capacity": capacity}
    kernels = kernels_for(listed, dtype, capacity)
    shard = DenseShard(
        config, checkpoint, kernels.copy_for_shard(), ShardPlacement(aux_layers=SHAPE.aux_layers, **placement)
    )
    draft = DFlashDraft(
        SHAPE, draft_checkpoint, CpuKernels(dtype), Pipeline((shard,)).head, DraftPlacement(**placement)
    )
    tokens = tokens_of(301, 4000)

    def fill(slot: int, start: int, stop: int, rows: int) -> None:
        for at in range(start, stop, rows):
            part = tokens[at : min(at + rows, stop)]
            step = Step((Segment(slot, at, len(part)),), 256, rows_only=True)
            draft.extend(step, part, shard.forward(step, part).aux_hidden_states)

    def proposed(slot: int) -> torch.Tensor:
        return draft.logits([BlockRequest(slot, 0, 300, int(tokens[300]), 15)]).clone()

    fill(0, 0, 192, 100)
    rows, state, context = shard.rows.export(0, 0, 192), shard.states.export(0), draft.rows.export(0, 0, 192)
    fill(0, 192, 300, 108)
    expected = proposed(0)
    shard.rows.import_(1, 0, rows)
    shard.states.import_(1, state, 192)
    draft.rows.import_(1, 0, context)
    fill(1, 192, 300, 108)
    assert same_bits(proposed(1), expected)
