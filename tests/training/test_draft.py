"""The draft: what training computes is what serving computes, it learns, it speaks for itself as published."""

from __future__ import annotations

import json
import math

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file
from tokenizers import Tokenizer

from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint
from tests.training.conftest import DEMO
from training.batches import Batches, BatchShape
from training.dialogues import chat
from training.draft import DRAFT, shrink_draft_recipe
from training.draft_card import write_draft_card
from training.draft_evaluate import (
    SUBJECTS,
    TEMPERATURE,
    Continuation,
    Taken,
    compute_proposals,
    count_rounds,
    examine_draft,
    generate_answers,
    make_coupled_pick,
    make_prompts,
)
from training.draft_export import LARGEST, config_of, export_draft, load_draft
from training.draft_generate import generate, greedy
from training.draft_model import MASK_ID, BlockSlots, DraftGeometry, DraftNetwork, embed_blocks, head, read_target
from training.draft_train import (
    DraftLoss,
    Pool,
    Speech,
    average_loss,
    choose_anchors,
    generate_pool,
    list_block_sizes,
    mix_with_pool,
    slot_losses,
)
from training.export import load
from training.model import Geometry, Qwen3
from training.tasks import code
from training.train import LearningRates, Stage, digest, train

TINY = Geometry(hidden=64, inner=96, layers=3, heads=4, kv_heads=2, head_dim=16, context=256)
SMALL = DraftGeometry(TINY, layers=2, aux_layers=(0, 2), block=4)
PUBLISHED = (
    *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("self_attn.q_norm", "self_attn.k_norm"),
)


@pytest.fixture
def target():
    torch.manual_seed(0)
    model = Qwen3(TINY).requires_grad_(requires_grad=False)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.mul_(4.0)  # attention is far from uniform, so that a wrong key shows
    model.model.embed_tokens.weight.mul_(10.0)  # and so are predictions
    return model


@pytest.fixture
def draft(target):
    torch.manual_seed(1)
    made = DraftNetwork(SMALL)
    made.inherit(target)
    return made


@torch.no_grad()
def one_block(draft: DraftNetwork, target: Qwen3, tokens: list[int], slots: int) -> torch.Tensor:
    """A plain reading of DFlash for one sequence: the block after `tokens`, the last of which is its anchor."""
    geometry = draft.geometry
    target_geometry = geometry.target
    x = target.model.embed_tokens(torch.tensor(tokens[:-1]))[None]
    aux = []
    for index, layer in enumerate(target.model.layers):
        x = layer(x, (target.cos[: x.shape[1]], target.sin[: x.shape[1]]))
        aux += [x[0]] if index in geometry.aux_layers else []
    context = draft.hidden_norm(draft.fc(torch.cat(aux, -1)))
    x = target.model.embed_tokens(torch.tensor([tokens[-1]] + [MASK_ID] * (slots - 1)))
    dim, group = target_geometry.head_dim, target_geometry.heads // target_geometry.kv_heads
    frequencies = target_geometry.theta ** -(torch.arange(0, dim, 2).double() / dim)

    def turned(heads: torch.Tensor, first: int) -> torch.Tensor:
        turns = torch.outer(torch.arange(first, first + len(heads)).double(), frequencies)[:, None]
        pairs = torch.complex(heads[..., : dim // 2].double(), heads[..., dim // 2 :].double())
        pairs = pairs * torch.polar(torch.ones_like(turns), turns)
        return torch.cat((pairs.real, pairs.imag), -1).float()

    for layer in draft.layers:
        attention = layer.self_attn
        h = layer.input_layernorm(x)
        rows = torch.cat((context, h))
        q = turned(attention.q_norm(attention.q_proj(h).view(slots, -1, dim)), len(tokens) - 1)
        k = turned(attention.k_norm(attention.k_proj(rows).view(len(rows), -1, dim)), 0)
        v = attention.v_proj(rows).view(len(rows), -1, dim)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / math.sqrt(dim)
        mixed_values = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
        x = x + attention.o_proj(mixed_values.reshape(slots, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return draft.norm(x)


def blocks(
    draft: DraftNetwork, target: Qwen3, tokens: torch.Tensor, anchors: dict[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return what the draft makes of blocks of these sizes, all at once: [rows, blocks, slots, hidden] by the size."""
    slots = BlockSlots.of(anchors)
    _, aux_layers = read_target(target, tokens, draft.geometry.aux_layers)
    out = draft(draft.context(aux_layers), slots, embed_blocks(target, tokens, slots))
    parts = out.split([size * some.shape[1] for size, some in anchors.items()], 1)
    return {size: part.unflatten(1, (-1, size)) for size, part in zip(anchors, parts, strict=True)}


@torch.no_grad()
def test_blocks_of_all_sizes_in_one_forward_are_each_block_alone(target, draft):
    tokens = torch.randint(16, 4096, (2, 40))
    large = torch.tensor([[1, 5, 5, 36, 17, 8], [35, 2, 30, 21, 1, 12]])
    anchors = {4: large, 2: torch.tensor([[38, 5, 1, 9], [2, 2, 7, 11]])}
    for size, found in blocks(draft, target, tokens, anchors).items():
        for row in range(2):
            for block, anchor in enumerate(anchors[size][row].tolist()):
                alone = one_block(draft, target, tokens[row, : anchor + 1].tolist(), size)
                torch.testing.assert_close(found[row, block], alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_blocks_see_neither_what_comes_after_their_anchor_nor_each_other(target, draft):
    tokens = torch.randint(16, 4096, (1, 40))
    other = tokens.clone()
    other[:, 20:] = torch.randint(16, 4096, (1, 20))
    outs = [
        blocks(draft, target, ids, {4: torch.tensor([[19, second]])})[4][0]
        for ids, second in ((tokens, 30), (other, 25))
    ]
    torch.testing.assert_close(outs[0][0], outs[1][0])
    assert (outs[0][1] - outs[1][1]).abs().max() > 0.01


def test_a_group_that_would_cut_a_block_is_refused():
    with pytest.raises(ValueError, match="14 slots in groups of 2: blocks of 4 would be cut"):
        BlockSlots.of({4: torch.ones(1, 3, dtype=torch.int64), 2: torch.ones(1, 1, dtype=torch.int64)})


def test_a_row_has_room_for_blocks_of_three_sizes():
    found = list_block_sizes(16, 128)
    assert [size for size, _ in found] == [16, 8, 4]
    assert sum(size * count for size, count in found) == 16 * 128


def test_generation_with_a_cache_is_generation_without(target):
    prompts = [torch.randint(16, 4096, (size,)).tolist() for size in (3, 70, 31)]
    found = generate(target, prompts, 6, greedy)
    assert found.shape == (3, 76)
    for row, prompt in zip(found.tolist(), prompts, strict=True):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(target.logits(target.compute_hidden(torch.tensor([ids])))[0, -1].argmax()))
        assert row[: len(ids)] == ids
    with pytest.raises(ValueError, match="251 \\+ 6 tokens are more than the context of 256"):
        generate(target, [[16] * 251], 6, greedy)


def speculate(draft: DraftNetwork, target: Qwen3, said: Continuation, temperature: float) -> tuple[list[int], int]:
    """Speculative decoding as it is defined: everything computed again in every round."""
    ids, rounds = list(said.tokens[: said.start + 1]), 0
    pick = make_coupled_pick([said.seed], temperature) if temperature else greedy

    def picks(logits: torch.Tensor, first: int) -> list[int]:
        return [int(pick(row[None], torch.tensor([first + at]))) for at, row in enumerate(logits)]

    while len(ids) < len(said.tokens):
        at = len(ids)
        guesses = picks(head(target, one_block(draft, target, ids, SMALL.block)[1:]), at)
        hidden = target.compute_hidden(torch.tensor([ids + guesses]))[0, at - 1 :]
        truth = picks(head(target, hidden), at)
        accepted = 0
        while accepted < len(guesses) and guesses[accepted] == truth[accepted]:
            accepted += 1
        ids += [*guesses[:accepted], truth[accepted]]
        rounds += 1
    return ids[: len(said.tokens)], rounds


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_rounds_are_those_of_a_real_loop_and_answers_do_not_change(target, draft, temperature):
    prompts = [torch.randint(16, 4096, (size,)).tolist() for size in (5, 23, 40)]
    said = generate_answers(target, prompts, 12, temperature)
    total = Taken()
    for each in said:
        (proposed,) = compute_proposals(draft, target, [each], SMALL.block, temperature)
        found = count_rounds(each, proposed.tolist())
        with torch.no_grad():
            ids, rounds = speculate(draft, target, each, temperature)
        assert ids == list(each.tokens)
        assert (found.tokens, found.rounds) == (len(ids) - each.start - 1, rounds)
        total += found
    assert examine_draft(draft, target, said, SMALL.block, temperature) == total


def test_a_round_takes_what_equals_and_one_token_more():
    said = Continuation([9, 9, 1, 2, 3, 4, 5, 6, 7], 2, 0)
    proposed = [[2, 3, 8], [8, 8, 8], [8, 8, 8], [5, 6, 7], [8, 8, 8], [8, 8, 8]]
    assert count_rounds(said, proposed) == Taken(6, 2)
    assert count_rounds(said, [[8, 8, 8]] * 6) == Taken(6, 6)
    assert Taken(6, 2).a_step == 3


def test_anchors_and_labels_are_of_one_answer():
    torch.manual_seed(2)
    weights = torch.zeros(3, 33)
    weights[0, 10:14] = 2.0
    weights[1, 20:] = 1.0
    weights[2, :] = 0.3  # hides something: no answer of its own
    anchors, places, counted = choose_anchors(weights, 16, 4)
    assert set(anchors[0].tolist()) == {10, 11, 12}
    assert set(anchors[1].tolist()) <= set(range(20, 32))
    assert not counted[2].any()
    for anchor, where, which in zip(anchors[0].tolist(), places[0].tolist(), counted[0].tolist(), strict=True):
        assert where == [anchor + 1, anchor + 2, anchor + 3]
        assert which == [place < 14 for place in where]
    assert counted[1].sum(-1).max() <= 3
    assert not counted[1][anchors[1] == 31][:, 1:].any()


def test_a_slot_behind_a_token_that_the_target_would_not_say_does_not_count():
    truth = torch.full((1, 1, 3, 4), -9.0)
    truth[..., 0] = 9.0
    labels = torch.tensor([[[0, 1, 0]]])
    counted = torch.ones(1, 1, 3, dtype=torch.bool)
    scores = torch.zeros(1, 1, 3, 4, requires_grad=True)
    found = slot_losses(scores.flatten(1, 2), truth.flatten(1, 2), labels.flatten(1))
    average_loss(*(value.view(labels.shape) for value in found), counted).backward()
    strength = scores.grad.abs().sum(-1).flatten()
    assert strength[0] > strength[1] > 0  # the second slot is behind a token that suits
    assert strength[2] < 1e-6
    assert scores.grad[0, 0, 1, 0] < 0  # it learns what the target says, whatever stands in the text


@pytest.mark.long
def test_the_loss_falls_and_only_the_draft_learns(target, draft, source, tokenizer):
    pool = generate_pool(
        target,
        Batches(tokenizer, source, {code: 1.0}, BatchShape(8, 40), seed=1),
        Speech(rows=8, rounds=1, least=8, most=40, answer=24),
        65,
        seconds=60,
        workers=0,
    )

    def batches(stage, seed):
        return mix_with_pool(Batches(tokenizer, source, stage.mixture, stage.shape, seed), pool)

    stage = Stage("small", BatchShape(4, 64), {chat: 1.0}, steps=30, share=1.0, whole=0.3)
    model = DraftLoss(draft, target, 16)
    frozen, (first,) = digest(target), batches(stage, 5).load(range(1), 0)
    assert first[0].shape == first[1].shape == (4, 65)
    torch.manual_seed(3)
    before = model(*first).item()
    train(model, batches, [stage], rates=LearningRates(matrices=1e-2, others=1e-2, falling=0.5), seed=1)
    torch.manual_seed(3)
    assert model(*first).item() < before - 0.5
    assert digest(target) == frozen
    assert set(model.state_dict()) == {f"draft.{name}" for name in draft.state_dict()}


def test_the_pool_tells_where_the_target_speaks(target, source, tokenizer):
    speech = Speech(rows=4, rounds=2, least=8, most=40, answer=8, temperatures=(0.0,))
    windows = Batches(tokenizer, source, {code: 1.0}, BatchShape(4, 40), seed=1)
    pool = generate_pool(target, windows, speech, 65, seconds=60, workers=0)
    assert isinstance(pool, Pool)
    assert pool.tokens.shape == (8, 65)
    for tokens, start in zip(pool.tokens.tolist(), pool.starts.tolist(), strict=True):
        assert 8 <= start <= 40
        assert tokens[: start + 8] == generate(target, [tokens[:start]], 8, greedy)[0].tolist()
        assert not any(tokens[start + 8 :])


def test_a_draft_is_exported_as_published(tmp_path, target, draft):
    export_draft(draft, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    tensors = load_file(tmp_path / "model.safetensors")
    vectors = {"norm.weight", "hidden_norm.weight"}
    layers = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in PUBLISHED}
    assert set(tensors) == layers | vectors | {"fc.weight"}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (64, 2 * 64)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (64, 64)
    assert tensors["layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"target_layer_ids": [0, 2], "mask_token_id": 1, "block_size": 4}
    assert (config["num_hidden_layers"], config["num_target_layers"], config["block_size"]) == (2, 3, 4)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    loaded = load_draft(tmp_path, "cpu", torch.float32)
    assert loaded.geometry == draft.geometry
    assert digest(loaded) == digest(draft.to(torch.bfloat16))


def test_the_demos_draft_fits_its_size_and_another_does_not_pass(tmp_path):
    export_draft(DraftNetwork(DRAFT.geometry), tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= LARGEST
    with pytest.raises(ValueError, match="at most 8000000"):
        export_draft(DraftNetwork(evolve(DRAFT.geometry, layers=4)), tmp_path)
    assert config_of(DRAFT.geometry)["num_hidden_layers"] == DRAFT.geometry.layers


def test_prompts_end_where_an_answer_begins_and_are_the_same_again(source, tokenizer):
    by_name = {subject.name: subject for subject in SUBJECTS}
    for name in ("code", "tool calls (JSON)", "copy of random tokens"):
        found = make_prompts(by_name[name], tokenizer, source, 2)
        assert found == make_prompts(by_name[name], tokenizer, source, 2)
        assert all(0 < len(prompt) <= by_name[name].room for prompt in found)
    for prompt in make_prompts(by_name["tool calls (JSON)"], tokenizer, source, 2):
        assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_the_card_has_a_row_for_every_subject():
    facts = dict.fromkeys(("parameters", "said", "falling", "seconds"), 0.5) | dict.fromkeys(
        (
            "layers",
            "taps",
            "block",
            "mask",
            "ended",
            "began",
            "cache",
            "target_weights",
            "weights",
            "stages",
            "matrices",
            "others",
            "spoken",
        ),
        "x",
    )
    facts |= dict.fromkeys(("hardware", "torch", "questions"), "x") | {"target_layers": 10}
    card = write_draft_card(facts, {"code": {"greedy": 3.14159}, "chat": {"greedy": 5.0}}, 0.8)
    assert "| answers | greedy |\n| --- | --- |\n| code | 3.14 |\n| chat | 5.00 |\n" in card


def test_the_smallest_recipe_keeps_every_stage():
    small = shrink_draft_recipe(DRAFT)
    assert [stage.name for stage in small.stages] == [stage.name for stage in DRAFT.stages]
    assert {stage.shape.length for stage in small.stages} == set(small.speeches)
    assert math.isclose(sum(stage.share for stage in DRAFT.stages), 1)


# The draft that is shipped


@pytest.fixture(scope="module")
def shipped():
    return load(DEMO, "cpu", torch.float32).requires_grad_(requires_grad=False), load_draft(
        DEMO / "draft", "cpu", torch.float32
    )


def test_the_shipped_draft_was_trained_for_the_shipped_target(shipped):
    card = (DEMO / "draft" / "README.md").read_text(encoding="utf-8")
    assert f"in bf16) `{digest(shipped[0])}`" in " ".join(card.split())


def test_the_server_computes_what_training_measured(shipped, source):
    target, draft = shipped
    tokens = torch.tensor([Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(source.texts[0]).ids[:130]])
    anchors = torch.tensor([[129, 77, 64, 1]])  # falling: a served block overwrites what follows it
    with torch.no_grad():
        _, aux_layers = read_target(target, tokens, draft.geometry.aux_layers)
        ours = head(target, blocks(draft, target, tokens, {16: anchors})[16][0, :, 1:])
    checkpoint = DraftCheckpoint.open(DEMO / "draft", Checkpoint.open(DEMO).config)
    kernels, table = CpuKernels(torch.float32), target.model.embed_tokens.weight.detach()
    served = DFlashDraft(
        checkpoint.config,
        checkpoint,
        kernels.copy_for_shard(),
        TargetHead(table, kernels.pack(table), torch.ones_like(table[0])),
        DraftPlacement(capacity=256),
    )
    aux_hidden_states = dict(zip(served.aux_layers, aux_layers[0].chunk(len(served.aux_layers), -1), strict=True))
    for start in (0, 64):
        step = Step((Segment(0, start, 64),), 64)
        served.extend(
            step,
            tokens[0, start : start + 64],
            {aux_layer: rows[start : start + 64] for aux_layer, rows in aux_hidden_states.items()},
        )
    tail = {
        aux_layer: rows[126:130].roll(2, 0) for aux_layer, rows in aux_hidden_states.items()
    }  # two rows, two that are not looked at
    served.extend(Step((Segment(0, 128, 2),), 4), tokens[0, 128:130], tail)
    for anchor, logits in zip(anchors[0].tolist(), ours, strict=True):
        theirs = served.logits([BlockRequest(0, 0, anchor, int(tokens[0, anchor]), 15)])
        torch.testing.assert_close(theirs, logits, atol=2e-3, rtol=1e-3)
        assert torch.equal(theirs.argmax(-1), logits.argmax(-1))


# Its weights are read and its proposals are compared above.
@pytest.mark.long
def test_the_shipped_draft_foresees_tool_calls(shipped, source):
    target, draft = shipped
    subject = next(subject for subject in SUBJECTS if subject.opening is not None)
    prompts = make_prompts(subject, Tokenizer.from_file(str(DEMO / "tokenizer.json")), source, 2)
    said = generate_answers(target, prompts, subject.limit, 0.0)
    assert examine_draft(draft, target, said, 16, 0.0).a_step > 3
