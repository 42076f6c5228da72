"""Assistants of Gemma 4: the logits of transformers, from the rows of the target, however these came about."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from attrs import evolve

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import BUCKETS, ShardPlacement
from adapters.models.drafts.assistant.checkpoint import AssistantCheckpoint, is_assistant
from adapters.models.drafts.assistant.draft import AssistantDraft
from adapters.models.drafts.assistant.weights import list_assistant_products
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import kernels_for, same_bits, save_model, tokens_of
from tests.models.draft_models import save_assistant
from tests.models.windowed import GEMMA4, KEYS_AS_VALUES, SHARING
from tests.pairs import usual_where

LENGTH, COUNT, CAPACITY = 200, 5, 512
SIZES = {"hidden_size": 64, "vocab_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "rows shared": {**GEMMA4, **SHARING, **SIZES, "intermediate_size": 104},
    "keys as values": {**GEMMA4, **KEYS_AS_VALUES, **SIZES, "intermediate_size": 104},
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """A target and its assistant, in folders and as transformers has them."""
    folder = tmp_path_factory.mktemp("target")
    draft_folder = tmp_path_factory.mktemp("assistant")
    settings = MODELS[request.param]
    return folder, draft_folder, save_model(folder, "gemma4_text", **settings), save_assistant(draft_folder, settings)


class Assisted:
    """A target and its assistant on proven kernels. cuts: where the target is split."""

    def __init__(self, folder, draft_folder, *cuts: int, dtype: torch.dtype = torch.float32, rows=None) -> None:
        target = Checkpoint.open(folder)
        config = target.config
        found = AssistantCheckpoint.open(draft_folder, config)
        listed = config.products(BUCKETS, capacity=CAPACITY, dtype=dtype, threads=torch.get_num_threads())
        kernels = kernels_for(listed, dtype, CAPACITY)
        bounds = (0, *cuts, config.num_layers)
        shape = {"dtype": dtype, "slots": 3, "capacity": CAPACITY, "buckets": BUCKETS}
        more = {"aux_layers": (config.num_layers - 1,), "rows": rows}
        self.shard = Pipeline(
            [
                DenseShard(
                    config,
                    target,
                    kernels.copy_for_shard(),
                    ShardPlacement(layers=range(begin, end), **more, **shape),
                )
                for begin, end in pairwise(bounds)
            ]
        )
        own = list_assistant_products(found.config, listed, capacity=CAPACITY, vocab=config.vocab_size)
        kinds = tuple(dict.fromkeys((*own.heads, *listed.heads)))
        beside_target = kernels_for(
            evolve(own, weights=tuple(dict.fromkeys((*own.weights, *listed.weights))), heads=kinds), dtype, CAPACITY
        )
        self.draft = AssistantDraft(
            found.config, found, beside_target.copy_for_shard(), self.shard.head, DraftPlacement(**shape)
        )

    def fill(self, slot: int, tokens, pieces: list[int], wrong: int = 0) -> None:
        """pieces: rows of each step, the last one repeated. wrong: rejected rows behind those of each narrow step."""
        at = index = 0
        while at < len(tokens):
            part = tokens[at : at + pieces[min(index, len(pieces) - 1)]]
            given = torch.cat((part, torch.full((wrong,), 7))) if wrong else part
            bucket = next(bucket for bucket in BUCKETS if bucket >= len(given))
            step = Step((Segment(slot, at, len(given)),), bucket, rows_only=not wrong)
            left = self.shard.forward(step, given)
            aux = {layer: one.clone() for layer, one in left.aux_hidden_states.items()}
            if wrong:
                self.shard.commit(step, [len(part)])
            self.draft.extend(Step((Segment(slot, at, len(part)),), bucket), part, aux)
            at, index = at + len(part), index + 1

    def propose(self, *requests: BlockRequest) -> list[torch.Tensor]:
        """Logits of each request's places, which are picked greedily."""
        logits: list[list[torch.Tensor]] = [[] for _ in requests]

        def pick(parts):
            for index, part in enumerate(parts):
                logits[index] += part.clone().unbind(0)
            return [part.argmax(-1).tolist() for part in parts]

        self.draft.propose(requests, pick)
        return [torch.stack(rows) for rows in logits]


def ask(tokens, position: int, slot: int = 0, count: int = COUNT) -> BlockRequest:
    return BlockRequest(slot, 0, position, int(tokens[position]), count)


def compute_oracle(model, assistant, tokens, position: int) -> torch.Tensor:
    """The loop of transformers' generator, with greedy picks; of a window it sees the rows that we keep."""
    window = model.config.sliding_window
    if not model.config.num_kv_shared_layers:  # transformers 5.23 returns no rows then, unless its layers are asked to
        last = {layer.self_attn.layer_type: layer.self_attn for layer in model.model.layers}
        for attention in last.values():
            attention.store_full_length_kv = True
    with torch.no_grad():
        out = model(tokens[None, :position], output_hidden_states=True, return_shared_kv_states=True)
        states = {
            kind: tuple(one[:, :, -window if kind == "sliding_attention" else 0 :] for one in both)
            for kind, both in out.shared_kv_states.items()
        }
        hidden = out.hidden_states[-1][:, -1:]
        token = tokens[None, position : position + 1]
        found = []
        for _ in range(COUNT):
            given = torch.cat((model.get_input_embeddings()(token), hidden), -1)
            said = assistant(inputs_embeds=given, position_ids=torch.tensor([[position]]), shared_kv_states=states)
            found.append(said.logits[0, 0])
            token = said.logits.argmax(-1)
            hidden = said.last_hidden_state
    return torch.stack(found)


@pytest.mark.parametrize("position", [1, 40, 64, 130])
def test_it_says_what_transformers_says(pair, position):
    folder, draft_folder, model, assistant = pair
    tokens = tokens_of(LENGTH)
    assisted = Assisted(folder, draft_folder)
    assisted.fill(0, tokens[:position], [100])
    [logits] = assisted.propose(ask(tokens, position))
    expected = compute_oracle(model, assistant, tokens, position)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert len(set(expected.argmax(-1).tolist())) > 1


@usual_where(lambda places: (places["dtype"] + places["rows"]) % 2 == 0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [None, torch.int8], ids=["plain", "coded"])
def test_proposals_do_not_depend_on_how_rows_came_about(pair, dtype, rows):
    """Proposals have the same bits in pieces, behind rejected rows, with other requests, in another slot, and over two
    shards.
    """
    folder, draft_folder, *_ = pair
    tokens = tokens_of(LENGTH)
    whole = Assisted(folder, draft_folder, dtype=dtype, rows=rows)
    # Behind the layers whose rows the last ones share; a model that shares none has the rows that are read behind 1.
    cut = 4 if whole.draft.config.target_layers == 6 else 1
    split = Assisted(folder, draft_folder, cut, dtype=dtype, rows=rows)
    for position in (64, 131):
        whole.fill(0, tokens[:position], [256])
        [expected] = whole.propose(ask(tokens, position))
        whole.fill(1, tokens[:position], [33, 1, 5], wrong=3)
        whole.fill(2, tokens[: position - 9], [64, 7])
        found = whole.propose(ask(tokens, position - 9, 2, 2), ask(tokens, position, 1))
        assert same_bits(found[1], expected)
        whole.shard.states.copy(0, 2)
        whole.shard.rows.copy(0, 2, position)
        whole.draft.copy_rows(0, 2, 0, position)
        assert same_bits(whole.propose(ask(tokens, position, 2))[0], expected)
        split.fill(1, tokens[:position], [100])
        assert same_bits(split.propose(ask(tokens, position, 1))[0], expected)


def test_an_assistant_that_does_not_fit_is_refused(pair, tmp_path):
    folder, draft_folder, *_ = pair
    target = Checkpoint.open(folder).config
    assert is_assistant(draft_folder)
    assert not is_assistant(folder)
    raw = json.loads((draft_folder / "config.json").read_text())
    for changes, said in (
        ({"backbone_hidden_size": 65}, "backbone_hidden_size is 65, but the target has 64"),
        ({"text_config": raw["text_config"] | {"sliding_window": 50}}, "no layer with a window of 50 rows"),
        ({"text_config": raw["text_config"] | {"head_dim": 8}}, "are read, but the target has"),
        ({"text_config": raw["text_config"] | {"enable_moe_block": True}}, "enable_moe_block True of an assistant"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        with pytest.raises(CheckpointError, match=said):
            AssistantCheckpoint.open(tmp_path, target)
    assisted = Assisted(folder, draft_folder)
    copied = evolve(assisted.shard.head, find_caches=None)
    found = AssistantCheckpoint.open(draft_folder, target)
    with pytest.raises(ValueError, match="must be on the device of the last layers"):
        AssistantDraft(found.config, found, assisted.draft._kernels, copied)  # noqa: SLF001
