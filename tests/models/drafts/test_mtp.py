"""A model's own prediction head: right by the training's formulas, and the same bits however its rows came about."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import BUCKETS, ShardPlacement
from adapters.models.drafts.cached_draft import BlockRequest, NotLoaded
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.drafts.mtp.checkpoint import HeadCheckpoint
from adapters.models.drafts.mtp.draft import MtpDraft
from adapters.models.drafts.mtp.weights import list_head_products
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import VARIANTS, kernels_for, same_bits, save_model
from tests.models.draft_models import save_own_head
from tests.models.hybrids import save_with_head
from tests.pairs import usual_where
from training.export import load_hybrid

FOLDER = demo.FOLDERS["demo-hybrid"]
LENGTH = 300
SLOTS = 4


class TargetWithHead:
    """The hybrid demo and its head, or another one, on proven kernels; slots are filled by hand."""

    def __init__(self, dtype: torch.dtype, folder: Path = FOLDER) -> None:
        checkpoint, capacity = Checkpoint.open(folder), 512
        config = checkpoint.config
        listed = config.products(BUCKETS, capacity=capacity, dtype=dtype, threads=torch.get_num_threads())
        kernels = kernels_for(listed, dtype, capacity)
        shape = {"dtype": dtype, "slots": SLOTS, "capacity": capacity, "buckets": BUCKETS}
        self.shard = DenseShard(
            config, checkpoint, kernels.copy_for_shard(), ShardPlacement(aux_layers=(config.num_layers - 1,), **shape)
        )
        head = HeadCheckpoint.open(checkpoint)
        own = list_head_products(head.config, listed, capacity=capacity, vocab=config.vocab_size)
        target_kernels = kernels_for(evolve(own, weights=(*own.weights, *listed.weights)), dtype, capacity)
        self.draft = MtpDraft(
            head.config, head, target_kernels.copy_for_shard(), Pipeline((self.shard,)).head, DraftPlacement(**shape)
        )

    def fill(self, slot: int, tokens: Tensor, pieces: list[int], start: int = 0, *, followed: bool = True) -> None:
        """pieces: rows of each step, the last one repeated."""
        at, index = start, 0
        while at < len(tokens):
            part = tokens[at : at + pieces[min(index, len(pieces) - 1)]]
            bucket = next(bucket for bucket in BUCKETS if bucket >= len(part))
            step = Step((Segment(slot, at, len(part)),), bucket, rows_only=True)
            left = self.shard.forward(step, part)
            if followed:
                self.draft.extend(step, part, left.aux_hidden_states)
            at, index = at + len(part), index + 1

    def said(self, *requests: BlockRequest) -> tuple[list[Tensor], list[list[int]]]:
        """Logits of each request's places, and what was picked greedily."""
        logits: list[list[Tensor]] = [[] for _ in requests]
        tokens: list[list[int]] = [[] for _ in requests]

        def pick(parts: list[Tensor]) -> list[list[int]]:
            found = [part.argmax(-1).tolist() for part in parts]
            for index, part in enumerate(parts):
                logits[index] += part.clone().unbind(0)
                tokens[index] += found[index]
            return found

        self.draft.propose(requests, pick)
        return [torch.stack(rows) for rows in logits], tokens


Heads = dict[str, tuple[Path, object, object]]
# Families whose heads are published in ways of their own, and the models that are tried.
PUBLISHED = {
    "glm4_moe": "glm4_moe, groups and norms",
    "glm4_moe_lite": "glm4_moe_lite",
    "deepseek_v3": "deepseek_v3, groups, yarn",
    "mimo": "mimo",
}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Heads:
    """Models with heads, most of which have experts: their folders, and the oracles of both."""
    folder = tmp_path_factory.mktemp("qwen3_next")
    found = {"qwen3_next": (folder, *save_with_head(folder))}
    for name, variant in PUBLISHED.items():
        model_type, settings = VARIANTS[variant]
        settings = {**settings, "vocab_size": 512}
        folder = tmp_path_factory.mktemp(name)
        target = save_model(folder, model_type, **settings)
        found[name] = (folder, target, save_own_head(folder, model_type, settings))
    return found


@pytest.fixture(scope="module", params=["float32", "bfloat16", "qwen3_next", "glm4_moe", "deepseek_v3", "mimo"])
def pair(request):
    if not request.param.startswith(("float", "bfloat")):
        return TargetWithHead(torch.bfloat16, request.getfixturevalue("sparse")[request.param][0])
    return TargetWithHead(getattr(torch, request.param))


# A head is one layer. Of those with other layers, two tests show that their rows are right.
briefly = usual_where(lambda places: places["pair"] < 3)


@pytest.fixture(scope="module")
def tokens():
    text = (demo.FOLDER / "__init__.py").read_bytes() * 4
    return torch.tensor([16 + byte for byte in text[: LENGTH + 1]])


def ask(tokens: Tensor, position: int, slot: int = 0, count: int = 5) -> BlockRequest:
    return BlockRequest(slot, 0, position, int(tokens[position]), count)


@pytest.mark.parametrize("position", [1, 63, 64, 65, 200, LENGTH])
def test_it_says_what_the_formulas_of_its_training_say(tokens, position):
    pair, model = TargetWithHead(torch.float32), load_hybrid(FOLDER, "cpu", torch.float32)
    pair.fill(0, tokens[:position], [100])
    [logits], [picked] = pair.said(ask(tokens, position))
    with torch.no_grad():
        hidden = model.compute_hidden(tokens[None, : position + 1])
        so_far = tokens[None, : position + 1]
        before = torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        before[:, :position:64] = 0  # of context rows
        for index in range(5):
            out = model.mtp(model.model.embed_tokens(so_far), before, *model.angles(so_far))[:, -1:]
            torch.testing.assert_close(logits[index], model.logits(out)[0, 0], atol=5e-4, rtol=1e-4)
            so_far = torch.cat((so_far, torch.tensor([[picked[index]]])), 1)
            before = torch.cat((before, out), 1)


def test_the_same_bits_in_whatever_pieces_its_rows_were_made(pair, tokens):
    pair.fill(0, tokens[:LENGTH], [256])
    expected, _ = pair.said(ask(tokens, LENGTH))
    for slot, pieces in enumerate(([64], [1, 63, 130, 7], [33, 100, 3]), 1):
        pair.fill(slot, tokens[:LENGTH], pieces)
        assert same_bits(pair.said(ask(tokens, LENGTH, slot))[0][0], expected[0])
        assert same_bits(pair.draft.rows.view(slot, 0, LENGTH), pair.draft.rows.view(0, 0, LENGTH))


@briefly
def test_the_same_bits_beside_others_who_want_more_or_less(pair, tokens):
    for slot, length in enumerate((LENGTH, 64, 130, 7)):
        pair.fill(slot, tokens[:length], [128])
    asks = [ask(tokens, LENGTH, 0, 3), ask(tokens, 64, 1, 7), ask(tokens, 130, 2, 1), ask(tokens, 7, 3, 7)]
    together, picked = pair.said(*asks)
    for request, logits, said in zip(asks, together, picked, strict=True):
        [alone], [again] = pair.said(request)
        assert same_bits(alone, logits)
        assert again == said
        assert len(said) == request.count


def test_the_same_bits_from_kept_rows_alone_and_in_another_slot(pair, tokens):
    pair.fill(0, tokens[:LENGTH], [256])
    expected, _ = pair.said(ask(tokens, LENGTH))
    rows = pair.draft.rows.export(0, 0, 192)
    pair.fill(1, torch.flip(tokens, (0,)), [256])  # somebody else's hidden states
    pair.fill(1, tokens[:192], [64], followed=False)
    pair.draft.rows.import_(1, 0, rows)
    pair.fill(1, tokens[:LENGTH], [30, 64], start=192)
    assert same_bits(pair.said(ask(tokens, LENGTH, 1))[0][0], expected[0])
    pair.draft.copy_rows(0, 2, 0, LENGTH)  # not at a multiple of 64: what rows since then need comes with them
    assert same_bits(pair.said(ask(tokens, LENGTH, 2))[0][0], expected[0])


@briefly
def test_rows_that_were_taken_back_are_forgotten(pair, tokens):
    pair.fill(0, tokens[:LENGTH], [256])
    expected, _ = pair.said(ask(tokens, LENGTH))
    wrong = tokens.clone()
    wrong[290:] = 99
    pair.fill(3, wrong[:LENGTH], [128])
    pair.fill(3, tokens[:LENGTH], [5], start=290)
    assert same_bits(pair.said(ask(tokens, LENGTH, 3))[0][0], expected[0])


@briefly
def test_context_that_begins_later_is_not_looked_at_before(pair, tokens):
    pair.fill(0, tokens[:LENGTH], [256])
    other = tokens.clone()
    other[:128] = 77
    later = BlockRequest(0, 128, LENGTH, int(tokens[LENGTH]), 4)
    expected, _ = pair.said(later)
    rows = pair.draft.rows.export(0, 128, LENGTH)
    pair.fill(1, tokens[:LENGTH], [256])
    pair.draft.rows.import_(1, 0, {name: torch.full_like(part[:, :128], 3) for name, part in rows.items()})
    assert same_bits(pair.said(evolve(later, slot=1))[0][0], expected[0])


@briefly
def test_parked_it_says_nothing_and_comes_back_the_same(pair, tokens):
    pair.fill(0, tokens[:LENGTH], [256])
    expected, _ = pair.said(ask(tokens, LENGTH))
    held = pair.draft.memory()["weights"]
    assert pair.draft.offload() == held > 0
    with pytest.raises(NotLoaded, match="the draft is parked"):
        pair.said(ask(tokens, LENGTH))
    assert pair.draft.load_back() == held
    assert same_bits(pair.said(ask(tokens, LENGTH))[0][0], expected[0])


@briefly
def test_what_cannot_be_proposed_to_is_refused(pair, tokens):
    for words, request in (
        ("8 proposals; accepted: 1..7", ask(tokens, 10, count=8)),
        ("slot 4 is not in 0..3", ask(tokens, 10, slot=4)),
        ("context rows 0..513", BlockRequest(0, 0, 513, 1, 1)),
    ):
        with pytest.raises(ValueError, match=words):
            pair.said(request)


@pytest.mark.parametrize("family", ["qwen3_next", *PUBLISHED])
def test_a_head_says_what_transformers_says_of_such_a_layer(sparse, tokens, family):
    folder, target, head = sparse[family]
    pair, position = TargetWithHead(torch.float32, folder), 150
    pair.fill(0, tokens[:position], [100])
    [logits], [picked] = pair.said(ask(tokens, position))
    own = HeadCheckpoint.open(Checkpoint.open(folder))
    if family != "mimo":
        assert own.tensors["mtp.layers.0.mlp.experts.8.down_proj.weight"].shape == (64, 40)

    def normed(x: Tensor, name: str) -> Tensor:
        norm = copy.deepcopy(head.model.norm)
        norm.weight.copy_(own.read(f"mtp.pre_fc_norm_{name}.weight"))
        return norm(x)

    outputs = []
    read_from = target.model.layers[-1] if family == "mimo" else target.model.norm
    hook = read_from.register_forward_hook(lambda _, __, output: outputs.append(output))
    with torch.no_grad():
        target.model(tokens[None, :position])
        hook.remove()
        [before] = outputs
        before = torch.nn.functional.pad(before, (0, 0, 1, 0))
        before[:, :position:64] = 0  # of context rows
        so_far = tokens[None, : position + 1]
        for index, found in enumerate(logits):
            embedded = target.model.embed_tokens(so_far)
            parts = (normed(embedded, "embedding"), normed(before, "hidden"))
            joined = torch.cat(parts[::-1] if family == "mimo" else parts, -1)
            out = head.model(inputs_embeds=joined @ own.read("mtp.fc.weight").T).last_hidden_state[:, -1:]
            torch.testing.assert_close(found, target.lm_head(out[0, 0]), rtol=1e-4, atol=5e-4)
            # The next proposal continues from the head's own state.
            so_far = torch.cat((so_far, torch.tensor([[picked[index]]])), 1)
            before = torch.cat((before, out), 1)


@pytest.fixture
def changed(tmp_path):
    """The hybrid demo's folder with other tensors or settings."""

    def change(tensors: dict[str, Tensor | None], **settings: object) -> Checkpoint:
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(FOLDER / name, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text()) | settings
        (tmp_path / "config.json").write_text(json.dumps(config))
        [file] = FOLDER.glob("*.safetensors")
        found = {**load_file(file), **tensors}
        save_file({name: one for name, one in found.items() if one is not None}, tmp_path / "model.safetensors")
        return Checkpoint.open(tmp_path)

    return change


def test_a_checkpoint_without_a_head_or_with_another_is_refused_by_name(changed):
    [file] = FOLDER.glob("*.safetensors")
    names = [name for name in load_file(file) if name.startswith("mtp.")]
    with pytest.raises(CheckpointError, match=r"has no prediction head \(tensors mtp\.\*\); accepted: none, or"):
        HeadCheckpoint.open(changed(dict.fromkeys(names)))
    with pytest.raises(CheckpointError, match=r"tensor mtp\.fc\.weight is missing"):
        HeadCheckpoint.open(changed({"mtp.fc.weight": None}))
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.1\.input_layernorm\.weight is not part of a pred"):
        HeadCheckpoint.open(changed({"mtp.layers.1.input_layernorm.weight": torch.zeros(160)}))
    with pytest.raises(CheckpointError, match=r"mtp\.norm\.weight has shape \[7\]; accepted here: \[160\]"):
        HeadCheckpoint.open(changed({"mtp.norm.weight": torch.zeros(7)}))
    with pytest.raises(CheckpointError, match="models of type 'qwen3' have no prediction head of their own; accepted"):
        HeadCheckpoint.open(Checkpoint.open(demo.FOLDER))


def test_its_identity_is_that_of_its_weights(changed):
    kernels = CpuKernels(torch.float32)

    def identity(checkpoint: Checkpoint) -> str:
        config, head = checkpoint.config, HeadCheckpoint.open(checkpoint)
        shard = DenseShard(
            config, checkpoint, kernels.copy_for_shard(), ShardPlacement(slots=1, capacity=64, buckets=(8,))
        )
        placement = {"slots": 1, "capacity": 64, "buckets": (8,)}
        return MtpDraft(
            head.config, head, kernels.copy_for_shard(), Pipeline((shard,)).head, DraftPlacement(**placement)
        ).identity

    shipped = identity(Checkpoint.open(FOLDER))
    assert identity(Checkpoint.open(FOLDER)) == shipped
    assert identity(changed({"mtp.norm.weight": torch.zeros(160, dtype=torch.bfloat16)})) != shipped
