"""Tests that an EAGLE-3 draft reads what its target's layers leave, in families of every structure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import BUCKETS, ShardPlacement
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.drafts.eagle3.checkpoint import Eagle3Checkpoint
from adapters.models.drafts.eagle3.config import Eagle3Config
from adapters.models.drafts.eagle3.draft import Eagle3Draft
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import VARIANTS, save_model, tokens_of
from tests.models.eagle3_drafts import PLAIN, proposed, random_eagle3, save_eagle3
from tests.models.windowed import WINDOWED

VOCAB, LENGTH = 160, 100  # of `save_model`; the second is longer than the windows
SHAPE = {"slots": 1, "capacity": 256, "buckets": BUCKETS}
BUCKET = next(bucket for bucket in BUCKETS if bucket >= LENGTH)


@pytest.mark.parametrize("name", ["glm4_moe, groups and norms", "laguna", "deepseek_v3, groups, yarn", "gpt_oss"])
def test_a_draft_of_any_family_reads_the_outputs_of_its_layers(tmp_path: Path, name: str) -> None:
    model_type, settings = (VARIANTS | WINDOWED)[name]
    target = save_model(tmp_path / "target", model_type, **settings)
    checkpoint = Checkpoint.open(tmp_path / "target")
    config = checkpoint.config
    aux_layers = (0, 1, config.num_layers - 1)
    hidden = config.hidden_size
    shape = Eagle3Config(hidden, 104, 4, 2, 16, PLAIN.rotary, aux_layers, hidden, vocab=80, has_map=True)
    folder = save_eagle3(tmp_path / "draft", shape, random_eagle3(shape, vocab=VOCAB), vocab=VOCAB)
    found = Eagle3Checkpoint.open(folder, config)
    assert found.config.aux_layers == aux_layers
    shard = DenseShard(config, checkpoint, ReferenceKernels(), ShardPlacement(aux_layers=aux_layers, **SHAPE))
    draft = Eagle3Draft(found.config, found, ReferenceKernels(), Pipeline((shard,)).head, DraftPlacement(**SHAPE))
    tokens = tokens_of(LENGTH + 1)
    step = Step((Segment(0, 0, LENGTH),), BUCKET, rows_only=True)
    left = shard.forward(step, tokens[:LENGTH]).aux_hidden_states
    expected: dict[int, torch.Tensor] = {}
    for layer in aux_layers:
        keep = lambda _, __, output, layer=layer: expected.update({layer: output})  # noqa: E731
        target.model.layers[layer].register_forward_hook(keep)
    with torch.no_grad():
        target.model(tokens[None, :LENGTH])
    for layer in aux_layers:
        rows = expected[layer] if isinstance(expected[layer], torch.Tensor) else expected[layer][0]
        torch.testing.assert_close(left[layer][:LENGTH], rows.reshape(LENGTH, -1), rtol=1e-4, atol=5e-4)
    draft.extend(step, tokens[:LENGTH], left)
    [proposals] = proposed(draft, BlockRequest(0, 0, LENGTH, int(tokens[LENGTH]), 7)).tokens
    assert set(proposals) <= set(random_eagle3(shape, vocab=VOCAB)["d2t"].tolist())
