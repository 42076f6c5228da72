"""Drafts of every kind for the demo models, for `benchmarks.exactness --draft KIND`.

No draft of these kinds is published for the demos. So they are made here, and some of their proposals are right:

* `dflash` is the demo's own draft, and random for the hybrid demo, which has none.
* `dflash2`, `dspark` and `gguf` have the weights of the demo's own DFlash draft. What DFlash 2 and DSpark add has small
  random weights, so it changes some proposals. For the hybrid demo all weights are random.
* `eagle3` has a layer of random weights, and a head that was fitted to it by least squares: from the layer's output for
  rows of prompts, it predicts the token that follows.

The same call always makes the same draft on one machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import torch
from attrs import evolve, frozen
from gguf import GGMLQuantizationType
from torch import Tensor

from adapters import demo
from adapters.device.speculation.drafting import Drafting
from adapters.models.decoder.config.rope import Rotary
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.eagle3.config import Eagle3Config
from adapters.models.open_checkpoint import Checkpoint
from benchmarks.subjects import NAMES, prompts
from effects.all import EffectRequest, Launch
from effects.ids import RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.prefill import OpenSlot, RunPrefill
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import build_options
from engine.settings.paths import find_model_folder
from tests.models.corrected_drafts import dflash2, dspark, tensors_of, write_draft_gguf
from tests.models.draft_models import FULL, Tensors, save_draft
from tests.models.eagle3_drafts import random_eagle3, save_eagle3

KINDS = ("dflash", "dflash2", "dspark", "gguf", "eagle3")
VOCABULARY = 4096
SMALL = 0.05  # of the random weights that are added to the demo's draft
FITTED_PROMPTS, FITTED_ROWS = 8, 600  # of each subject, and of each prompt
RIDGE = 1e-3  # of the mean square of a feature
SHARPNESS = 20  # what fitted scores of 0 to 1 are multiplied by, to become logits
LAYERS = {"demo": 10, "demo-hybrid": 8}


def save_demo_draft(kind: str, model: str, folder: Path) -> Path:
    """Write a draft of this kind for a demo model into `folder`, and return what `--draft` takes."""
    if kind == "eagle3":
        return anyio.run(save_fitted_eagle3, model, folder)
    if kind == "dflash" and model == "demo":
        return demo.FOLDER / "draft"
    parts = {"dflash2": dflash2(VOCABULARY), "dspark": dspark(VOCABULARY, from_anchor=False)}
    config, own = read_own_draft() if model == "demo" else (random_config(), Tensors())
    if kind in parts:
        config = evolve(config, parts=parts[kind])
    tensors = tensors_of(config)
    for name, tensor in tensors.items():
        if name in own:
            tensors[name] = own[name]
        elif own:
            tensors[name] = make_identity(tensor) if name.endswith("base_kernel") else tensor * SMALL
    if kind == "gguf":
        return write_draft_gguf(
            folder / "draft.gguf", config, tensors, GGMLQuantizationType.Q8_0, architecture="dflash-draft"
        )
    more = {"num_target_layers": LAYERS[model], "vocab_size": VOCABULARY}
    save_draft(folder / "draft", config, tensors, **more, **({"is_causal": False} if kind == "dflash2" else {}))
    return folder / "draft"


def read_own_draft() -> tuple[DFlashConfig, Tensors]:
    """Return the demo's own draft: its configuration and its weights."""
    found = DraftCheckpoint.open(demo.FOLDER / "draft", Checkpoint.open(demo.FOLDER).config)
    return found.config, Tensors({name: found.read(name).float() for name in found.tensors})


def random_config() -> DFlashConfig:
    """Return the configuration of a DFlash draft for the hybrid demo."""
    return DFlashConfig(160, 320, 2, 4, 2, 32, Rotary(32, 1e4), (FULL, FULL), (1, 4, 6), 8, 1)


def make_identity(kernel: Tensor) -> Tensor:
    """Return a convolution's base `[2, taps, D]` that leaves rows as they are."""
    found = torch.zeros_like(kernel)
    found[:, 0] = 1
    return found


# --- a fitted EAGLE-3 draft ---


@frozen(eq=False)
class FittedRows:
    """Rows of prompts: the layer's output `[N, D]`, and the token that follows each, int64 `[N]`."""

    features: Tensor
    followed_by: Tensor


async def save_fitted_eagle3(model: str, folder: Path) -> Path:
    """Write an EAGLE-3 draft whose head was fitted. Its logits are the layer's output while it is fitted."""
    shape = Checkpoint.open(find_model_folder(build_options(model=model).model)).config
    hidden = shape.hidden_size
    taps = (1, LAYERS[model] // 2, LAYERS[model] - 2)
    config = Eagle3Config(hidden, 2 * hidden, 4, 2, 32, Rotary(32, 1e4), taps, hidden, vocab=hidden, has_map=True)
    tensors = random_eagle3(config, vocab=VOCABULARY)
    tensors["fc.weight"] = torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], 1)  # the last tap alone
    tensors["d2t"] = torch.arange(hidden)
    tensors["lm_head.weight"] = torch.eye(hidden)
    with tempfile.TemporaryDirectory() as name:
        draft = save_eagle3(Path(name) / "draft", config, tensors, vocab=VOCABULARY)
        options = build_options(model=model, draft=str(draft), device="cpu", disk_prefix_cache="off", max_ctx=1024)
        target = await load_target(options)
        rows = await read_rows(target, hidden)
        await target.close()
    fitted = evolve(config, vocab=VOCABULARY, has_map=False)
    tensors.pop("d2t")
    tensors["lm_head.weight"] = fit_head(rows)
    return save_eagle3(folder / "draft", fitted, tensors, vocab=VOCABULARY)


async def read_rows(target: LoadedModel, hidden: int) -> FittedRows:
    """Compute prompts, and let the draft say its layer's output for each of their rows."""
    by_kind = prompts(list(NAMES), 2 * FITTED_PROMPTS, FITTED_ROWS)
    # The first half of the prompts is what exactness is measured with.
    texts = [prompt for kind in by_kind.values() for prompt in kind[FITTED_PROMPTS:]]
    found = [await read_text(target, number, text, hidden) for number, text in enumerate(texts, 1)]
    return FittedRows(torch.cat([one.features for one in found]), torch.cat([one.followed_by for one in found]))


async def read_text(target: LoadedModel, number: int, text: Tokens, hidden: int) -> FittedRows:
    request, slot = RequestId(number), SlotId(0)
    target.executor.open(request, OpenSlot(slot, slot, 0, text, Sampling()))
    for start in range(0, len(text) - 1, target.settings.chunk):
        stop = min(start + target.settings.chunk, len(text) - 1)
        await target.executor.perform(Launch((EffectRequest(request, RunPrefill(slot, start, stop)),)))
    features = list[Tensor]()

    def keep(parts: Sequence[Tensor]) -> list[list[int]]:
        features.extend(part[:, :hidden].clone() for part in parts)
        return [[0] * len(part) for part in parts]

    def propose() -> None:
        proposer = target.executor.decoding.proposer
        assert isinstance(proposer, Drafting)
        proposer.catch_up(slot)
        for position in range(2, len(text) - 1):
            proposer.draft.propose([BlockRequest(slot, 0, position, text[position], 1)], keep)

    await target.lane.run(propose)
    return FittedRows(torch.cat(features).float(), torch.tensor(text[3:]))


def fit_head(rows: FittedRows) -> Tensor:
    """Return a head `[V, D]` that predicts the tokens best by least squares."""
    features = rows.features.double()
    squares = features.T @ features
    squares += RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=torch.float64)
    sums = torch.zeros(VOCABULARY, features.shape[1], dtype=torch.float64)
    sums.index_add_(0, rows.followed_by, features)
    head: Tensor = torch.linalg.solve(squares, sums.T).T * SHARPNESS
    return head.float().contiguous()
