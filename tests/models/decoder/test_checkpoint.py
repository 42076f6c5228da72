"""Checkpoints as transformers writes them are read; broken ones are each refused with one clear line."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.checkpoint import weights_digest
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import family_of
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3 import parse
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from tests.models.checkpoints import LLAMA3, run_in_pieces, same_bits, save_model, save_qwen3, shard_of, tokens_of


@pytest.fixture
def folder(tmp_path):
    save_qwen3(tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_header(folder, edit):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_read_whole(folder):
    checkpoint = Checkpoint.open(folder)
    stored = load_file(folder / "model.safetensors")
    assert {*stored} == {*checkpoint.tensors} == {*checkpoint.config.tensors()}
    assert all(same_bits(checkpoint.read(name), tensor) for name, tensor in stored.items())
    assert checkpoint.family.model_type == "qwen3"
    assert checkpoint.config.dtype is torch.float32
    assert checkpoint.config.group == 2
    assert resolve_dtype("auto", checkpoint) is torch.float32
    assert resolve_dtype("bfloat16", checkpoint) is torch.bfloat16
    with pytest.raises(ValueError, match="accepted: auto, float32, bfloat16, float16"):
        resolve_dtype("int8", checkpoint)


def test_shards_with_an_index_are_one_model(folder, tmp_path_factory):
    many = tmp_path_factory.mktemp("sharded")
    save_qwen3(many, shard_size="60KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    tokens = tokens_of(20)
    assert same_bits(
        run_in_pieces(shard_of(many), tokens, [(32, 20)]), run_in_pieces(shard_of(folder), tokens, [(32, 20)])
    )


def test_rope_theta_is_read_from_legacy_and_from_new_configurations(folder):
    raw = json.loads((folder / "config.json").read_text())
    assert parse(raw).rope_theta == 10000.0
    del raw["rope_parameters"]
    assert parse({**raw, "rope_theta": 5e5}).rope_theta == 5e5
    assert parse({**raw, "rope_theta": 5e5, "rope_scaling": None, "sliding_window": 4096}).rope_theta == 5e5
    assert parse({**raw, "rope_theta": 1e6, "torch_dtype": "bfloat16"}).dtype in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; accepted: 'llama', 'qwen2', 'mimo', 'qwen3'"),
        ({"model_type": "absent"}, "model_type None is not supported"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size 0 is not an integer in 1..65536"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is not an integer in 1..512"),
        ({"vocab_size": "many"}, "vocab_size 'many' is not an integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"attention_bias": True}, "attention_bias true is not supported; accepted: false"),
        ({"attention_bias": "yes"}, "attention_bias 'yes' is not true or false"),
        ({"use_sliding_window": True}, "sliding window attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding window attention"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; accepted: 'silu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported; accepted: 'fp8'"),
        ({"quantization_config": "awq"}, "quantization_config is not an object"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": "absent", "rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"rope_parameters": "absent"}, "rope_theta is missing"),
        ({"rope_parameters": [1]}, "rope_parameters is not an object"),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1 is not a positive number"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported; accepted: float32, bfloat16, float16"),
        ({"num_hidden_layers": 4, "layer_types": None}, "tensor model.layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 2, "layer_types": None}, "is not part of a 2-layer qwen3"),
        ({"intermediate_size": 96}, "has shape [104, 64]; accepted here: [96, 64]"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_in_one_line(folder, changes, line):
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit_config(folder, **changes)
    assert line in refusal(folder)


@pytest.mark.parametrize(
    ("model_type", "changes", "line"),
    [
        ("llama", {"attention_bias": True}, "attention_bias true is not supported; accepted: false"),
        ("llama", {"mlp_bias": True}, "mlp_bias true is not supported; accepted: false"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}},
            "rope type 'dynamic' is not supported; accepted: 'default', 'linear', 'llama3', 'yarn'",
        ),
        ("llama", {"rope_parameters": "absent", "rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor of rope type 'linear' is missing"),
        ("llama", {"rope_parameters": {**LLAMA3, "rope_type": "llama3", "low_freq_factor": 4}}, "4 is not below"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor of rope type 'llama3'"),
        ("qwen2", {"use_sliding_window": True}, "sliding window attention is not supported; accepted: full"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding window"),
        ("qwen2", {"rope_parameters": "absent"}, "rope_theta is missing"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope type 'yarn'"),
        ("qwen2", {"model_type": "llama"}, "k_proj.bias is not part of a 3-layer llama"),
        ("llama", {"model_type": "qwen2"}, "q_proj.bias is missing"),
    ],
)
def test_other_families_refuse_what_they_do_not_have(tmp_path, model_type, changes, line):
    save_model(tmp_path, model_type)
    edit_config(tmp_path, **changes)
    assert line in refusal(tmp_path)


def test_old_llama_files_tell_neither_theta_nor_head_size():
    raw = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4, "vocab_size": 64, "rope_scaling": None}
    raw |= {"intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 64, "torch_dtype": "float16"}
    config = family_of(raw).parse(raw)
    assert (config.rope_theta, config.head_dim, config.num_kv_heads, config.rope_scaling) == (1e4, 24, 4, None)


def test_a_folder_that_is_not_a_checkpoint_is_refused_in_one_line(folder):
    assert "no such folder" in refusal(folder / "nothing")
    (folder / "tokenizer.json").unlink()
    assert refusal(folder).endswith("tokenizer.json is missing")
    (folder / "config.json").write_text("{")
    assert "config.json: not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[" * 100_000)
    assert "config.json: not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(folder)
    (folder / "config.json").unlink()
    assert refusal(folder).endswith("config.json is missing")


def test_a_missing_tensor_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert refusal(folder).endswith("tensor lm_head.weight is missing")


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    assert "tensor model.norm.weight has shape [63]; accepted here: [64]" in refusal(folder)


def test_a_tensor_that_does_not_belong_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    assert "q_proj.bias is not part of a 3-layer qwen3" in refusal(folder)


def test_a_stored_dtype_that_is_not_floating_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert "model.norm.weight has dtype I8; accepted: F32, BF16, F16" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors: truncated" in refusal(folder)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error_and_not_garbage(folder):
    checkpoint = Checkpoint.open(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:4000])
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].stop)
    with pytest.raises(CheckpointError, match="ends past the end of the file"):
        checkpoint.read(last)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"dtype": "F32", "shape": [64]}, "the safetensors header of model.norm.weight is malformed"),
        ({"dtype": "F32", "shape": [-64], "data_offsets": [0, 256]}, "is malformed"),
        ({"dtype": "F32", "shape": [64], "data_offsets": [256, 0]}, "ends past the end of the file"),
        ({"dtype": "F32", "shape": [64], "data_offsets": [0, 1 << 50]}, "ends past the end of the file"),
        ({"dtype": "F32", "shape": [1 << 39], "data_offsets": [0, 256]}, "which its shape and dtype do not need"),
        ({"dtype": "F32", "shape": [1] * 1_500_000, "data_offsets": [0, 4]}, "is malformed"),
        ({"dtype": "F32" * 1000, "shape": [64], "data_offsets": [0, 256]}, "has dtype F32F32F32F32"),
        (7, "is malformed"),
    ],
)
def test_a_lying_header_is_refused_before_anything_is_allocated(folder, value, line):
    edit_header(folder, lambda header: header.update({"model.norm.weight": value}))
    assert line in refusal(folder)
    assert len(refusal(folder)) < 300 + len(str(folder))


def test_tensors_that_share_bytes_are_named(folder):
    def overlap(header):
        start, stop = header["model.norm.weight"]["data_offsets"]
        first, last = min((one["data_offsets"] for name, one in header.items() if name != "__metadata__"))
        assert last - first >= stop - start
        header["model.norm.weight"]["data_offsets"] = [first, first + stop - start]

    edit_header(folder, overlap)
    assert "and model.norm.weight overlap" in refusal(folder) or "of model.norm.weight and" in refusal(folder)


@pytest.mark.parametrize("file", ["config.json", "part.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(folder, file, kind):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = dict.fromkeys(load_file(folder / "part.safetensors"), "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / file).unlink()
    if kind == "pipe":
        os.mkfifo(folder / file)
    elif kind == "folder":
        (folder / file).mkdir()
    else:
        (folder / file).symlink_to("/dev/zero")
    said = refusal(folder)
    assert "not a regular file" in said or "directory" in said or "neither model.safetensors nor" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_refused_by_name(folder, value, dtype):
    tensors = {name: one.to(dtype) for name, one in load_file(folder / "model.safetensors").items()}
    Checkpoint.open(folder).read("model.norm.weight")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values"):
        shard_of(folder)


def test_a_header_of_a_million_lists_is_refused_before_it_is_parsed(folder):
    raw = b'{"x": [' + b"[]," * 1_000_000 + b"0]}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    tracemalloc.start()
    assert "more than 262144 lists and objects" in refusal(folder)
    assert tracemalloc.get_traced_memory()[1] < 10 * len(raw)
    tracemalloc.stop()


def test_a_header_that_is_not_json_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 8) + b"notjson!" + path.read_bytes())
    assert "the safetensors header is not valid JSON" in refusal(folder)
    path.write_bytes(struct.pack("<Q", 2) + b"[]")
    assert "the safetensors header is not an object" in refusal(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hosts", "sub/model.safetensors", "model.bin", "", ".."])
def test_an_index_cannot_reach_out_of_the_folder(folder, name):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = dict.fromkeys(load_file(folder / "part.safetensors"), "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**names, "model.norm.weight": name}}))
    assert "is not the name of a .safetensors file in the folder" in refusal(folder)


def test_an_index_that_does_not_hold_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(folder)
    index.write_text('{"weight_map": {}}')
    assert "weight_map is not an object" in refusal(folder)
    index.write_text('{"weight_map": {"model.norm.weight": "absent.safetensors"}}')
    assert refusal(folder).endswith("absent.safetensors is missing")
    index.write_text('{"weight_map": {"model.extra.weight": "part.safetensors"}}')
    assert "tensor model.extra.weight is not in part.safetensors" in refusal(folder)


def test_the_digest_tells_weights_apart_and_nothing_else(folder):
    before = Checkpoint.open(folder).digest()
    assert len(before) == 32
    (folder / "generation_config.json").write_text("{}")
    assert Checkpoint.open(folder).digest() == before
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].__setitem__(0, 0.125))
    assert Checkpoint.open(folder).digest() != before


def test_a_digest_that_was_begun_is_the_one_that_is_taken_once(folder, monkeypatch):
    plain, hashed, taken = Checkpoint.open(folder).digest(), weights_digest.hash_files, []
    monkeypatch.setattr(weights_digest, "hash_files", lambda *what: taken.append(1) or hashed(*what))
    weights_digest.start_digest(folder)
    assert Checkpoint.open(folder).digest() == plain
    assert len(taken) == 1
    assert Checkpoint.open(folder).digest() == plain
    assert len(taken) == 2


def test_a_digest_that_was_begun_is_of_no_other_weights(folder):
    weights_digest.start_digest(folder)
    weights = next(folder.glob("*.safetensors"))
    data, changed = weights.read_bytes(), weights.stat().st_mtime_ns + 10**9
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(weights, ns=(changed, changed))
    now = Checkpoint.open(folder).digest()
    assert now == Checkpoint.open(folder).digest()
    weights.write_bytes(data)
    assert Checkpoint.open(folder).digest() != now


def test_to_begin_a_digest_of_what_is_no_checkpoint_is_left_to_whoever_opens_it(tmp_path):
    weights_digest.start_digest(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    weights_digest.start_digest(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [["b"]]}')
    weights_digest.start_digest(tmp_path)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


def test_a_part_of_the_layers_reads_only_its_own_tensors(folder):
    checkpoint = Checkpoint.open(folder)
    read = []

    class Watched:
        def read(self, name):
            read.append(name)
            return checkpoint.read(name)

    DenseShard(checkpoint.config, Watched(), CpuKernels(torch.float32), ShardPlacement(layers=range(1, 3), capacity=64))
    assert sorted(read) == sorted(checkpoint.config.tensors(range(1, 3)))
    assert "model.embed_tokens.weight" not in read


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), 0, -1.0, True, "1e6"])
def test_absurd_numbers_in_a_configuration_are_one_line(folder, value):
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("rope_parameters", None)
    with pytest.raises(CheckpointError, match="rope_theta") as raised:
        parse({**raw, "rope_theta": value})
    assert len(str(raised.value)) < 120
