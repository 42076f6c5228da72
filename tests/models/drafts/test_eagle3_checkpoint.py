"""Folders and files of EAGLE-3 drafts: every published layout is the same draft, and bad ones are refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.config.rope import Divided, Llama3, Rotary
from adapters.models.drafts.eagle3.checkpoint import Eagle3Checkpoint, is_eagle3
from adapters.models.drafts.eagle3.config import Eagle3Norms
from tests.models.checkpoints import same_bits
from tests.models.draft_models import TARGET, config_of, random_tensors, save_draft
from tests.models.drafts.test_eagle3 import LENGTH, ask
from tests.models.eagle3_drafts import KINDS, PLAIN, draft_of, follow, proposed, random_eagle3, save_eagle3, taps_of
from tests.models.eagle3_drafts import write_eagle3_gguf as write_gguf

LAYOUTS = ["sglang", "vllm", "speculators"]
TENSORS = random_eagle3(PLAIN)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def opened(path) -> Eagle3Checkpoint:
    assert is_eagle3(path)
    return Eagle3Checkpoint.open(path, TARGET)


def refusal(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Eagle3Checkpoint.open(path, TARGET)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value).replace(str(path), "HERE")


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_every_layout_is_the_draft_that_it_was_made_of(tmp_path, kind, layout):
    config, tensors = KINDS[kind], random_eagle3(KINDS[kind])
    checkpoint = opened(save_eagle3(tmp_path / "draft", config, tensors, layout))
    assert checkpoint.config == config
    assert {*checkpoint.tensors} == {*tensors}
    assert all(same_bits(checkpoint.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("layers", ["target_layers", "extract_layers"])
@pytest.mark.parametrize("kind", ["reduced vocabulary", "normed residual, own embedding, whole vocabulary"])
def test_a_file_is_the_draft_that_it_was_made_of(tmp_path, kind, layers):
    config, tensors = KINDS[kind], random_eagle3(KINDS[kind])
    checkpoint = opened(write_gguf(tmp_path / "a.gguf", config, tensors, layers=layers))
    assert checkpoint.config == config
    assert all(same_bits(checkpoint.read(name), tensor) for name, tensor in tensors.items())


def test_all_layouts_propose_the_same(tmp_path):
    tokens = torch.randint(0, TARGET.vocab_size, (LENGTH + 1,), generator=torch.Generator().manual_seed(1))
    taps = taps_of(PLAIN, LENGTH)
    paths = [save_eagle3(tmp_path / layout, PLAIN, TENSORS, layout) for layout in LAYOUTS]
    found = []
    for path in (*paths, write_gguf(tmp_path / "a.gguf", PLAIN, TENSORS)):
        draft = draft_of(PLAIN, opened(path))
        follow(draft, 0, tokens[:LENGTH], taps, [64])
        found.append(proposed(draft, ask(tokens, LENGTH)))
    for other in found[1:]:
        assert other.tokens == found[0].tokens
        assert all(map(same_bits, other.logits[0], found[0].logits[0]))


def test_layers_that_no_field_names_are_the_usual_ones(tmp_path):
    folder = save_eagle3(tmp_path / "draft", PLAIN, TENSORS, eagle_config="absent")
    assert opened(folder).config.aux_layers == (1, TARGET.num_layers // 2 - 1, TARGET.num_layers - 4)


def test_the_norm_before_the_residual_is_usual_in_speculators_format_only(tmp_path):
    for layout in LAYOUTS:
        folder = save_eagle3(tmp_path / layout, PLAIN, TENSORS, layout, norm_before_residual="absent")
        assert opened(folder).config.norms == Eagle3Norms(before_residual=layout == "speculators")


def test_rotary_scalings_are_read(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 256
    folder = save_eagle3(tmp_path / "a", PLAIN, TENSORS, rope_scaling=scaling)
    assert opened(folder).config.rotary == Rotary(16, 1e4, Llama3(8.0, 1.0, 4.0, 256.0))
    folder = save_eagle3(tmp_path / "b", PLAIN, TENSORS, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})
    assert opened(folder).config.rotary == PLAIN.rotary
    factors = torch.arange(1.0, 9.0)
    path = write_gguf(tmp_path / "c.gguf", PLAIN, {**TENSORS, "rope_freqs.weight": factors})
    assert opened(path).config.rotary == Rotary(16, 1e4, Divided(tuple(factors.tolist())))


def test_a_draft_is_known_by_its_tensors_if_its_configuration_says_nothing(tmp_path):
    for layout in ("sglang", "vllm"):
        folder = save_eagle3(tmp_path / layout, PLAIN, TENSORS, layout, architectures=["LlamaForCausalLM"])
        assert opened(folder).config == PLAIN
    plain = config_of()
    save_draft(tmp_path / "dflash", plain, random_tensors(plain))
    assert not is_eagle3(tmp_path / "dflash")
    assert not is_eagle3(tmp_path / "nothing")


BAD_FIELDS = {
    "target_hidden_size": (32, "the target has 64: a draft of another target"),
    "draft_vocab_size": (81, "lm_head.weight has 80 rows"),
    "hidden_size": (65, "the tensors' shapes say 64"),
    "num_attention_heads": (8, "make 128 rows"),
    "num_key_value_heads": (1, "make 16 rows"),
    "num_hidden_layers": (2, "accepted: 1"),
    "hidden_act": ("gelu", "accepted: 'silu'"),
    "attention_bias": (True, "accepted: false"),
    "quantization_config": ({"bits": 4}, "accepted: unquantised weights"),
    "rope_scaling": ({"rope_type": "longrope"}, "'longrope' is not supported"),
    "eagle_config": ({"use_aux_hidden_state": False}, "only the last hidden state"),
}


def test_a_draft_of_another_vocabulary_is_refused(tmp_path):
    said = refusal(save_eagle3(tmp_path / "draft", PLAIN, TENSORS, vocab=999))
    assert "vocab_size is 999, but the target has 211: a draft of another target" in said


@pytest.mark.parametrize("field", [*BAD_FIELDS])
def test_fields_that_do_not_fit_are_refused_by_name(tmp_path, field):
    value, said = BAD_FIELDS[field]
    text = refusal(save_eagle3(tmp_path / "draft", PLAIN, TENSORS, **{field: value}))
    assert said in text
    assert field in text or field in ("num_attention_heads", "num_key_value_heads", "rope_scaling", "eagle_config")


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 3], "names 2 layers, but fc.weight is as wide as 3"),
        ([1, 1, 5], "accepted: different ones of 0..8"),
        ([1, 3, 9], "accepted: different ones of 0..8"),
        (["1", 3, 5], "is not a list of layer numbers"),
    ],
)
def test_layers_that_the_target_does_not_have_are_refused(tmp_path, ids, said):
    assert said in refusal(save_eagle3(tmp_path / "draft", PLAIN, TENSORS, eagle_config={LAYER_IDS: ids}))


def test_the_embeddings_output_is_refused(tmp_path):
    folder = save_eagle3(tmp_path / "draft", PLAIN, TENSORS, "vllm", **{LAYER_IDS: [0, 3, 5]})
    assert "[0, 3, 5] are the outputs of layers [-1, 2, 4]" in refusal(folder)


def without(name):
    return {other: tensor for other, tensor in TENSORS.items() if other != name}


@pytest.mark.parametrize("name", [*TENSORS])
def test_a_missing_tensor_is_named(tmp_path, name):
    said = refusal(save_eagle3(tmp_path / "draft", PLAIN, without(name)))
    assert ("d2t" if name == "lm_head.weight" else name) in said
    assert "missing" in said


BAD_TENSORS = {
    "fc.weight": torch.zeros(64, 190),
    "norm.weight": torch.zeros(63),
    "layers.0.hidden_norm.weight": torch.zeros(128),
    "layers.0.self_attn.q_proj.weight": torch.zeros(64, 64),
    "layers.0.self_attn.v_proj.weight": torch.zeros(33, 128),
    "layers.0.mlp.down_proj.weight": torch.zeros(64, 103),
    "lm_head.weight": torch.zeros(80, 65),
    "embed_tokens.weight": torch.zeros(210, 64),
    "layers.1.input_layernorm.weight": torch.zeros(64),
    "d2t": torch.zeros(79, dtype=torch.int64),
}


@pytest.mark.parametrize("name", [*BAD_TENSORS])
def test_a_tensor_of_another_shape_is_named(tmp_path, name):
    folder = save_eagle3(tmp_path / "draft", PLAIN, {**TENSORS, name: BAD_TENSORS[name]})
    assert name.replace("layers.0.", "") in refusal(folder)


def test_a_map_that_does_not_fit_is_refused(tmp_path):
    wrong = {
        "names tokens 0..211; accepted: 0..210": torch.tensor([211, *range(79)]),
        "names tokens -1..79; accepted: 0..210": torch.tensor([-1, *range(1, 80)]),
        "names a token twice": torch.tensor([5, 5, *range(10, 88)]),
    }
    for number, (said, tokens) in enumerate(wrong.items()):
        folder = tmp_path / str(number)
        save_eagle3(folder, PLAIN, without("d2t"))
        stored = load_file(folder / "model.safetensors")
        save_file({**stored, "d2t": tokens - torch.arange(80)}, folder / "model.safetensors")
        assert said in refusal(folder)
        assert said in refusal(write_gguf(tmp_path / f"{number}.gguf", PLAIN, {**TENSORS, "d2t": tokens}))
    folder = save_eagle3(tmp_path / "floats", PLAIN, without("d2t"))
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "d2t": torch.zeros(80)}, folder / "model.safetensors")
    assert "tensor d2t has dtype torch.float32; accepted: torch.int64, torch.int32" in refusal(folder)


def test_weights_of_another_kind_are_refused(tmp_path):
    wide = evolve(PLAIN, hidden_size=48)
    folder = save_eagle3(tmp_path / "a", wide, random_eagle3(wide))
    assert "embed_tokens.weight is missing: hidden_size 48 is not that of the target, 64" in refusal(folder)
    folder = save_eagle3(tmp_path / "b", PLAIN, TENSORS)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickle (*.bin) only; accepted: safetensors" in refusal(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "no such folder" in refusal(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_layers": None}, "eagle3.target_layers is missing"),
        ({"target_layers": [2, 4]}, "names 2 layers"),
        ({"vocab_size": 300}, "vocab_size is 300, but the target has 211"),
        ({"block_count": 2}, "num_hidden_layers 2; accepted: 1"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"attention.head_count": 2}, "make 32 rows"),
        ({"norm_before_fc": True}, "input_norm.weight is missing"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, fields, said):
    assert said in refusal(write_gguf(tmp_path / "a.gguf", PLAIN, TENSORS, **fields))


def test_unknown_tensors_of_a_file_are_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", PLAIN, {**TENSORS, "d2t.weight": torch.zeros(80)})
    assert "tensor d2t.weight is not part of an EAGLE-3 draft" in refusal(path)
