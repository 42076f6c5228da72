"""Finds the prompt scorer (`--prefill-drafter`) of prompt compression, checks it against its target, and loads it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, frozen

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.device.compression.score_prompt import Compressor, PromptScorerLane, build_token_marks, log_drop_failure
from adapters.device.lane.lane import DeviceLane
from adapters.http.edge_options import MAX_FROZEN_CONTEXTS
from adapters.http.history.frozen_messages import FRESH_MESSAGES
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.scorer import Scorer
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from adapters.remote.client.peer import Peer
from adapters.remote.client.remote_scorer import RemoteScorer, build_scorer_request
from adapters.remote.protocol.messages import Prove
from adapters.sequence_layout import dtype_name
from adapters.text.tokenizer import Tokenizer
from adapters.watched_thread import WatchedThread
from effects.ids import LaneId, RequestId
from effects.ports import RowsLost
from engine.loading.drafts.load_draft import is_short_of_memory
from engine.loading.identity import compute_identity
from engine.loading.memory.device_survey import Placement, choose_chunk, choose_device, read_boot_id
from engine.loading.memory_estimate import estimate_weights, measure_remote_free
from engine.loading.prove_numerics import prove
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.model_options import RuntimeOptions
from engine.settings.options import Options
from engine.settings.output.server_facts import CompressionFacts
from engine.settings.user_error import UserError
from states.settings import Settings

log = logging.getLogger("rekindle")

SCORER_LANE = LaneId(1)  # the lane of a scorer on a device of its own
# Rows at once on a GPU. So narrow a model computes fewer rows faster than the host can launch the next ones.
CUDA_CHUNK = 4096


@frozen
class FoundScorer:
    """A prompt scorer that was requested, checked against its target. name: the value of `--prefill-drafter`."""

    name: str
    checkpoint: Checkpoint
    device: torch.device  # in this process
    limit: int
    tokenizer: Tokenizer
    peer: Peer | None = None  # the process that has the scorer, if another one has it

    @property
    def location(self) -> str:
        return str(self.device) if self.peer is None else self.peer.dial.name


@define(eq=False)
class LoadedScorer:
    """A prompt scorer that serves. own_lane: runs it on a lane of its own, if it has one."""

    found: FoundScorer
    compressor: Compressor
    lane: DeviceLane
    own_lane: PromptScorerLane | None = None
    identity: str = ""  # of the model and its numerics

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        return () if self.own_lane is None else (self.own_lane.lane.thread,)

    def memory(self) -> Mapping[str, int]:
        device, host = self.compressor.weights_bytes
        return {"weights": device, "host": host, "buffers": self.compressor.buffers}

    def abandon(self, request: RequestId) -> None:
        """Drop the scores of a request, after the work that is in flight."""
        if self.own_lane is not None:
            self.own_lane.abandon(request)
        elif not self.lane.is_closed:
            self.lane.post(partial(self.compressor.forget, request), log_drop_failure)

    def close(self) -> None:
        if self.own_lane is not None:
            self.own_lane.close()
        if self.found.peer is not None:
            self.found.peer.close()


def find_scorer_folder(options: Options) -> Path:
    """Return the folder or the GGUF file of the prompt scorer."""
    return demo.FOLDERS.get(options.scorer_name) or Path(options.scorer_name)


def find_scorer(
    options: Options, folder: Path, target: torch.device, context: int, *, peer: Peer | None = None
) -> FoundScorer | None:
    """Return the prompt scorer that was requested, if any. Raises UserError if it cannot score the target's prompts.

    folder: that of the target. peer: the process that has the scorer, if another one has it.
    """
    name = options.scorer_name
    if not name:
        return None
    path = find_scorer_folder(options)
    try:
        checkpoint = Checkpoint.open(path)
        tokenizer = Tokenizer.load(path)
        own = tokenizer if path == folder else Tokenizer.load(folder)
    except CheckpointError as error:
        raise UserError(f"--prefill-drafter {error}") from error
    config = checkpoint.config
    if not isinstance(config, DenseConfig) or not config.can_score_prompts:
        family = checkpoint.family.model_type
        raise UserError(f"--prefill-drafter {name}: {family} models cannot score prompts; accepted: plain decoders")
    check_tokenizer(name, tokenizer, own, config.vocab_size)
    chosen = options.compression.prefill_drafter_device
    device = torch.device("cpu")
    if peer is None:
        device = choose_device(chosen, "--prefill-drafter-device") if chosen else target
    return FoundScorer(name, checkpoint, device, min(config.max_positions, MAX_FROZEN_CONTEXTS * context), own, peer)


def check_tokenizer(name: str, tokenizer: Tokenizer, target: Tokenizer, vocab: int) -> None:
    """Raise UserError if the tokenizers differ: tokens are selected by id, so an id must be the same text in both."""
    theirs, ours = (each_tokenizer.full.get_vocab(with_added_tokens=True) for each_tokenizer in (tokenizer, target))
    if theirs != ours:
        odd = min(theirs.items() ^ ours.items(), key=lambda item: (item[1], item[0]))
        why = f"its tokenizer is another than the model's (token {odd[1]}: {odd[0]!r} is in one of them only)"
        raise UserError(f"--prefill-drafter {name[:200]}: {why}; accepted: a model with the same tokenizer")
    if target.size > vocab:
        raise UserError(
            f"--prefill-drafter {name[:200]}: its vocab_size is {vocab}, but token ids go up to {target.size - 1}"
        )


def add_scorer(
    found: FoundScorer | None,
    options: Options,
    lane: DeviceLane,
    *,
    settings: Settings,
    calibrations: CalibrationCache,
) -> tuple[LoadedScorer | None, Settings]:
    """Prove the products of the prompt scorer and make it ready. Return it, and the settings with it.

    Its weights are read at first use, unless they are to stay loaded. lane: the target's; a scorer on another device
    gets a lane of its own. Raises UserError, and torch.OutOfMemoryError if `persistent` weights do not fit.
    """
    if found is None:
        return None, settings
    compressor, named = build_compressor(found, options, calibrations)
    settings = load_if_kept(compressor, settings)
    if found.peer is None and shares_device(lane, found.device):
        return LoadedScorer(found, compressor, lane, identity=named), evolve(settings, scorer_max_tokens=found.limit)
    own_lane = PromptScorerLane(compressor, DeviceLane(found.device))
    settings = evolve(settings, scorer_max_tokens=found.limit, scorer_lane=SCORER_LANE)
    return LoadedScorer(found, compressor, own_lane.lane, own_lane, named), settings


def cannot_stay(found: FoundScorer) -> bool:
    """Return whether its device is short of memory once its weights are there. The target and the draft are loaded.

    A device of another process reports only its free memory, so there the weights have to fit into that.
    """
    config = found.checkpoint.config
    dtype = resolve_dtype("auto", found.checkpoint)
    size = estimate_weights(config, dtype, found.device, range(config.num_layers))
    if found.peer is None:
        return is_short_of_memory(found.device, size)
    placement = Placement(range(config.num_layers), found.device, found.peer)
    return placement.compute_device.type == "cuda" and size > measure_remote_free(placement)


def load_if_kept(compressor: Compressor, settings: Settings) -> Settings:
    """Read the weights if they are to stay between requests.

    If there is no room for them after all, `auto` releases them after each use. `persistent` was requested explicitly,
    so it raises torch.OutOfMemoryError.
    """
    if settings.residency.scorer != "keep":
        return settings
    try:
        compressor.scorer.weights.load_back()
    except torch.OutOfMemoryError:
        if settings.residency.policy != "auto":
            raise
        log.warning("the drafter is released after each use, because its device is short of memory")
        return evolve(settings, residency=evolve(settings.residency, scorer="release"))
    return settings


def shares_device(lane: DeviceLane, device: torch.device) -> bool:
    """Return whether the lane uses this device, so that work on it would wait for the lane."""
    return device in lane.devices or device.type == lane.device.type == "cpu"


def build_compressor(found: FoundScorer, options: Options, calibrations: CalibrationCache) -> tuple[Compressor, str]:
    """Return the compressor of a scorer, and the identity of its model and numerics. Raises UserError."""
    dtype = resolve_dtype("auto", found.checkpoint)
    checkpoint = found.checkpoint.with_dtype(dtype)
    config = found.checkpoint.config
    tokenizer = found.tokenizer
    controls = frozenset(control.id for control in tokenizer.controls.values())
    marks = build_token_marks([tokenizer.token_bytes(token) for token in range(tokenizer.size)], controls)
    if found.peer is not None:
        remote, numerics = prove_remote_scorer(found, found.peer, options, dtype)
        return Compressor(remote, marks), compute_identity(checkpoint, dtype, numerics, options.runtime.numerics)
    assert isinstance(config, DenseConfig)
    placement = Placement(range(config.num_layers), found.device)
    runtime = evolve(options.runtime, chunk=count_scored_rows(options.runtime, placement))
    numerics, proven = prove(
        options.weights, runtime, checkpoint, dtype, (placement,), context=found.limit, kept=calibrations
    )
    [kernels] = proven.shards
    assert kernels is not None, "its device is here"
    scorer = Scorer(config, checkpoint, kernels, found.device, dtype, numerics.buckets, found.limit)
    return Compressor(scorer, marks), compute_identity(checkpoint, dtype, numerics, options.runtime.numerics)


def count_scored_rows(runtime: RuntimeOptions, placement: Placement) -> int:
    """Return the rows of one forward of the scorer."""
    return CUDA_CHUNK if placement.compute_device.type == "cuda" else choose_chunk(runtime, (placement,))


def prove_remote_scorer(
    found: FoundScorer, peer: Peer, options: Options, dtype: torch.dtype
) -> tuple[RemoteScorer, Numerics]:
    """Return the scorer in another process, with the numerics that this process has proven. Raises UserError."""
    config = found.checkpoint.config
    placement = Placement(range(config.num_layers), found.device, peer)
    kept_in: Any = dtype_name(dtype)
    try:
        numerics = peer.prove(
            Prove(kept_in, "auto", count_scored_rows(options.runtime, placement), found.limit, read_boot_id())
        )
        return RemoteScorer(peer, build_scorer_request(found.limit, fast=options.runtime.numerics == "fast")), numerics
    except (ValueError, RowsLost) as error:
        raise UserError(f"--prefill-drafter-device {found.location}: {error}") from error


def describe_compression(options: Options, settings: Settings, prompt_scorer: LoadedScorer | None) -> CompressionFacts:
    """Return the settings of compression as they are in effect."""
    return CompressionFacts(
        mode=options.compression.prefill_compression,
        threshold=options.compression.prefill_threshold,
        keep_ratio=options.compression.prefill_keep_ratio,
        curve=tuple((tokens, keep / 1000) for tokens, keep in options.compression.keep_ratio_curve),
        drafter=None if prompt_scorer is None else Path(prompt_scorer.found.name).name,
        device=None if prompt_scorer is None else prompt_scorer.found.location,
        most_tokens=settings.scorer_max_tokens,
        draft_residency=settings.residency.policy,
        freeze=options.cache.disk_prefix_cache_compress,
        hot_window=FRESH_MESSAGES,
    )
