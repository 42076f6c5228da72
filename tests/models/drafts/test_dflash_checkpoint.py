"""DFlash drafts as they are published are read, transformers' own among them; any other kind is refused by name."""

from __future__ import annotations

import json
import math

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.config.rope import Yarn
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint
from adapters.models.drafts.dflash.config import spread_aux_layers
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from tests.models.checkpoints import same_bits
from tests.models.draft_models import (
    CAUSAL,
    FULL,
    GEOMETRIES,
    TARGET,
    aux_hidden_states_of,
    config_of,
    draft_of,
    extend_in_pieces,
    head_of,
    random_tensors,
    save_draft,
    slides,
)
from training.draft_export import export_draft
from training.draft_export import load_draft as load_trained
from training.draft_model import BlockSlots, DraftGeometry, DraftNetwork
from training.model import Geometry

TENSORS = random_tensors(config_of())


@pytest.fixture
def folder(tmp_path):
    save_draft(tmp_path, config_of(), TENSORS)
    return tmp_path


def edit(folder, **changes):
    """Change fields of config.json; a name may start with `dflash_config.`, and "absent" takes a field out."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for name, value in changes.items():
        place = raw["dflash_config"] if name.startswith("own_") else raw
        bare = name.removeprefix("own_")
        place[bare] = value
        if value == "absent":
            del place[bare]
    path.write_text(json.dumps(raw))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def opened(folder, target=TARGET):
    return DraftCheckpoint.open(folder, target).config


def refusal(folder, target=TARGET) -> str:
    with pytest.raises(CheckpointError) as caught:
        DraftCheckpoint.open(folder, target)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text.replace(str(folder), "HERE")


@pytest.mark.parametrize("name", [*GEOMETRIES])
def test_a_folder_is_read_whole(tmp_path, name):
    config, tensors = GEOMETRIES[name], random_tensors(GEOMETRIES[name])
    windows = {mask.window for mask in config.masks if mask.window}
    changes: dict[str, object] = {"sliding_window": 40}
    if config.rotary.scaling:
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
        changes = {"rope_scaling": scaling, "sliding_window": 600}
    if len(windows) > 1 or any(mask.window and not mask.causal for mask in config.masks):
        config = evolve(config, masks=(slides(40, causal=False), FULL, slides(40, causal=False)))
        changes["causal"] = False
    if not windows:
        changes = {"causal": True} if config.masks[0].causal else {}
    save_draft(tmp_path, config, tensors, **changes)
    checkpoint = DraftCheckpoint.open(tmp_path, TARGET)
    assert checkpoint.config == config
    assert {*checkpoint.tensors} == {*tensors}
    assert all(same_bits(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    assert checkpoint.has_tensor("fc.weight")
    assert not checkpoint.has_tensor("mask_embedding")


def test_prefixes_and_copies_of_what_is_the_targets_make_no_difference(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("prefixed")
    more = {f"model.{name}": tensor for name, tensor in TENSORS.items()}
    more |= {"model.embed_tokens.weight": torch.zeros(211, 64), "lm_head.weight": torch.zeros(211, 64)}
    more |= {
        "model.rotary_emb.inv_freq": torch.zeros(8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    save_draft(other, config_of(), more)
    plain, prefixed = DraftCheckpoint.open(folder, TARGET), DraftCheckpoint.open(other, TARGET)
    assert plain.config == prefixed.config
    assert {*plain.tensors} == {*prefixed.tensors}
    assert same_bits(plain.read("norm.weight"), prefixed.read("norm.weight"))
    edit_tensors(other, lambda tensors: tensors.update({"fc.weight": TENSORS["fc.weight"]}))
    assert "tensor fc.weight is there twice" in refusal(other)


def test_shards_with_an_index_are_one_draft(folder):
    names = sorted(TENSORS)
    files = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in files.items():
        save_file({name: TENSORS[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = DraftCheckpoint.open(folder, TARGET)
    assert all(same_bits(checkpoint.read(name), TENSORS[name]) for name in names)


def test_what_config_json_leaves_out_is_derived(folder):
    edit(
        folder, hidden_size="absent", intermediate_size="absent", num_hidden_layers="absent", head_dim="absent",
        num_attention_heads="absent", num_key_value_heads="absent", block_size="absent", num_target_layers="absent",
        own_target_layer_ids="absent", layer_types="absent", rms_norm_eps="absent", vocab_size="absent",
    )  # fmt: skip
    assert opened(folder) == evolve(config_of(), aux_layers=spread_aux_layers(9, 3))
    assert spread_aux_layers(9, 3) == (1, 4, 6)


@pytest.mark.parametrize(
    ("layers", "aux_layers"),
    [
        (36, [1, 9, 17, 25, 33]),
        (64, [1, 16, 31, 46, 61]),
        (32, [1, 8, 15, 22, 29]),
        (24, [1, 6, 11, 16, 21]),
        (28, [14]),
    ],
)
def test_missing_taps_are_spread_as_published_drafts_are(layers, aux_layers):
    assert spread_aux_layers(layers, len(aux_layers)) == tuple(aux_layers)


def test_fields_are_looked_for_in_dflash_config_first(folder):
    edit(folder, own_block_size=8, own_causal=True, own_num_target_layers=9, num_target_layers=5)
    edit(folder, own_mask_token_id="absent", mask_token_id=3, target_layer_ids=[0, 1])  # noqa: S106 - not a password
    found = opened(folder)
    assert (found.block, found.mask_token_id, found.aux_layers, found.masks) == (8, 3, (1, 4, 6), (CAUSAL,) * 3)


def test_layers_are_what_they_are_said_to_be(folder):
    sliding = ["sliding_attention", "full_attention", "sliding_attention"]
    edit(folder, layer_types=sliding, sliding_window=99, use_sliding_window=True)
    assert opened(folder).masks == (slides(99), FULL, slides(99))
    edit(folder, own_causal=False)
    assert opened(folder).masks == (slides(99, causal=False), FULL, slides(99, causal=False))
    edit(folder, own_causal=True)
    assert opened(folder).masks == (slides(99), CAUSAL, slides(99))
    edit(folder, own_causal="absent", layer_types="absent", max_window_layers=2)
    assert opened(folder).masks == (FULL, FULL, slides(99))


def test_rotary_embeddings_old_and_new(folder):
    edit(folder, rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    assert (opened(folder).rotary.theta, opened(folder).rotary.scaling) == (5e6, None)
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 512}
    edit(folder, rope_parameters=yarn | {"beta_fast": 16, "beta_slow": 2, "truncate": False})
    assert opened(folder).rotary.scaling == Yarn(8.0, 512.0, 16.0, 2.0, 0.1 * math.log(8) + 1, truncate=False)
    edit(folder, rope_parameters=yarn | {"attention_factor": 1.25})
    assert opened(folder).rotary.scaling == Yarn(8.0, 512.0, 32.0, 1.0, 1.25, truncate=True)
    edit(folder, rope_parameters=yarn | {"mscale": 2.0, "mscale_all_dim": 1.0, "factor": None})
    grown = (0.2 * math.log(8) + 1) / (0.1 * math.log(8) + 1)
    assert opened(folder).rotary.scaling == Yarn(8.0, 512.0, 32.0, 1.0, grown, truncate=True)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "yarn",
            "factor": 3.0,
            "original_max_position_embeddings": 700,
            "truncate": False,
            "beta_fast": 8,
        },
    ],
)
def test_frequencies_are_those_of_transformers(folder, rope):
    from transformers import Qwen3Config  # noqa: PLC0415 - seconds
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    edit(folder, rope_theta="absent", rope_parameters={"rope_theta": 1e5, **rope})
    found, scale = opened(folder).rotary.frequencies()
    theirs = Qwen3Config(head_dim=16, max_position_embeddings=4096, rope_parameters={"rope_theta": 1e5, **rope})
    if rope["rope_type"] == "default":
        expected, factor = 1.0 / 1e5 ** (torch.arange(0, 16, 2).float() / 16), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(factor)


def test_a_mask_embedding_is_read_from_safetensors_and_never_unpickled(folder):
    (folder / "mask_embedding.pt").write_bytes(b"")
    assert refusal(folder) == "HERE: mask_embedding.pt is a pickle; accepted: mask_embedding.safetensors"
    row = torch.randn(1, 64)
    save_file({"mask_embedding": row}, folder / "mask_embedding.safetensors")
    checkpoint = DraftCheckpoint.open(folder, TARGET)
    assert same_bits(checkpoint.read("mask_embedding"), row)
    before = checkpoint.digest()
    save_file({"mask_embedding": row + 1}, folder / "mask_embedding.safetensors")
    assert DraftCheckpoint.open(folder, TARGET).digest() != before
    save_file({"mask_embedding": torch.randn(2, 64)}, folder / "mask_embedding.safetensors")
    assert "tensors of shapes [[2, 64]]; accepted: one of shape [64]" in refusal(folder)


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 512}
NO_THETA = {"rope_theta": "absent"}
SLIDING = ["sliding_attention"] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash': drafts in Speculators format"),
        ({"transformer_layer_config": {}}, "drafts in Speculators format are not supported; accepted: flat DFlash"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size 32000: drafts in Speculators format"),
        ({"model_type": "llama"}, "model_type 'llama' is not a supported draft; accepted: 'qwen3', 'muse_"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; accepted: 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported; accepted: false"),
        ({"hidden_size": 128}, "hidden_size is 128, but the tensors' shapes say 64"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, but the tensors' shapes say 3"),
        ({"num_attention_heads": 8}, "num_attention_heads is 8, but the tensors' shapes say 4"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, but the tensors' shapes say 2"),
        ({"head_dim": 32}, "head_dim is 32, but the tensors' shapes say 16"),
        ({"intermediate_size": 105}, "intermediate_size is 105, but the tensors' shapes say 104"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1 is not an integer in 1.."),
        ({"num_target_layers": 36}, "num_target_layers is 36, but the target has 9: a draft of another target"),
        ({"vocab_size": 212}, "vocab_size is 212, but the target has 211: a draft of another target"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, but the target has 64"),
        ({"own_target_layer_ids": [1, 4]}, "target_layer_ids names 2 layers, but fc.weight is as wide as 3 of them"),
        ({"own_target_layer_ids": [1, 4, 9]}, "target_layer_ids are [1, 4, 9]; accepted: different ones of 0..8"),
        ({"own_target_layer_ids": [1, 4, 4]}, "accepted: different ones of 0..8"),
        ({"own_target_layer_ids": [1, "4", 5]}, "target_layer_ids [1, '4', 5] is not a list of layer numbers"),
        ({"own_mask_token_id": "absent"}, "mask_token_id is missing"),
        ({"own_mask_token_id": 211}, "mask_token_id 211 is not an integer in 0..210"),
        ({"own_mask_token_id": True}, "mask_token_id True is not an integer"),
        ({"block_size": 1}, "block_size 1 is not an integer in 2..128"),
        ({"block_size": "16"}, "block_size '16' is not an integer"),
        ({"dflash_config": [1]}, "dflash_config is not an object"),
        ({"own_causal": 1}, "causal 1 is not true or false"),
        ({"layer_types": ["full_attention"] * 2}, "is not 3 times one of full_attention, sliding_attention"),
        ({"layer_types": ["linear_attention"] * 3}, "is not 3 times one of full_attention, sliding_attention"),
        ({"layer_types": SLIDING}, "sliding_window None is not an integer"),
        ({"layer_types": SLIDING, "use_sliding_window": False, "sliding_window": 9}, "but use_sliding_window is false"),
        (
            {"layer_types": SLIDING, "causal": False, "sliding_window": 9},
            "sliding_window 9 is smaller than block_size 16",
        ),
        (NO_THETA, "rope_theta is missing"),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope type 'llama3' is not supported; accepted: 'default', 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear' is not supported"),
        ({"rope_parameters": 7}, "rope_parameters is not an object"),
        ({"rope_parameters": YARN | {"factor": -1}}, "factor -1 is not a positive number"),
        ({"rope_parameters": YARN | {"factor": 2, "truncate": 0}}, "truncate 0 is not true or false"),
        ({"rope_parameters": YARN | {"factor": 2}, "rope_theta": 1}, "rope_theta 1 is not above 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported; accepted: 1.0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small' is not a positive number"),
    ],
)
def test_a_config_that_is_not_this_drafts_is_refused(folder, changes, message):
    edit(folder, **changes)
    found = refusal(folder)
    assert found.startswith("HERE: config.json: ")
    assert message in found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("domino.proj.weight", "Domino"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("mtp.0.attn.wq_a.weight", "DeepSeek-V4"),
        ("layers.0.self_attn.attn_gate.weight", "gated-attention"),
        ("layers.1.self_attn.attention_sink_bias", "attention-sink"),
        ("aux_hidden_norm.0.weight", "normalised-tap"),
        ("d2t", "Speculators"),
        ("model.t2d", "Speculators"),
    ],
)
def test_another_kind_of_drafter_is_named(folder, name, kind):
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    bare = name.removeprefix("model.")
    assert refusal(folder) == (
        f"HERE: tensor {bare} belongs to a {kind} drafter, which is not supported; "
        "accepted: DFlash, DFlash 2 and DSpark"
    )


def test_tensors_that_do_not_fit_are_named(folder, tmp_path_factory):
    for change, message in [
        (lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"), "tensor layers.1.mlp.up_proj.weight is missing"),
        (lambda tensors: tensors.pop("fc.weight"), "tensor fc.weight is missing; accepted: a flat DFlash checkpoint"),
        (
            lambda tensors: tensors.update({"bonus.weight": torch.zeros(3)}),
            "tensor bonus.weight is not part of a 3-layer",
        ),
        (
            lambda tensors: tensors.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            "tensor layers.0.self_attn.q_proj.bias is not part of a 3-layer DFlash draft",
        ),
        (
            lambda tensors: tensors.update({"layers.2.mlp.down_proj.weight": torch.zeros(64, 96)}),
            "tensor layers.2.mlp.down_proj.weight has shape [64, 96]; accepted here: [64, 104]",
        ),
        (
            lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 190)}),
            "tensor fc.weight has shape [64, 190]: not a whole number of target layers",
        ),
        (
            lambda tensors: tensors.update({"fc.weight": torch.zeros(64)}),
            "tensor fc.weight has shape [64], not 2 dimensions above zero",
        ),
        (
            lambda tensors: tensors.update({"layers.0.self_attn.k_proj.weight": torch.zeros(48, 64)}),
            "layer 0 has 64 query and 48 key rows, which heads of 16 do not divide evenly",
        ),
    ]:
        other = tmp_path_factory.mktemp("edited")
        save_draft(other, config_of(), TENSORS)
        edit_tensors(other, change)
        assert message in refusal(other)


def test_a_draft_of_another_target_is_refused(folder):
    assert "hidden_size is 64, but the target has 128" in refusal(folder, evolve(TARGET, hidden_size=128))
    assert "num_target_layers is 9, but the target has 6" in refusal(folder, evolve(TARGET, num_layers=6))
    edit(folder, num_target_layers="absent", own_target_layer_ids="absent")
    assert "target_layer_ids are missing, and those derived" in refusal(folder, evolve(TARGET, num_layers=4))
    assert "vocab_size is 211" in refusal(folder, evolve(TARGET, vocab_size=500))


def test_what_is_no_checkpoint_is_refused(folder):
    assert refusal(folder / "nowhere") == "HERE: no such folder"
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    assert "truncated" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json is missing" in refusal(folder)


# --- transformers' own DFlash ---


def assistant(layer_types, **changes):
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel  # noqa: PLC0415 - seconds

    settings = {
        "hidden_size": 64, "intermediate_size": 104, "num_hidden_layers": len(layer_types), "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "layer_types": layer_types,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "block_size": 16, "mask_token_id": 210,
        "target_layer_ids": [1, 4, 6], "sliding_window": 40, "initializer_range": 0.15, "rms_norm_eps": 1e-6, **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + 1 if "norm" in name else torch.randn_like(weight) * 0.15)
    return model


def theirs(model, rows, masks=None, dtype=torch.float32):
    """Logits of transformers' forward over a block of 16 behind the context `rows [K, n, D]`."""
    from transformers.cache_utils import DFlashCache  # noqa: PLC0415

    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(rows.shape[1])
    table = head_of(config_of(), CpuKernels(dtype), dtype).embedding
    context = rows.permute(1, 0, 2).reshape(1, rows.shape[1], -1)
    with torch.no_grad():
        out = model(
            noise_embeds=table[[17, *[210] * 15]][None],
            context_hidden_states=context,
            attention_mask=masks,
            past_key_values=cache,
        )
        return out.last_hidden_state[0, 1:] @ table.T


def ours(config, weights, rows, dtype=torch.float32):
    draft = draft_of(config, weights, dtype)
    extend_in_pieces(draft, rows, [(256, 256), (64, 64)], slot=1)
    return draft.logits([BlockRequest(1, 0, rows.shape[1], 17, 15)])


@pytest.mark.parametrize(
    ("layer_types", "changes"),
    [
        (["full_attention"] * 3, {}),
        (["full_attention"], {"num_attention_heads": 5, "num_key_value_heads": 1, "target_layer_ids": [4]}),
        (["sliding_attention", "sliding_attention", "full_attention"], {"head_dim": 24}),
        (
            ["full_attention"] * 2,
            {
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
                },
                "rms_norm_eps": 1e-5,
            },
        ),
    ],
    ids=["full", "one auxiliary layer, mqa", "sliding and full", "yarn"],
)  # fmt: skip
def test_transformers_own_drafts_are_read_and_propose_the_same(tmp_path, layer_types, changes):
    model = assistant(layer_types, **changes)
    model.save_pretrained(tmp_path)
    checkpoint = DraftCheckpoint.open(tmp_path, TARGET)
    rows = aux_hidden_states_of(checkpoint.config, 300)
    for length in (300, 20):
        expected = theirs(model, rows[:, :length])
        found = ours(checkpoint.config, checkpoint, rows[:, :length])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_published_drafts_propose_what_transformers_does_over_the_same_weights(tmp_path):
    """Sliding layers of published drafts are causal within the block: transformers is given the masks."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = assistant(kinds)
    renamed = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    tensors = {renamed.get(name, name): tensor for name, tensor in model.state_dict().items()}
    config = config_of(masks=(slides(40), AttentionMask(), slides(40)))
    save_draft(tmp_path, config, tensors, sliding_window=40)
    checkpoint = DraftCheckpoint.open(tmp_path, TARGET)
    assert checkpoint.config == config
    rows, length, block = aux_hidden_states_of(config, 130), 130, 16
    query, key = torch.arange(length, length + block).unsqueeze(1), torch.arange(length + block)
    sliding = (key <= query) & (key > query - 40)
    masks = {
        "full_attention": torch.zeros(1, 1, block, length + block),
        "sliding_attention": torch.zeros(1, 1, block, length + block).masked_fill(~sliding, float("-inf")),
    }
    exact = theirs(model, rows, masks)
    torch.testing.assert_close(ours(config, checkpoint, rows), exact, rtol=1e-4, atol=1e-3)
    for dtype in (torch.bfloat16, torch.float16):
        half = {name: mask.to(dtype) for name, mask in masks.items()}
        their_half = theirs(model.to(dtype), rows.to(dtype), half, dtype).float()
        our_half = ours(config, checkpoint, rows.to(dtype), dtype)
        assert (our_half - exact).square().mean() <= 1.3 * (their_half - exact).square().mean()
        model.float().load_state_dict({{v: k for k, v in renamed.items()}.get(k, k): v for k, v in tensors.items()})


def test_a_draft_that_was_trained_here_proposes_what_it_learnt_to(tmp_path):
    geometry = DraftGeometry(Geometry(211, 64, 104, 9, 4, 2, 16, 4096, 1e4), 2, (1, 4, 6), 16)
    torch.manual_seed(1)
    trained = DraftNetwork(geometry)
    export_draft(trained, tmp_path)
    trained = load_trained(tmp_path, "cpu", torch.float32)
    checkpoint = DraftCheckpoint.open(tmp_path, TARGET)
    rows = aux_hidden_states_of(checkpoint.config, 90)
    table = head_of(checkpoint.config, CpuKernels(torch.float32)).embedding
    with torch.no_grad():
        context = trained.context(rows.permute(1, 0, 2).reshape(1, 90, -1))
        block = table[[17, *[checkpoint.config.mask_token_id] * 15]][None]
        expected = trained(context, BlockSlots.of({16: torch.tensor([[90]])}), block)[0, 1:] @ table.T
    torch.testing.assert_close(ours(checkpoint.config, checkpoint, rows), expected, rtol=1e-4, atol=1e-4)


def test_a_draft_opened_from_its_folder_is_the_draft_of_its_tensors(folder):
    config = config_of()
    checkpoint = DraftCheckpoint.open(folder, TARGET)
    rows = aux_hidden_states_of(config, 50)
    assert same_bits(ours(config, checkpoint, rows), ours(config, TENSORS, rows))
    kernels = CpuKernels(torch.float32)
    identities = {
        DFlashDraft(config, weights, kernels, head_of(config, kernels), DraftPlacement(slots=1, capacity=64)).identity
        for weights in (checkpoint, DraftCheckpoint.open(folder, TARGET))
    }
    assert len(identities) == 1
    edit_tensors(folder, lambda tensors: tensors["norm.weight"].add_(1))
    changed = DraftCheckpoint.open(folder, TARGET)
    assert (
        DFlashDraft(config, changed, kernels, head_of(config, kernels), DraftPlacement(slots=1, capacity=64)).identity
        not in identities
    )
