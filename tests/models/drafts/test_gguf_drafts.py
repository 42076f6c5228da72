"""GGUF files of drafts, as llama.cpp and Lucebox publish them, are the drafts of the folders that they were made of."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import evolve
from gguf import GGMLQuantizationType as Kind

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint
from adapters.models.drafts.gguf_files import check_gguf_tokens
from tests.models.checkpoints import same_bits
from tests.models.corrected_drafts import CORRECTED, proposed, tensors_of, without_causal, write_draft_gguf
from tests.models.draft_models import (
    FULL,
    TARGET,
    aux_hidden_states_of,
    config_of,
    draft_of,
    extend_in_pieces,
    random_tensors,
    slides,
)

PLAIN = config_of(masks=(slides(40), slides(40), FULL))
FORMS = ["dflash", "dflash-draft", "qwen35-dflash-draft"]
# Files have no Markov heads of other kinds, and say of confidence heads only what their tensors show.
KINDS = {
    "DFlash": PLAIN,
    "DFlash 2": without_causal(CORRECTED["DFlash 2"]),
    "DSpark": CORRECTED["DSpark"],
}


def opened(path, target=TARGET) -> DraftCheckpoint:
    return DraftCheckpoint.open(path, target)


def refusal(path, target=TARGET) -> str:
    with pytest.raises(CheckpointError) as caught:
        DraftCheckpoint.open(path, target)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "HERE")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [*KINDS])
def test_a_file_is_the_draft_that_it_was_made_of(tmp_path, kind, form):
    config = KINDS[kind]
    tensors = tensors_of(config)
    checkpoint = opened(write_draft_gguf(tmp_path / "a.gguf", config, tensors, architecture=form))
    assert checkpoint.config == config
    assert {*checkpoint.tensors} == {*tensors}
    assert all(same_bits(checkpoint.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", [*KINDS])
def test_packed_weights_are_unpacked(tmp_path, kind):
    config = KINDS[kind]
    tensors = tensors_of(config)
    path = write_draft_gguf(tmp_path / "a.gguf", config, tensors, Kind.Q8_0)
    checkpoint = opened(path)
    found, exact = checkpoint.read("fc.weight"), tensors["fc.weight"]
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.02
    assert same_bits(checkpoint.read("norm.weight"), tensors["norm.weight"])
    rows = aux_hidden_states_of(config, 40)
    unpacked = type(tensors)({name: checkpoint.read(name) for name in tensors})
    requests = [BlockRequest(0, 0, 40, 17, config.block - 1)]
    both = []
    for weights in (checkpoint, unpacked):
        draft = draft_of(config, weights)
        extend_in_pieces(draft, rows, [(64, 64)])
        both.append(proposed(draft, requests) if config.parts.is_corrected else draft.logits(requests).clone())
    if kind == "DFlash":
        assert same_bits(both[0], both[1])
    else:
        assert both[0].tokens == both[1].tokens
        assert all(map(same_bits, both[0].logits[0], both[1].logits[0]))
    other = write_draft_gguf(tmp_path / "b.gguf", config, tensors)
    assert opened(other).digest() != checkpoint.digest()


def test_names_of_older_files_are_known(tmp_path):
    older = {
        "dflash.fc.weight": "dflash_fc.weight",
        "dflash.hidden_norm.weight": "dflash_hidden_norm.weight",
        "blk.0.ffn_norm.weight": "blk.0.post_attention_norm.weight",
    }
    tensors = random_tensors(PLAIN)
    path = write_draft_gguf(tmp_path / "a.gguf", PLAIN, tensors, architecture="dflash-draft", renamed=older)
    assert opened(path).config == PLAIN
    config = KINDS["DFlash 2"]
    nested = {
        "selector_hidden.weight": "selector.hidden_proj.weight",
        "selector_predecessor.weight": "selector.pred_codebook",
        "selector_successor.weight": "selector.succ_codebook",
    }
    for layer in range(3):
        nested |= {f"blk.{layer}.{part}_conv_base": f"blk.{layer}.{part}_conv.base" for part in ("attn", "ffn")}
    path = write_draft_gguf(tmp_path / "b.gguf", config, tensors_of(config), renamed=nested)
    assert opened(path).config == config


def test_layers_are_numbered_by_their_inputs_in_llama_cpps_form_only(tmp_path):
    tensors = random_tensors(PLAIN)
    path = write_draft_gguf(tmp_path / "a.gguf", PLAIN, tensors, target_layers=[1, 4, 6])
    assert opened(path).config.aux_layers == (0, 3, 5)
    own = {"dflash.target_layer_ids": [0, 3, 5]}
    path = write_draft_gguf(tmp_path / "b.gguf", PLAIN, tensors, architecture="dflash-draft", **own)
    assert opened(path).config.aux_layers == (0, 3, 5)
    absent = {"dflash.target_layer_ids": None}
    path = write_draft_gguf(tmp_path / "c.gguf", PLAIN, tensors, architecture="dflash-draft", **absent)
    assert opened(path).config.aux_layers == (1, 4, 6)


def test_windows_are_those_of_the_pattern(tmp_path):
    tensors = random_tensors(PLAIN)
    none = {"attention.sliding_window_pattern": None}
    path = write_draft_gguf(tmp_path / "a.gguf", PLAIN, tensors, architecture="dflash-draft", **none)
    assert opened(path).config.masks == (FULL,) * 3
    path = write_draft_gguf(tmp_path / "b.gguf", PLAIN, tensors, **none)
    assert "dflash.attention.sliding_window_pattern is missing" in refusal(path)
    path = write_draft_gguf(tmp_path / "c.gguf", PLAIN, tensors, **{"attention.causal": False})
    assert opened(path).config.masks == (slides(40, causal=False), slides(40, causal=False), FULL)


def test_embedding_and_head_of_a_file_are_not_used(tmp_path):
    tensors = random_tensors(PLAIN)
    more = {"embed_tokens.weight": torch.zeros(211, 64), "lm_head.weight": torch.zeros(211, 64)}
    path = write_draft_gguf(tmp_path / "a.gguf", PLAIN, type(tensors)({**tensors, **more}))
    assert {*opened(path).tensors} == {*tensors}


def test_a_folder_may_hold_the_file(tmp_path):
    tensors = random_tensors(PLAIN)
    write_draft_gguf(tmp_path / "other.gguf", PLAIN, tensors)
    assert opened(tmp_path).folder == tmp_path / "other.gguf"
    write_draft_gguf(tmp_path / "dflash-draft-3.6-q8_0.gguf", PLAIN, tensors, Kind.Q8_0, architecture="dflash-draft")
    assert opened(tmp_path).folder == tmp_path / "dflash-draft-3.6-q8_0.gguf"
    write_draft_gguf(tmp_path / "dflash-draft-3.6-f32.gguf", PLAIN, tensors, architecture="dflash-draft")
    expected = "several GGUF files (dflash-draft-3.6-f32.gguf, dflash-draft-3.6-q8_0.gguf); accepted: the path of one"
    assert expected in refusal(tmp_path)


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        ("llama", {}, "general.architecture 'llama' is no DFlash draft; accepted: 'dflash', 'dflash-draft'"),
        ("dflash", {"target_layers": None}, "dflash.target_layers is missing"),
        ("dflash", {"target_layers": [2, 5]}, "target_layer_ids names 2 layers, but fc.weight is as wide as 3"),
        ("dflash", {"embedding_length": 128}, "hidden_size is 128, but the tensors' shapes say 64"),
        ("dflash", {"block_count": 2}, "dflash.attention.sliding_window_pattern has 3 entries; accepted: 2"),
        ("dflash", {"attention.value_length": 32}, "dflash.attention.value_length 32 is not supported"),
        ("dflash", {"rope.dimension_count": 8}, "dflash.rope.dimension_count 8 is not supported; accepted: 16"),
        ("dflash", {"rope.freq_base": None}, "dflash.rope.freq_base is missing"),
        ("dflash", {"hyper_connection_count": 4}, "dflash.hyper_connection_count 4 is not supported"),
        ("dflash", {"tokenizer.ggml.mask_token_id": None}, "mask_token_id is missing"),
        ("dflash", {"tokenizer.ggml.tokens": ["a"] * 200}, "vocab_size is 200, but the target has 211"),
        ("dflash-draft", {"vocab_size": 500}, "vocab_size is 500, but the target has 211: a draft of another"),
        ("dflash-draft", {"dflash.block_size": 1}, "block_size 1 is not an integer in 2..128"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(tmp_path, form, fields, message):
    path = write_draft_gguf(tmp_path / "a.gguf", PLAIN, random_tensors(PLAIN), architecture=form, **fields)
    found = refusal(path)
    assert found.startswith("HERE: ")
    assert message in found


@pytest.mark.parametrize(
    ("stored", "renamed", "message"),
    [
        ("fc.weight", "fc2.weight", "tensor fc.weight is missing"),
        ("blk.1.attn_q.weight", "blk.1.attn_z.weight", "tensor layers.1.self_attn.q_proj.weight is missing"),
        ("blk.0.attn_q_norm.weight", "blk.0.attn_sinks.weight", "belongs to a attention-sink drafter"),
        ("fc.weight", "d2t", "tensor d2t belongs to a Speculators drafter, which is not supported"),
        ("fc.weight", "dflash.domino.start", "belongs to a Domino drafter, which is not supported"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, stored, renamed, message):
    path = write_draft_gguf(tmp_path / "a.gguf", PLAIN, random_tensors(PLAIN), renamed={stored: renamed})
    assert message in refusal(path)


def test_another_targets_draft_and_no_file_are_refused(tmp_path):
    path = write_draft_gguf(tmp_path / "a.gguf", PLAIN, random_tensors(PLAIN))
    assert "hidden_size is 64, but the target has 128" in refusal(path, evolve(TARGET, hidden_size=128))
    assert refusal(tmp_path / "nowhere.gguf") == "HERE: no such file"
    path.write_bytes(path.read_bytes()[:-4000])
    assert "ends past the end of the file" in refusal(path)


def test_tokens_are_compared_with_the_targets(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    vocabulary = {chr(97 + number): number for number in range(20)}
    added = [{"id": 20, "content": "<end>"}]
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokens = [*vocabulary, "<end>", *[f"[PAD{number}]" for number in range(21, 211)]]
    field = "tokenizer.ggml.tokens"
    tensors = random_tensors(PLAIN)
    check_gguf_tokens(write_draft_gguf(tmp_path / "a.gguf", PLAIN, tensors, **{field: tokens}), folder)
    check_gguf_tokens(write_draft_gguf(tmp_path / "b.gguf", PLAIN, tensors), folder)
    check_gguf_tokens(tmp_path / "a folder with safetensors", folder)
    for number, other in ((3, "z"), (20, "<other>")):
        wrong = [*tokens]
        wrong[number] = other
        path = write_draft_gguf(tmp_path / "c.gguf", PLAIN, tensors, **{field: wrong})
        with pytest.raises(CheckpointError, match=rf"token {number} is '{other}', but the target has .*another target"):
            check_gguf_tokens(path, folder)
