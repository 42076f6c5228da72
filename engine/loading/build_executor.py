"""Builds the executor of a loaded target: complete, with its draft, its scorer, its store and its prompt lane."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts, Handler
from adapters.device.lane.lane import DeviceLane
from adapters.device.speculation.drafting import DraftProposer
from adapters.transfer.transfer import Transfer
from effects.all import Outcome
from effects.ids import ModelName, RequestId
from effects.prompt_compression import CompressPrompt
from effects.residency import LoadModel, UnloadModel
from engine.loading.load_scorer import LoadedScorer
from states.settings import Settings


def build_executor(
    parts: ExecutorParts,
    settings: Settings,
    *,
    drafting: DraftProposer[Any] | None,
    scorer: LoadedScorer | None,
    transfer: Transfer | None,
) -> DeviceExecutor:
    """Return the executor that serves. parts: what is known before the scoring model and the store are there.

    Grammars are not known yet, since the text is read meanwhile. `engine.serving.serve` makes an executor with them.
    """
    whole = evolve(
        parts,
        handlers=model_handlers(drafting, scorer),
        prompt_lane=DeviceLane(parts.lane.device, purpose="prompts") if settings.prompt_lane_min_rows else None,
        keep_state=None if transfer is None else transfer.saver.save_checkpoint,
    )
    return DeviceExecutor(whole)


def model_handlers(drafting: DraftProposer[Any] | None, scorer: LoadedScorer | None) -> dict[type, Handler]:
    """Return the handlers of effects on other models than the target, as far as these use the target's lane."""
    # For each model, the handler that loads it and the one that unloads it.
    movers: dict[ModelName, tuple[Handler, Handler]] = {}
    handlers: dict[type, Handler] = {}
    if drafting is not None:
        movers["draft"] = (drafting.load_back, drafting.offload)
    if scorer is not None and scorer.own_lane is None:
        movers["scorer"] = (scorer.compressor.load, scorer.compressor.unload)
        handlers[CompressPrompt] = scorer.compressor.compress

    def load(request: RequestId, effect: LoadModel) -> Outcome:
        return movers[effect.name][0](request, effect)

    def unload(request: RequestId, effect: UnloadModel) -> Outcome:
        return movers[effect.name][1](request, effect)

    if movers:
        handlers[LoadModel] = load
        handlers[UnloadModel] = unload
    return handlers
