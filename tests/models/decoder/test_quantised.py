"""Folders with packed weights: read as their formats say, served as transformers serves what they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.packed_matrix import decode_e4m3
from adapters.checkpoint.quantised.quantisation_config import find_quantisation
from adapters.models.drafts.mtp.checkpoint import HeadCheckpoint
from adapters.models.families import minimax_m2
from adapters.models.open_checkpoint import Checkpoint
from tests.examples import count_examples
from tests.models.checkpoints import save_model, tokens_of
from tests.models.gguf.test_gguf_models import WIDE_FAMILIES, greedy, told
from tests.models.quantised import E4M3, FORMATS, blocks, quantise, words
from tests.pairs import one_in, take_turns

UP = "model.layers.1.mlp.up_proj.weight"
# Neither blocks of 128 nor words fill the matrices of all of them; a group is 32 columns everywhere
SHAPES = {name: {**how, "intermediate_size": 320} for name, how in WIDE_FAMILIES.items()}
SERVED = take_turns([*SHAPES], ("fp8", "awq"))
OTHER_FORMATS = ("gptq, by activation", "w4a16, zero points", "w8a16")
SERVED += [pytest.param(("qwen3", name), id=f"qwen3-{name}") for name in OTHER_FORMATS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    found = dict[str, tuple[Path, Any]]()
    for family, how in SHAPES.items():
        folder = tmp_path_factory.mktemp(family)
        found[family] = folder, save_model(folder, family, **how)
    return found


PACKED = ("fp8", "awq", "gptq", "gptq, by activation", "w4a16")


@pytest.fixture(scope="module")
def packed(models: dict[str, tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A llama in some of the formats, which tests copy."""
    found = {name: tmp_path_factory.mktemp("packed") / "m" for name in PACKED}
    for name, folder in found.items():
        quantise(models["llama"][0], folder, name)
    return found


def copied(folder: Path, beside: Path) -> Path:
    shutil.copytree(folder, beside / "m")
    return beside / "m"


def edit(folder: Path, **changes: Tensor | None) -> None:
    """None: without it."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")


def configure(folder: Path, **changes: Any) -> None:
    about = json.loads((folder / "config.json").read_text())
    about["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(about))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@one_in(2, "name")
@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_stand_for_what_their_format_says(name: str, models: dict[str, Any], tmp_path: Path) -> None:
    values = quantise(models["qwen3"][0], tmp_path / "m", name)
    found = Checkpoint.open(tmp_path / "m")
    assert found.tensors.keys() == {*found.config.tensors()}
    for tensor, expected in values.items():
        assert torch.equal(found.read(tensor), expected), tensor
        entry = found.with_dtype(torch.bfloat16).tensors[tensor]
        rounded = expected if entry.packing_name == "" else expected.bfloat16()
        assert torch.equal(entry.read(tensor), rounded), tensor
    assert len(found.packing_names) == 1
    assert 4 < found.stored_bits < 32


def of_all_experts(values: dict[str, Tensor], name: str, count: int) -> Tensor:
    """Return the weights of all experts as the oracle has them: one tensor for all, both gates one after the other."""
    module, _, part = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return torch.stack(
        [torch.cat([values[f"{module}.{expert}.{one}.weight"] for one in parts]) for expert in range(count)]
    )


def find_laguna_name(published: str, config: object) -> str:
    """Return the name that the oracle has for a published tensor."""
    return published.replace(".mlp.experts.e_score", ".mlp.gate.e_score").replace(".shared_expert.", ".shared_experts.")


NAMES_OF_ORACLE = {"minimax_m2": minimax_m2.find_name, "laguna": find_laguna_name}


# What each format stands for is compared number by number below.
@one_in(2, "served")
@pytest.mark.parametrize("served", SERVED)
def test_greedy_tokens_are_those_of_transformers_on_the_unpacked_weights(
    served: tuple[str, str], models: dict[str, Any], tmp_path: Path
) -> None:
    family, name = served
    folder, oracle = models[family]
    values = quantise(folder, tmp_path / "m", name)
    if family in NAMES_OF_ORACLE:
        values = {NAMES_OF_ORACLE[family](tensor, oracle.config): value for tensor, value in values.items()}
    with torch.no_grad():
        for tensor, weight in oracle.named_parameters():
            weight.copy_(values[tensor] if tensor in values else of_all_experts(values, tensor, len(weight)))
    assert greedy(tmp_path / "m", tokens_of(40), 16) == told(oracle, tokens_of(40), 16)


@pytest.mark.parametrize("name", ["awq", "w4a16"])
def test_experts_of_gemma_4_may_be_packed_one_by_one(name: str, models: dict[str, Any], tmp_path: Path) -> None:
    """So llm-compressor and AutoAWQ write them; unpacked ones are in one tensor for all."""
    folder = copied(models["gemma4_text"][0], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for stacked in [name for name in tensors if ".experts." in name]:
        module, _, part = stacked.rpartition(".")
        for number, weight in enumerate(tensors.pop(stacked)):
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
            for own, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                tensors[f"{module}.{number}.{own}.weight"] = rows.contiguous()
    save_file(tensors, folder / "model.safetensors")
    values = quantise(folder, tmp_path / "packed", name)
    found = Checkpoint.open(tmp_path / "packed")
    for tensor, expected in values.items():
        assert torch.equal(
            found.read(tensor.replace(".experts.", ".mlp.experts.").replace("router.proj", "mlp.gate")), expected
        )


IN_TURN = ("awq", "gptq", "gptq, symmetric", "gptq, second format", "gptq, 8 bits", "w4a16", "w8a16, groups")


@pytest.mark.parametrize("name", IN_TURN)
def test_matrices_whose_groups_are_neighbours_stay_packed(name: str, models: dict[str, Any], tmp_path: Path) -> None:
    """GPTQ folders name the group of each column, whether or not columns were reordered."""
    quantise(models["llama"][0], tmp_path / "m", name)
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert UP in checkpoint.layouts
    assert torch.equal(checkpoint.read_packed(UP).unpack(torch.float32), checkpoint.read(UP).float())


@pytest.mark.parametrize("name", ["gptq", "gptq, by activation"])
def test_matrices_with_reordered_columns_are_unpacked(name: str, packed: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(packed[name], tmp_path)
    assert (UP in Checkpoint.open(folder).layouts) == (name == "gptq")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    index = UP.replace("weight", "g_idx")
    tensors[index] = tensors[index].flip(0).contiguous()
    save_file(tensors, file)
    assert UP not in Checkpoint.open(folder).layouts


def test_blocks_of_fp8_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # noqa: PLC0415

    weight = torch.randn(256, 384) * torch.rand(256, 1)
    parts, expected = blocks(weight, 128, 128)
    oracle = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)  # noqa: SLF001
    assert torch.equal(expected, oracle)


def test_every_e4m3_is_its_number() -> None:
    data = torch.arange(256, dtype=torch.uint8)
    numbers = data & 127 != 127
    assert torch.equal(decode_e4m3(data)[numbers].double(), torch.from_numpy(E4M3)[numbers])
    assert torch.equal(decode_e4m3(data)[numbers], data.view(torch.float8_e4m3fn).float()[numbers])


def test_a_bias_of_zeros_beside_a_packed_matrix_is_none(models: dict[str, Any], tmp_path: Path) -> None:
    quantise(models["llama"][0], tmp_path / "m", "gptq")
    edit(tmp_path / "m", **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(256)})
    assert Checkpoint.open(tmp_path / "m").packing_names == ("gptq int4, groups of 32",)
    edit(tmp_path / "m", **{"model.layers.0.self_attn.q_proj.bias": torch.eye(256)[0]})
    assert "q_proj.bias is not part of a 2-layer llama" in refusal(tmp_path / "m")


def test_parts_may_lie_in_different_files(models: dict[str, Any], tmp_path: Path) -> None:
    values = quantise(models["llama"][0], tmp_path / "m", "gptq")
    one = Checkpoint.open(tmp_path / "m").digest()
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "model.safetensors").unlink()
    files = {name: "scales.safetensors" if name.endswith("scales") else "others.safetensors" for name in tensors}
    for file in {*files.values()}:
        save_file({name: one for name, one in tensors.items() if files[name] == file}, tmp_path / "m" / file)
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    found = Checkpoint.open(tmp_path / "m")
    assert torch.equal(found.read(UP), values[UP])
    assert found.digest() != one, "files are part of it"
    other = found.digest()
    tensors = load_file(tmp_path / "m" / "scales.safetensors")
    tensors[UP.replace("weight", "scales")][0, 0] *= 2
    save_file(tensors, tmp_path / "m" / "scales.safetensors")
    assert Checkpoint.open(tmp_path / "m").digest() != other, "and so is what lies next to the main tensor"


def test_the_same_bytes_read_otherwise_are_another_model(models: dict[str, Any], tmp_path: Path) -> None:
    quantise(models["llama"][0], tmp_path / "m", "gptq")
    first = Checkpoint.open(tmp_path / "m")
    configure(tmp_path / "m", checkpoint_format="gptq_v2")
    second = Checkpoint.open(tmp_path / "m")
    assert not torch.equal(first.read(UP), second.read(UP))
    assert first.digest() != second.digest()


def test_published_hybrids_are_unpacked_with_their_prediction_head(tmp_path: Path) -> None:
    def prefixed(name: str) -> str:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    values = quantise(demo.FOLDERS["demo-hybrid"], tmp_path / "m", "fp8", prefixed)
    found = Checkpoint.open(tmp_path / "m")
    head = HeadCheckpoint.open(found)
    assert head.has_tensor("mtp.layers.0.mlp.up_proj.weight")
    for name in found.tensors:
        assert torch.equal(found.read(name), values[prefixed(name)]), name
    for name in head.tensors:
        assert torch.equal(head.read(name), values[name]), name
    assert head.tensors["mtp.layers.0.mlp.up_proj.weight"].packing_name == "fp8, scales of 128x128"


# What is refused

CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another method": (
        "awq",
        {"quant_method": "bitsandbytes"},
        "quant_method 'bitsandbytes' is not supported; accepted: 'fp8', 'awq', 'gptq', 'compressed-tensors', 'mxfp4', ",
    ),
    "hqq": ("awq", {"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
    "no method": ("awq", {"quant_method": None}, "quant_method None is not supported"),
    "a list for a method": ("awq", {"quant_method": ["awq"]}, "quant_method a JSON list is not supported"),
    "awq in 3 bits": ("awq", {"bits": 3}, "quantization_config.bits 3 is not supported; accepted: 4"),
    "awq gemv": ("awq", {"version": "gemv"}, "version 'gemv' is not supported; accepted: 'gemm'"),
    "awq without zeros": ("awq", {"zero_point": False}, "zero_point False is not supported; accepted: True"),
    "llm-awq": ("awq", {"backend": "llm-awq"}, "backend 'llm-awq' is not supported"),
    "gptq in 3 bits": ("gptq", {"bits": 3}, "bits 3 is not supported; accepted: 4, 8"),
    "gptq in marlin": ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    "no group": ("gptq", {"group_size": None}, "group_size None is not supported; accepted: -1, or an integer in 1.."),
    "a group of none": ("gptq", {"group_size": 0}, "group_size 0 is not supported"),
    "a huge group": ("gptq", {"group_size": 1 << 40}, "group_size 1099511627776 is not supported"),
    "a true group": ("gptq", {"group_size": True}, "group_size True is not supported"),
    "groups of 64": (
        "gptq",
        {"group_size": 64},
        "down_proj.qzeros has shape [10, 32]; accepted here: [5, 32] (gptq int4, groups of 64)",
    ),
    "groups of a row": (
        "awq",
        {"group_size": -1},
        "qzeros has shape [10, 32]; accepted here: [1, 32] (awq int4, groups of a row)",
    ),
    "e5m2": ("fp8", {"fmt": "e5m2"}, "fmt 'e5m2' is not supported; accepted: 'e4m3'"),
    "a flat block": ("fp8", {"weight_block_size": [128]}, "weight_block_size a JSON list is not supported"),
    "a block of none": ("fp8", {"weight_block_size": [0, 128]}, "accepted: two integers in 1..262144"),
    "other blocks": (
        "fp8",
        {"weight_block_size": [64, 64]},
        "weight_scale_inv has shape [2, 3]; accepted here: [4, 5] (fp8, scales of 64x64)",
    ),
    "no blocks": (
        "fp8",
        {"weight_block_size": None},
        "has shape [2, 3]; accepted here: [1, 1] or [1] or [] (fp8, one scale)",
    ),
    "packed all the same": (
        "fp8",
        {"modules_to_not_convert": ["model.layers.1.mlp.up_proj"]},
        "model.layers.1.mlp.up_proj is packed, and quantization_config says that it is not quantised",
    ),
    "ignored all the same": ("w4a16", {"ignore": ["model.layers.1.mlp.up_proj"]}, "up_proj is packed, and"),
    "names by number": ("fp8", {"modules_to_not_convert": [1]}, "null, or a list of up to 16384 names"),
    "another format": ("w4a16", {"format": "marlin-24"}, "format 'marlin-24' is not supported; accepted: 'pack-quan"),
    "nvfp4": ("w4a16", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
    "an order that is not given": ("gptq", {"desc_act": 1}, "desc_act 1 is not supported; accepted: False, True"),
    "rows in 8 bits": ("w4a16", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme a JSON object is not supp"),
    "rotated": ("w4a16", {"transform_config": {"config_groups": {}}}, "transform_config a JSON object is not"),
    "sparse": ("w4a16", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format 'sparse-24' is not"),
    "no groups": ("w4a16", {"config_groups": {}}, "config_groups has 0 entries; accepted: 1..64"),
    "a scheme by name": ("w4a16", {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 a JSON list is not"),
    "the other kind": ("w4a16", {"quant_method": "gptq"}, "bits is missing; accepted: 4, 8"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_other_quantisations_are_refused_by_name(case: str, packed: dict[str, Path], tmp_path: Path) -> None:
    name, changes, message = CONFIGS[case]
    folder = copied(packed[name], tmp_path)
    configure(folder, **changes)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 2}, "weights.num_bits 2 is not supported; accepted: 4, 8"),
        ({"type": "float"}, "weights.type 'float' is not supported; accepted: 'int'"),
        (
            {"strategy": "tensor_group"},
            "weights.strategy 'tensor_group' is not supported; accepted: 'group', 'channel'",
        ),
        ({"dynamic": True}, "weights.dynamic True is not supported; accepted: False"),
        ({"group_size": 128}, "weight_scale has shape [256, 10]; accepted here: [256, 3] (w4a16, groups of 128)"),
        ({"num_bits": 8}, "weight_scale has shape [256, 10]; accepted here: [256, 5] (w8a16, groups of 32)"),
        ({"symmetric": False}, "weight_zero_point is missing"),
        ({"actorder": "group"}, "weight_g_idx is missing"),
        ({"actorder": "other"}, "weights.actorder 'other' is not supported; accepted: null, False, True, 'weight'"),
    ],
)
def test_other_groups_are_refused_by_name(
    changes: dict[str, Any], message: str, packed: dict[str, Path], tmp_path: Path
) -> None:
    folder = copied(packed["w4a16"], tmp_path)
    about = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    about["group_0"]["weights"] |= changes
    configure(folder, config_groups=about)
    assert message in refusal(folder)


def test_groups_that_differ_are_told_apart_by_what_is_stored(packed: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(packed["w4a16"], tmp_path)
    about = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    eight = {**about, "targets": ["re:.*mlp.*"], "weights": {**about["weights"], "num_bits": 8}}
    weight = Checkpoint.open(folder).read(UP)
    parts, expected = words(weight, bits=8)
    edit(folder, **{UP.replace("weight", part): data for part, data in parts.items()})
    configure(folder, config_groups={"group_0": about, "group_1": eight})
    found = Checkpoint.open(folder)
    assert torch.equal(found.read(UP), expected)
    assert found.packing_names == ("w4a16, groups of 32", "w8a16, groups of 32")
    other = {**about, "weights": {**about["weights"], "num_bits": 8, "group_size": 16}}
    configure(folder, config_groups={"group_0": about, "group_1": other})
    assert "can be read as w4a16, groups of 32 and as w8a16, groups of 16; accepted: one way" in refusal(folder)


UP_PARTS = "model.layers.1.mlp.up_proj."
TENSORS: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "no scales": ("awq", {"scales": None}, "tensor model.layers.1.mlp.up_proj.scales is missing (awq int4, groups"),
    "no words": ("awq", {"qweight": None}, "up_proj.qzeros has dtype I32; accepted: F32, BF16, F16, or all parts of"),
    "words of floats": ("awq", {"qweight": torch.ones(256, 40)}, "qweight has dtype F32; accepted here: I32"),
    "a flat matrix": (
        "awq",
        {"qweight": torch.ones(64, dtype=torch.int32)},
        "qweight has shape [64]; accepted here: two dimensions",
    ),
    "no rows": (
        "awq",
        {"qweight": torch.ones(0, 4, dtype=torch.int32)},
        "qweight has shape [0, 4]; accepted here: two dimensions",
    ),
    "scales too many": (
        "awq",
        {"scales": torch.ones(9, 320)},
        "scales has shape [9, 320]; accepted here: [8, 320]",
    ),
    "a whole matrix smaller": (
        "awq",
        {
            "qweight": torch.ones(128, 40, dtype=torch.int32),
            "qzeros": torch.ones(4, 40, dtype=torch.int32),
            "scales": torch.ones(4, 320),
        },
        "tensor model.layers.1.mlp.up_proj.weight has shape [320, 128]; accepted here: [320, 256]",
    ),
    "twice": ("awq", {"weight": torch.ones(320, 256)}, "up_proj.weight is there twice, packed and as it is"),
    "more than belongs to it": ("awq", {"extra": torch.ones(4)}, "up_proj.extra is not part of a 2-layer llama"),
    "an index too short": (
        "gptq",
        {"g_idx": torch.zeros(8, dtype=torch.int32)},
        "g_idx has shape [8]; accepted here: [256]",
    ),
    "no index": ("gptq, by activation", {"g_idx": None}, "up_proj.g_idx is missing (gptq int4, groups of 32)"),
    "fp8 without scales": ("fp8", {"weight_scale_inv": None}, "weight_scale_inv is missing (fp8, scales of 128x128)"),
    "integers for fp8": (
        "fp8",
        {"weight": torch.ones(320, 256, dtype=torch.int8)},
        "up_proj.weight has dtype I8; accepted: F32, BF16, F16, or all parts of a packed matrix (fp8",
    ),
    "fp8 in three dimensions": (
        "fp8",
        {"weight": torch.ones(2, 320, 256).to(torch.float8_e4m3fn)},
        "weight has shape [2, 320, 256]; accepted here: two dimensions",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_each_other_are_named(case: str, packed: dict[str, Path], tmp_path: Path) -> None:
    name, changes, message = TENSORS[case]
    folder = copied(packed[name], tmp_path)
    edit(folder, **{UP_PARTS + part: data for part, data in changes.items()})
    assert message in refusal(folder)


NUMBERS: dict[str, tuple[str, str, float, str]] = {
    "a group that is none": ("gptq", "g_idx", 8, r"up_proj: its groups of columns are 0\.\.8, of 8"),
    "a group below all": ("gptq", "g_idx", -1, r"up_proj: its groups of columns are -1\.\.7, of 8"),
    "a scale that is no number": ("awq", "scales", float("nan"), "up_proj.scales has values that are no numbers"),
    "an infinite scale": ("w4a16", "weight_scale", float("inf"), "up_proj.weight_scale has values that are no numb"),
    "an infinite scale of fp8": ("fp8", "weight_scale_inv", float("inf"), "weight_scale_inv has values that are no n"),
    "a huge scale": ("fp8", "weight_scale_inv", 3e38, "up_proj.weight has values that are no numbers, or infinite"),
    "a byte that is no number": ("fp8", "weight", float("nan"), "up_proj.weight has values that are no numbers"),
    "another shape": (
        "w4a16",
        "weight_shape",
        7,
        r"up_proj: weight_shape says \[7, 256\], and its words are \[320, 256",
    ),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_cannot_be_are_told_as_they_are_read(case: str, packed: dict[str, Path], tmp_path: Path) -> None:
    name, part, value, message = NUMBERS[case]
    folder = copied(packed[name], tmp_path)
    tensor = load_file(folder / "model.safetensors")[UP_PARTS + part]
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).view(-1)[5] = 127
    else:
        tensor.view(-1)[0] = value
    edit(folder, **{UP_PARTS + part: tensor})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder).read(UP)


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.floats(),
    st.sampled_from(["gptq", "gemm", "e4m3", "group", "int", "pack-quantized", "compressed", "re:(a+)+$", ""]),
    st.lists(st.one_of(st.integers(-1, 200), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.sampled_from(["weights", "group_0", "format"]), st.none() | st.integers(), max_size=2),
)
FIELDS = sorted(
    {*FORMATS["fp8"][0], *FORMATS["awq"][0], *FORMATS["gptq"][0], *FORMATS["w4a16"][0]} - {"quant_method"}
    | {"checkpoint_format", "modules_to_not_convert", "sparsity_config", "desc_act", "backend", "pack_dtype"}
)


@settings(max_examples=count_examples(100), deadline=None)
@given(st.sampled_from(["fp8", "awq", "gptq", "w4a16"]), st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=3))
def test_whatever_is_configured_is_read_or_refused_in_one_line(name: str, changes: dict[str, Any]) -> None:
    try:
        said = str(find_quantisation({"quantization_config": {**FORMATS[name][0], **changes}}))
    except CheckpointError as error:
        said = f"accepted: {error}"
    assert "\n" not in said
    assert said.startswith(
        ("accepted: config.json: quantization_config", "fp8", "awq", "gptq", "w4a16", "w8a16", "int8")
    )
    assert len(said) < 500
