"""Models of every family in GGUF files: as the package unpacks them, transformers says the same tokens."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf
from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.gguf.metadata import derive_model_name, shorten_float
from adapters.checkpoint.gguf.types import PACKINGS
from adapters.checkpoint.text_files import read_text_files
from adapters.models import ARCHITECTURES
from adapters.models.decoder.config.rope import Divided
from adapters.models.drafts.mtp.checkpoint import HeadCheckpoint
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from gguf import GGMLQuantizationType as Kind
from tests.examples import count_examples
from tests.models.checkpoints import (
    EXPERTS,
    GLM,
    GLM_GROUPS,
    LATENT,
    LATENT_GROUPS,
    LLAMA3,
    MINIMAX,
    MINISTRAL,
    VARIANTS,
    YARN,
    partial,
    rope,
    save_model,
    shard_of,
    tokens_of,
)
from tests.models.draft_models import save_own_head
from tests.models.gguf.test_gguf_reader import listed, made, tensor, text
from tests.models.ggufs import NAMES, packed, random_blocks, write_gguf
from tests.models.hybrids import HYBRIDS, SPARSE, sizes
from tests.models.windowed import (
    BESIDE,
    FULL,
    GEMMA3,
    GEMMA4,
    GPT_OSS,
    KEYS_AS_VALUES,
    LAGUNA,
    LAGUNA_YARN,
    SLIDING,
    WINDOWED,
)
from tests.pairs import one_in

ALL = {name: how for name, how in VARIANTS.items() if "qwen3_moe" not in name}  # what files have of experts is less
ALL.pop("mistral")  # its files say that they are Llama's
ALL |= {name: ("qwen3_5_text", settings) for name, settings in HYBRIDS.items()}
# Files of Gemma 3 do not say how queries are scaled.
ALL |= {name: how for name, how in WINDOWED.items() if "odd scale" not in name}
ALL = {name: how for name, how in ALL.items() if how[0] in NAMES or how[0].startswith("qwen")}
ALL |= {"qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}), "qwen3_5_moe": SPARSE["qwen3_5_moe"]}
ALL["qwen3_next"] = ("qwen3_next", {**SPARSE["qwen3_next"][1], "norm_topk_prob": True, "mlp_only_layers": []})
# Files have one weight of YaRN's logarithm, neighbours together, and dense layers first.
SAME_WEIGHTS = rope("yarn", **YARN, mscale=0.9, mscale_all_dim=0.9)
for variant in ("deepseek_v2, groups, yarn", "deepseek_v3, groups, yarn"):
    ALL[variant] = (ALL[variant][0], {**ALL[variant][1], **SAME_WEIGHTS})
del ALL["deepseek_v3, neighbours apart, tied"]
DENSE_FIRST = {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
ALL["laguna, mqa, yarn, wide gates"] = ("laguna", {**LAGUNA_YARN, **DENSE_FIRST})
# Rows of whole blocks of 256, and value heads of whole blocks of 32, since those change places among columns
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
WIDE_FAMILIES: dict[str, dict[str, object]] = {
    "llama": {**WIDE, **rope("llama3", **LLAMA3), "tie_word_embeddings": True},
    "qwen2": WIDE,
    "qwen3": WIDE,
    "qwen3_moe": {**WIDE, **EXPERTS, "norm_topk_prob": True, "moe_intermediate_size": 64},
    "ministral3": {**WIDE, **MINISTRAL},
    "seed_oss": {**WIDE, "attention_bias": True},
    "glm4_moe": {**WIDE, **GLM, **GLM_GROUPS, **partial(0.5), "moe_intermediate_size": 64, "first_k_dense_replace": 1},
    "minimax_m2": {**WIDE, **MINIMAX, **partial(0.5), "intermediate_size": 64},
    "gemma3_text": {**WIDE, **GEMMA3, "layer_types": [SLIDING, FULL], "query_pre_attn_scalar": 64},
    "gemma4_text": {
        **(WIDE | GEMMA4 | KEYS_AS_VALUES | BESIDE),
        "moe_intermediate_size": 64,
        "head_dim": 64,
        "global_head_dim": 128,
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
    },
    "gpt_oss": {**WIDE, **GPT_OSS, "intermediate_size": 64, "layer_types": [SLIDING, FULL]},
    "qwen3_5_text": {**WIDE, **sizes((4, 2, 64), (2, 4, 32, 64), 4)},
    "qwen3_5_moe_text": {
        **WIDE,
        **sizes((4, 2, 64), (2, 4, 32, 64), 4),
        **EXPERTS,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 32,
    },
}
BLOCKS = {"kv_lora_rank": 64, "q_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
# transformers calls the rotated part of these models their head.
COMPRESSED = {**WIDE, **LATENT, **BLOCKS, "head_dim": 32}
WIDE_FAMILIES |= {
    "deepseek_v2": {**COMPRESSED, "moe_intermediate_size": 64},
    "deepseek_v3": {**COMPRESSED, **LATENT_GROUPS, **BLOCKS, **SAME_WEIGHTS, "moe_intermediate_size": 64},
    "laguna": {
        **WIDE,
        **LAGUNA,
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
        "num_attention_heads_per_layer": [4, 2],
        "mlp_layer_types": ["dense", "sparse"],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 32,
    },
}
WIDE_FAMILIES["qwen3_next"] = WIDE_FAMILIES["qwen3_5_moe_text"] | {"norm_topk_prob": True}


def greedy(path: Path, prompt: torch.Tensor, count: int) -> list[int]:
    shard = shard_of(path)
    sequence = prompt.tolist()
    shard.forward(Step((Segment(0, 0, len(prompt) - 1),), 64, rows_only=True), prompt[:-1])
    for _ in range(count):
        step = Step((Segment(0, len(sequence) - 1, 1),), 4)
        forward = shard.forward(step, torch.tensor(sequence[-1:]))
        logits = shard.logits(step, forward.hidden)[0].clone()
        shard.commit(step, [1])
        sequence.append(int(logits.argmax()))
    return sequence


def told(oracle: Any, prompt: torch.Tensor, count: int) -> list[int]:
    with torch.no_grad():
        how: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        return oracle.generate(prompt[None], **how)[0].tolist()


@pytest.mark.parametrize("variant", ALL)
def test_unpacked_files_hold_what_the_folder_does(variant: str, tmp_path: Path) -> None:
    model_type, how = ALL[variant]
    save_model(tmp_path / "m", model_type, **how)
    folder = Checkpoint.open(tmp_path / "m")
    file = Checkpoint.open(write_gguf(tmp_path / "m.gguf", tmp_path / "m"))
    if isinstance(getattr(file.config, "rope_scaling", None), Divided):
        frequencies = (each.config.rotary.frequencies()[0] for each in (folder, file))
        torch.testing.assert_close(*frequencies, rtol=1e-6, atol=0)
        assert evolve(file.config, rope_scaling=folder.config.rope_scaling) == folder.config
    else:
        assert file.config == folder.config
    assert file.tensors.keys() == {*folder.config.tensors()}
    for name, entry in file.tensors.items():
        ours, published = entry.read(name), folder.read(name)
        assert ours.shape == entry.shape == published.shape
        if name.endswith("A_log"):
            torch.testing.assert_close(ours.exp(), published.exp(), rtol=3e-7, atol=0)
        elif (
            "norm" in name and model_type.startswith(("qwen3_5", "qwen3_next", "gemma3")) and "linear_attn" not in name
        ):
            assert torch.equal(ours + 1, published + 1), name
        else:
            assert torch.equal(ours, published), name


KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0)
# Two families have every type. Of the others one packed type each is enough, in turn: what files say when unpacked is
# compared for every variant.
EVERY_KIND = ("llama", "qwen3_moe")
GREEDY = [
    pytest.param(
        family,
        kind,
        marks=() if family in EVERY_KIND or kind == KINDS[3 + number % 2] else pytest.mark.long,
    )
    for number, family in enumerate(WIDE_FAMILIES)
    for kind in KINDS
]


def list_stored_parts(family: str, name: str, weight: torch.Tensor, config: Any) -> list[torch.Tensor]:
    """Views of a weight, each with the rows that a file has: numbers of one row are packed together."""
    if name.endswith("kv_b_proj.weight"):
        sizes = [config.qk_nope_head_dim, config.v_head_dim]
        keys, values = weight.view(-1, sum(sizes), config.kv_lora_rank).split(sizes, 1)
        return [keys.mT, values]
    return [weight.mT if family == "gpt_oss" and ".experts." in name else weight]


# Values of every family and of every packing are compared below and in test_gguf_reader.py.
@one_in(3, "family")
@pytest.mark.parametrize(("family", "kind"), GREEDY)
def test_greedy_tokens_are_those_of_transformers_on_the_unpacked_weights(
    family: str, kind: Kind, tmp_path: Path
) -> None:
    oracle: Any = save_model(tmp_path / "m", family, **WIDE_FAMILIES[family])
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "m", kind)
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            for rows in list_stored_parts(family, name, weight, oracle.config):
                data, stored = packed(name, np.ascontiguousarray(rows.numpy()), kind)
                rows.copy_(torch.from_numpy(gguf.dequantize(data, stored).copy()))
    assert greedy(path, tokens_of(40), 16) == told(oracle, tokens_of(40), 16)


@one_in(3, "kind")
@pytest.mark.parametrize("kind", [Kind(number) for number in PACKINGS if number > 10 and number != Kind.IQ1_M])
def test_greedy_tokens_of_types_that_only_llama_cpp_makes(kind: Kind, tmp_path: Path) -> None:
    """Their blocks are random; of Qwen3, whose tensors are stored as published."""
    oracle: Any = save_model(tmp_path / "m", "qwen3", **WIDE)
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "m", kind, pack=random_blocks)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            found = stored[names.get_name(name, try_suffixes=(".weight",))]
            weight.copy_(torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy()))
            assert found.tensor_type == kind or weight.ndim == 1
    assert greedy(path, tokens_of(40), 16) == told(oracle, tokens_of(40), 16)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama, which the tests write in ways of their own."""
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, "llama", **WIDE)
    return folder


def test_packed_weights_are_computed_in_what_is_asked_for(small: Path, tmp_path: Path) -> None:
    file = Checkpoint.open(write_gguf(tmp_path / "m.gguf", small, Kind.Q8_0))
    assert resolve_dtype("auto", file) == torch.bfloat16
    name = "model.layers.0.self_attn.q_proj.weight"
    exact, rounded = file.read(name), file.with_dtype(torch.bfloat16).read(name)
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(rounded, exact.bfloat16())
    norm = file.with_dtype(torch.bfloat16).read("model.norm.weight")
    assert norm.dtype == torch.float32, "what is not packed is read as it is stored"
    for kind, dtype in {Kind.F16: torch.bfloat16, Kind.BF16: torch.bfloat16, Kind.F32: torch.float32}.items():
        plain = Checkpoint.open(write_gguf(tmp_path / f"{kind.name}.gguf", small, kind))
        assert resolve_dtype("auto", plain) == dtype


def test_an_identity_is_of_the_content(small: Path, tmp_path: Path) -> None:
    kinds = (Kind.F16, Kind.Q8_0, Kind.Q4_0)
    files = [write_gguf(tmp_path / f"{kind.name}.gguf", small, kind) for kind in kinds]
    digests = [Checkpoint.open(file).digest() for file in files]
    assert len({*digests}) == 3
    assert digests[0] == Checkpoint.open(files[0].rename(tmp_path / "other.gguf")).digest()
    data = bytearray(files[1].read_bytes())
    data[-40] ^= 1
    files[1].write_bytes(data)
    assert Checkpoint.open(files[1]).digest() not in digests


def test_a_prediction_head_is_the_layer_behind_the_last(tmp_path: Path) -> None:
    folder = Checkpoint.open(demo.FOLDERS["demo-hybrid"])
    file = Checkpoint.open(write_gguf(tmp_path / "m.gguf", folder.folder, Kind.BF16))
    ours, theirs = HeadCheckpoint.open(file), HeadCheckpoint.open(folder)
    assert ours.config == theirs.config
    for name in theirs.tensors:
        assert torch.equal(ours.read(name).float() + 1, theirs.read(name).float() + 1), name
    plain = write_gguf(tmp_path / "plain.gguf", demo.FOLDER, Kind.BF16)
    with pytest.raises(CheckpointError, match="have no prediction head"):
        HeadCheckpoint.open(Checkpoint.open(plain))


# Files that were split


@pytest.fixture
def parts(small: Path, tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "m.gguf", small, Kind.Q8_0, split=8)
    found = sorted(tmp_path.glob("m-*.gguf"))
    assert len(found) == 3
    return found


def test_a_model_in_several_files_is_one(small: Path, parts: list[Path], tmp_path: Path) -> None:
    whole, split = Checkpoint.open(write_gguf(tmp_path / "whole.gguf", small, Kind.Q8_0)), Checkpoint.open(parts[0])
    assert split.config == whole.config
    assert split.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(split.read(name), whole.read(name)) for name in whole.tensors)
    assert {entry.file for entry in split.tensors.values()} == {*parts}
    assert derive_model_name(parts[0]) == "m"
    assert derive_model_name(tmp_path / "a.b.gguf") == "a.b"


def test_parts_that_do_not_belong_together_are_refused(parts: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"not the first of 3 files; accepted: m-00001-of-00003\.gguf"):
        Checkpoint.open(parts[1])
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: not part 2 of 3"):
        Checkpoint.open(parts[0])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf is missing"):
        Checkpoint.open(parts[0])
    parts[1].write_bytes(second)
    other = parts[0].rename(parts[0].with_name("other.gguf"))
    with pytest.raises(CheckpointError, match="one of 3 files, but its name does not end in -00001-of-00003"):
        Checkpoint.open(other)


# What is refused


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as found:
        Checkpoint.open(path)
    line = str(found.value)
    assert line.startswith(str(path))
    assert "\n" not in line
    return line


FIELDS: dict[str, tuple[dict[str, object], str]] = {
    "experts": ({"ARCH.expert_count": 8}, "llama.expert_count 8 is not supported; accepted: 0"),
    "a window": ({"ARCH.attention.sliding_window": 4096}, "llama.attention.sliding_window 4096 is not supported"),
    "not causal": ({"ARCH.attention.causal": False}, "llama.attention.causal False is not supported; accepted: True"),
    "no layers": ({"ARCH.block_count": None}, "llama.block_count is missing"),
    "layers by name": ({"ARCH.block_count": "two"}, "llama.block_count is 'two', which is no number"),
    "layers that differ": ({"ARCH.attention.head_count_kv": [1, 2]}, "llama.attention.head_count_kv is a list"),
    "too many layers": ({"ARCH.block_count": 1 << 30}, "num_hidden_layers 1073741824 is not an integer in 1..512"),
    "a layer more": ({"ARCH.block_count": 3}, "tensor blk.2.attn_norm.weight is missing"),
    "a layer less": ({"ARCH.block_count": 1}, "tensor blk.1.attn_norm.weight is not part of a 1-layer llama"),
    "values of their own": ({"ARCH.attention.value_length": 32}, "llama.attention.value_length 32 is not supported"),
    "part of a head": ({"ARCH.rope.dimension_count": 32}, "llama.rope.dimension_count 32 is not supported"),
    "no epsilon": ({"ARCH.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    "wider": (
        {"ARCH.feed_forward_length": 1024},
        "blk.0.ffn_gate.weight has shape [512, 256]; accepted here: [1024, 256]",
    ),
    "longrope": ({"ARCH.rope.scaling.type": "longrope"}, "rope type 'longrope' is not supported; accepted: 'default'"),
    "an odd yarn": (
        {"ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.factor": 4.0, "ARCH.rope.scaling.yarn_ext_factor": 0.5},
        "llama.rope.scaling.yarn_ext_factor 0.5 is not supported; accepted: 1",
    ),
    "no heads": ({"ARCH.attention.head_count": 0}, "num_attention_heads 0 is not an integer"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_wrong_metadata_are_told_with_their_names(case: str, small: Path, tmp_path: Path) -> None:
    fields, message = FIELDS[case]
    assert message in refusal(write_gguf(tmp_path / "m.gguf", small, **fields))


def test_other_architectures_are_refused_by_name(small: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", small)
    path.write_bytes(path.read_bytes().replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"gemma", 1))
    expected = f"general.architecture 'gemma' is not supported; accepted: {', '.join(map(repr, ARCHITECTURES))}"
    assert expected in refusal(path)
    path.write_bytes(path.read_bytes().replace(b"gemma", b"mimo2", 1))
    assert "general.architecture 'mimo2' needs values of another size than keys, which" in refusal(path)


def test_files_of_mimo_are_those_of_qwen2_and_have_no_head(tmp_path: Path) -> None:
    """llama.cpp has no architecture of that name. What converts these models calls them Qwen2 and drops the head."""
    model_type, how = VARIANTS["mimo"]
    save_model(tmp_path / "m", model_type, **how)
    save_own_head(tmp_path / "m", model_type, dict(how))
    file = Checkpoint.open(write_gguf(tmp_path / "m.gguf", tmp_path / "m"))
    assert file.family.model_type == "qwen2"
    with pytest.raises(CheckpointError, match="models of type 'qwen2' have no prediction head"):
        HeadCheckpoint.open(file)


def test_what_qwen_needs_is_told(tmp_path: Path) -> None:
    save_model(tmp_path / "m", "qwen3", **WIDE)
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "m", **{"ARCH.rope.freq_base": None})
    assert "qwen3.rope.freq_base is missing" in refusal(path)
    scaled = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "m", **scaled)
    expected = "its metadata, as config.json would have them: rope type 'linear' is not supported; accepted: 'default'"
    assert expected in refusal(path)


def test_types_that_are_not_served_are_refused_by_name(small: Path, tmp_path: Path) -> None:
    def other(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
        return (
            (gguf.quantize(data, Kind.TQ2_0), Kind.TQ2_0) if name == "blk.1.ffn_up.weight" else packed(name, data, kind)
        )

    path = write_gguf(tmp_path / "m.gguf", small, pack=other)
    assert "tensor blk.1.ffn_up.weight has type TQ2_0; accepted: F32, F16, BF16, Q8_0" in refusal(path)


def test_frequencies_have_to_be_positive_and_alone(tmp_path: Path) -> None:
    save_model(tmp_path / "m", "llama", **WIDE, **rope("llama3", **LLAMA3))
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "m")
    found = Checkpoint.open(path).config.rope_scaling  # type: ignore[attr-defined]
    assert isinstance(found, Divided)
    assert 1.0 == found.factors[0] < found.factors[-1] == pytest.approx(LLAMA3["factor"])
    scaled = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0}
    assert "with another scaling" in refusal(write_gguf(tmp_path / "two.gguf", tmp_path / "m", **scaled))
    data = path.read_bytes().replace(np.array(found.factors, np.float32).tobytes(), bytes(4 * len(found.factors)))
    path.write_bytes(data)
    assert "rope_freqs.weight has numbers that are not positive" in refusal(path)


ANYTHING = st.one_of(
    st.integers(-(1 << 31), (1 << 31) - 1).map(lambda value: struct.pack("<Ii", 5, value)),
    st.integers(0, (1 << 64) - 1).map(lambda value: struct.pack("<IQ", 10, value)),
    st.floats().map(lambda value: struct.pack("<Id", 12, value)),
    st.sampled_from([0, 1, 2, 64, 128, 512]).map(lambda value: struct.pack("<II", 4, value)),
    st.booleans().map(lambda value: struct.pack("<IB", 7, value)),
    st.sampled_from([b"yarn", b"linear", b"none", b""]).map(lambda value: struct.pack("<I", 8) + text(value)),
    st.integers(0, 3).map(lambda count: listed(4, count, bytes(4 * count))),
)
NAMES = [
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "nextn_predict_layers"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scale_linear", "expert_count"),
    *("expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_gating_func"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "attention.key_length_swa"),
    *("attention.shared_kv_layers", "embedding_length_per_layer_input"),
    *("ssm.conv_kernel", "ssm.group_count", "ssm.state_size", "ssm.time_step_rank", "ssm.inner_size"),
]
SPLIT = ["split.count", "split.no", "general.alignment", "tokenizer.ggml.model"]


@settings(max_examples=count_examples(200), deadline=None)
@given(
    st.sampled_from([*ARCHITECTURES]),
    st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, ANYTHING)),
    st.fixed_dictionaries({}, optional=dict.fromkeys(SPLIT, ANYTHING)),
    st.lists(st.tuples(st.integers(0, 100), ANYTHING), max_size=2),
)
def test_whatever_metadata_say_they_are_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
    own: dict[str, bytes],
    shared: dict[str, bytes],
    more: list[tuple[int, bytes]],
) -> None:
    """There are no layers in the file, so nothing can be right."""
    sane = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
    sane |= {"attention.head_count": 4, "rope.dimension_count": 8, "ssm.conv_kernel": 4, "ssm.group_count": 2}
    sane |= {"ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.inner_size": 64}
    values = {name: struct.pack("<II", 4, value) for name, value in sane.items()}
    values |= dict.fromkeys(("attention.layer_norm_rms_epsilon", "rope.freq_base"), struct.pack("<If", 6, 1e-5))
    values |= own
    fields = [text(b"general.architecture") + struct.pack("<I", 8) + text(architecture.encode())]
    fields += [text(f"{architecture}.{name}".encode()) + value for name, value in values.items()]
    fields += [text(name.encode()) + value for name, value in shared.items()]
    fields += [text(f"x{number}.{at}".encode()) + value for at, (number, value) in enumerate(more)]
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(made(fields, [tensor(b"token_embd.weight", (32, 160))], room=1 << 18))
    refusal(path)
    with pytest.raises(CheckpointError):
        read_text_files(path)


@pytest.mark.parametrize("value", [1e-6, 1e-5, 0.7, 0.95, 10000.0, 1e6, 5e6, 8.0, 1 / 3])
def test_decimals_are_found_again(value: float) -> None:
    stored = struct.unpack("<f", struct.pack("<f", value))[0]
    assert struct.pack("<f", shorten_float(stored)) == struct.pack("<f", value)
    assert shorten_float(stored) == value or value == 1 / 3
