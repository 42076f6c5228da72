"""DFlash 2, DSpark, EAGLE-3 and GGUF drafts, random ones: the same tokens, logits and proposals cold, after a restart,
with the target split over processes, and with the draft in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from adapters.models.decoder.config.rope import Rotary
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.dflash.parts import PLAIN_PARTS, DraftParts
from adapters.models.drafts.eagle3.config import Eagle3Config, Eagle3Norms
from adapters.models.open_checkpoint import Checkpoint
from engine.loading.drafts.find_draft import open_draft
from engine.settings.options import build_options
from engine.settings.paths import find_model_folder
from engine.settings.user_error import UserError
from tests.e2e.test_split import compare
from tests.models.corrected_drafts import dflash2, dspark, tensors_of, write_draft_gguf
from tests.models.draft_models import FULL, save_draft, slides
from tests.models.eagle3_drafts import random_eagle3, save_eagle3, write_eagle3_gguf
from tests.models.ggufs import text

SIZES = {"demo": (320, 10), "demo-hybrid": (160, 8)}  # hidden sizes and layers
VOCAB = 4096
KINDS: dict[str, DraftParts] = {
    "DFlash 2": dflash2(VOCAB),
    "DSpark": dspark(VOCAB, has_confidence=True),
    "DSpark, recurrent": dspark(VOCAB, "rnn"),
    "GGUF": PLAIN_PARTS,
    "GGUF of DFlash 2": dflash2(VOCAB),
    "GGUF of DSpark": dspark(VOCAB, has_confidence=True),
}
STARTS = ("one", "processes", "one")
EAGLE3 = ("EAGLE-3", "EAGLE-3, own embedding, whole vocabulary", "GGUF of EAGLE-3")


def config_for(model: str, parts: DraftParts) -> DFlashConfig:
    hidden, layers = SIZES[model]
    masks = (slides(96, causal=parts.selector is None), FULL)
    taps = (1, layers // 2, layers - 2)
    block = 9 if parts.from_anchor else 8
    return DFlashConfig(hidden, 2 * hidden, 2, 4, 2, 32, Rotary(32, 1e4), masks, taps, block, 1, parts=parts)


def save(folder: Path, model: str, kind: str) -> Path:
    """A draft of this kind: a folder, or a file in llama.cpp's form, of plain DFlash in Lucebox's."""
    if kind in EAGLE3:
        return save_one_layer(folder, model, kind)
    config = config_for(model, KINDS[kind])
    tensors = tensors_of(config)
    if config.parts.markov is not None and config.parts.markov.has_confidence:
        tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"] * 0.2
        tensors["confidence_head.proj.bias"] = torch.tensor([2.0])  # some proposals are left out
    if kind.startswith("GGUF"):
        form = "dflash-draft" if kind == "GGUF" else "dflash"
        return write_draft_gguf(folder / "draft.gguf", config, tensors, Kind.Q8_0, architecture=form)
    causal = {} if config.parts.selector is None else {"is_causal": False}
    more = {"num_target_layers": SIZES[model][1], "vocab_size": VOCAB, "sliding_window": 96}
    save_draft(folder / "draft", config, tensors, **more, **causal)
    return folder / "draft"


def save_one_layer(folder: Path, model: str, kind: str) -> Path:
    """An EAGLE-3 draft, of a reduced vocabulary or of all tokens."""
    hidden, layers = SIZES[model]
    whole = "whole" in kind
    config = Eagle3Config(
        hidden,
        2 * hidden,
        4,
        2,
        32,
        Rotary(32, 1e4),
        (1, layers // 2, layers - 2),
        hidden,
        vocab=VOCAB if whole else 1000,
        has_map=not whole,
        has_embedding=whole,
        norms=Eagle3Norms(before_residual=whole),
    )
    tensors = random_eagle3(config, vocab=VOCAB)
    if kind.startswith("GGUF"):
        return write_eagle3_gguf(folder / "draft.gguf", config, tensors, vocab_size=VOCAB)
    return save_eagle3(folder / "draft", config, tensors, "speculators" if whole else "sglang", vocab=VOCAB)


async def check(
    model: str, kind: str, folder: Path, count: int, *, is_apart: bool, starts: Sequence[str] = STARTS
) -> None:
    """is_apart: the draft is in a process of its own, where penalties do not reach it, so it may propose otherwise."""
    draft = {"draft": str(save(folder, model, kind))}
    apart = {"draft_device": "ipc+cpu:0"} if is_apart else {}
    plans: dict[str, dict[str, Any]] = {
        "one": {"device": "cpu", **draft},
        "processes": {"target_devices": "cpu:0,ipc+cpu:0", **apart, **draft},
    }
    pairs = await compare(model, folder / "kv", count, 12, starts, plans=plans, steady=not is_apart)
    assert pairs == {(kept, now) for place, now in enumerate(starts) for kept in starts[:place]}


# By default `test_split.py` splits the hybrid with its draft, `test_remote_shard.py` the demo over processes, and
# `test_speculation.py` restores rows of drafts. `tests/models/drafts/test_corrected_drafts.py` has this kind.
@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_corrected_draft_is_restored_split_and_elsewhere(tmp_path: Path) -> None:
    await check("demo", "DSpark", tmp_path, 2, is_apart=False, starts=STARTS[:2])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*KINDS, *EAGLE3])
@pytest.mark.parametrize("is_apart", [False, True], ids=["here", "apart"])
@pytest.mark.parametrize("model", [*SIZES])
async def test_every_kind_is_restored_split_and_elsewhere(
    tmp_path: Path, model: str, kind: str, is_apart: bool
) -> None:
    await check(model, kind, tmp_path, 4, is_apart=is_apart)


@pytest.mark.parametrize("kind", [*EAGLE3])
def test_an_eagle3_draft_is_found_by_what_it_is(tmp_path: Path, kind: str) -> None:
    target = Checkpoint.open(find_model_folder(build_options(model="demo").model))
    path = save(tmp_path, "demo", kind)
    found = open_draft(str(path), target)
    assert found is not None
    assert isinstance(found.shape, Eagle3Config)
    assert found.shape.block == 8
    other = Checkpoint.open(find_model_folder(build_options(model="demo-hybrid").model))
    with pytest.raises(
        UserError, match=r"--draft .*target_hidden_size is 320, but the target has 160: a draft of another target"
    ):
        open_draft(str(path), other)


def test_a_gguf_draft_of_other_tokens_is_refused(tmp_path: Path) -> None:
    folder = find_model_folder(build_options(model="demo").model)
    target = Checkpoint.open(folder)
    config = config_for("demo", PLAIN_PARTS)
    fields = {name: value for name, value in text(folder, "smollm").items() if name == "tokenizer.ggml.tokens"}
    path = write_draft_gguf(tmp_path / "draft.gguf", config, tensors_of(config), **fields)
    found = open_draft(str(path), target)
    assert found is not None
    assert found.shape.block == 8
    tokens = [*fields["tokenizer.ggml.tokens"]]
    tokens[100:102] = reversed(tokens[100:102])
    write_draft_gguf(path, config, tensors_of(config), **{"tokenizer.ggml.tokens": tokens})
    with pytest.raises(UserError, match=r"token 100 is .* a draft of another target"):
        open_draft(str(path), target)
