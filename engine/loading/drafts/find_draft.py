"""Finds the draft that was asked for, whatever its kind is, and checks it against its target."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.safetensors_folder import StoredTensor
from adapters.models.decoder.family import ModelConfig
from adapters.models.drafts.assistant.checkpoint import AssistantCheckpoint, is_assistant
from adapters.models.drafts.assistant.draft import AssistantDraft
from adapters.models.drafts.assistant.weights import list_assistant_products
from adapters.models.drafts.cached_draft import CachedDraft
from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.dflash.weights import describe_taps as describe_block_taps
from adapters.models.drafts.dflash.weights import list_draft_products as block_products
from adapters.models.drafts.draft_parts import DraftShape, Projection
from adapters.models.drafts.eagle3.checkpoint import Eagle3Checkpoint, is_eagle3
from adapters.models.drafts.eagle3.draft import Eagle3Draft
from adapters.models.drafts.eagle3.weights import describe_taps, list_eagle3_products
from adapters.models.drafts.feature_projection import FeatureProjection
from adapters.models.drafts.gguf_files import check_gguf_tokens
from adapters.models.drafts.mtp.checkpoint import HeadCheckpoint
from adapters.models.drafts.mtp.draft import MtpDraft
from adapters.models.drafts.mtp.projection import LastHidden
from adapters.models.drafts.mtp.weights import list_head_products
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Products
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint
from engine.settings.options import Options
from engine.settings.paths import OWN, choose_draft_name
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")


@frozen
class FoundDraft:
    """A draft that was requested, checked against its target.

    name: the value of `--draft`. weights: how many it has.
    """

    name: str
    shape: DraftShape
    weights: int
    digest: str  # of the weights
    products: Callable[..., Products]
    build: Callable[..., CachedDraft[Any]]
    projection: Callable[[Kernels, torch.device, torch.dtype], Projection]

    @property
    def digests(self) -> tuple[str, str]:
        """Return digests of the weights and of the format of rows. Drafts with equal digests are the same draft."""
        return self.digest, blake2b(repr(self.shape.row_facts()).encode(), digest_size=16).hexdigest()


class OpenedDraft(Protocol):
    """An opened draft of any kind."""

    @property
    def config(self) -> Any: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def digest(self) -> str: ...


def find_draft(options: Options, target: Checkpoint) -> FoundDraft | None:
    """Return the draft that was requested, or that comes with a demo.

    Raises UserError if it cannot draft for this target.
    """
    found = open_draft(choose_draft_name(options.speculation.draft, options.model.model), target)
    if found is None and options.speculation.ddtree:
        log.warning("--ddtree has no effect without a draft (--draft none)")
    return found


def open_draft(name: str, target: Checkpoint) -> FoundDraft | None:
    """Return the draft of this name. Raises UserError."""
    if name == "none":
        return None
    try:
        if name == OWN:
            return find_own_head(target)
        path = Path(name)
        check_gguf_tokens(path, target.folder)
        find = find_assistant if is_assistant(path) else find_eagle3 if is_eagle3(path) else find_dflash
        return find(path, target.config)
    except CheckpointError as error:
        raise UserError(f"--draft {error}") from error


def drop_unverifiable_draft(found: FoundDraft | None, numerics: Numerics) -> FoundDraft | None:
    """Return the draft, or None if its proposals could not be verified bit for bit with these numerics."""
    if found is not None and numerics.mode != "buckets":
        log.warning("no draft is used: proposals cannot be verified exactly, because batch sizes change the bits here")
        return None
    return found


def find_dflash(path: Path, target: ModelConfig) -> FoundDraft:
    found = DraftCheckpoint.open(path, target)
    projection = partial(FeatureProjection, describe_block_taps(found.config), found)
    return describe_draft(str(path), found, block_products, DFlashDraft, projection)


def find_eagle3(path: Path, target: ModelConfig) -> FoundDraft:
    found = Eagle3Checkpoint.open(path, target)
    projection = partial(FeatureProjection, describe_taps(found.config), found)
    return describe_draft(str(path), found, list_eagle3_products, Eagle3Draft, projection)


def find_assistant(path: Path, target: ModelConfig) -> FoundDraft:
    found = AssistantCheckpoint.open(path, target)
    return describe_draft(str(path), found, list_assistant_products, AssistantDraft, refuse_projection)


def refuse_projection(*_: object) -> Projection:
    """Raise ValueError: an assistant cannot be in another process than its target."""
    raise ValueError("an assistant reads its target's rows, so it must be on the device of the last layers")


def find_own_head(target: Checkpoint) -> FoundDraft:
    found = HeadCheckpoint.open(target)
    layer = found.config.aux_layers[0]
    return describe_draft(OWN, found, list_head_products, MtpDraft, lambda *_: LastHidden(layer))


def describe_draft(
    name: str,
    found: OpenedDraft,
    products: Callable[..., Products],
    kind: Callable[..., CachedDraft[Any]],
    projection: Callable[..., Projection],
) -> FoundDraft:
    """Return what is known of a draft. products: lists those of a configuration. kind: the class of the draft."""
    return FoundDraft(
        name,
        found.config,
        count_weights(found.tensors),
        found.digest(),
        partial(products, found.config),
        partial(kind, found.config, found),
        projection,
    )


def count_weights(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(math.prod(entry.shape) for entry in tensors.values())
