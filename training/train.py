"""The training loop, for any model whose forward is a loss: stages, schedule, Muon and AdamW."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import asdict, frozen
from torch import Tensor, nn

from training.batches import Batch, Batches, BatchShape, InTurn, Mixture
from training.model import Trainable

WARM_UP_STEPS = 100
CLIP = 1.0
LOGGED = 50
"""Steps from one line of the log to the next."""


@frozen
class Windows:
    """The shape of a batch's windows and their mixture of tasks. `Batches` explains the fields."""

    shape: BatchShape
    mixture: Mixture
    whole: float
    mingled: bool = False


@frozen
class Stage:
    """A part of a training run.

    share: of the run's time. The learning rate follows from the share of all stages that is done.
    """

    name: str
    shape: BatchShape
    mixture: Mixture
    steps: int
    share: float
    whole: float
    mingled: bool = False
    more_windows: tuple[Windows, ...] = ()
    """Windows of other shapes, whose batches take turns with these."""


def list_windows(stage: Stage) -> list[Windows]:
    """Return the windows whose batches take turns in a stage."""
    return [Windows(stage.shape, stage.mixture, stage.whole, stage.mingled), *stage.more_windows]


@frozen
class LearningRates:
    """Peak learning rates. Muon's updates are scaled to the root mean square of AdamW's, so both are of one kind."""

    matrices: float
    others: float
    falling: float
    """The share of the progress, at its end, in which the rates fall."""

    decay: float = 0.1


@frozen
class TrainingProgress:
    """The progress of a run, also of one that a later run continues. steps: by the stage's name."""

    steps: Mapping[str, int] = {}
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> TrainingProgress:
        return TrainingProgress(**json.loads(path.read_text(encoding="utf-8")))


def optimizers(model: nn.Module, rates: LearningRates) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    tables = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" in name]
    others = [p for p in model.parameters() if p.ndim != 2]
    fused = next(model.parameters()).is_cuda
    return [
        torch.optim.Muon(matrices, lr=rates.matrices, weight_decay=rates.decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=rates.others,
            betas=(0.9, 0.98),
            fused=fused,
        ),
    ]


def by_parts(model: nn.Module) -> Callable[..., Tensor]:
    """Compiles what there is many of, once: a model as a whole would take the better part of a minute a shape."""
    if isinstance(model, Trainable):
        model.compile_parts()
    return model


def train(
    model: nn.Module,
    batches: Callable[[Stage, int], Batches | InTurn],
    stages: Sequence[Stage],
    *,
    rates: LearningRates,
    seed: int,
    seconds: float = math.inf,
    workers: int = 0,
    after: Callable[[TrainingProgress], None] = lambda _: None,
    first: int = 0,
    before: TrainingProgress | None = None,
    compiled: Callable[[nn.Module], Callable[..., Tensor]] = by_parts,
) -> TrainingProgress:
    """Train in place. Each stage ends after its steps, or when its share of `seconds` is used up.

    batches: gives a stage's batches from the run's seed.  after: called at the end of each stage, to save.
    first: the stage to begin with, the model being as the ones before it left it; `before`: what they came to.
    compiled: makes what is called on a GPU of it.
    Raises FloatingPointError at the next line of the log if the loss of any step was not finite.
    """
    device = next(model.parameters()).device
    step_loss = compiled(model) if device.type == "cuda" else model
    steppers = optimizers(model, rates)
    peaks = [[group["lr"] for group in stepper.param_groups] for stepper in steppers]
    progress = TrainingProgress() if before is None else before
    whole = sum(stage.share for stage in stages)
    done, total, tokens = sum(stage.share for stage in stages[:first]), 0, progress.tokens
    began = time.monotonic() - progress.seconds
    steps, recent = dict(progress.steps), progress.loss
    since: list[Tensor] = []
    for stage in stages[first:]:
        loader = batches(stage, seed).load(range(stage.steps), workers)
        opened = time.monotonic()
        for step, (ids, weights) in enumerate(loader):
            # the stage's own progress: by steps, or by the clock if that is ahead
            own = max(step / stage.steps, (time.monotonic() - opened) / (seconds * stage.share))
            if own >= 1:
                break
            factor = schedule(total, (done + own * stage.share) / whole, rates.falling)
            for stepper, lrs in zip(steppers, peaks, strict=True):
                for group, peak in zip(stepper.param_groups, lrs, strict=True):
                    group["lr"] = peak * factor
            batch = (ids.to(device, non_blocking=True), weights.to(device, non_blocking=True))
            since.append(one_step(model, step_loss, steppers, batch))
            steps[stage.name] = step + 1
            total += 1
            tokens += len(ids) * (ids.shape[1] - 1)
            if step % LOGGED == 0 or step == stage.steps - 1:
                recent = mean_loss(since, f"{stage.name} step {step}")
                report(f"{stage.name} step {step}", recent, factor, tokens, time.monotonic() - began)
        if since:
            recent = mean_loss(since, f"{stage.name}, its last steps")
        done += stage.share
        progress = TrainingProgress(dict(steps), tokens, time.monotonic() - began, recent)
        after(progress)
    return progress


def mean_loss(since: list[Tensor], where: str) -> float:
    """The mean of these steps' losses, which are forgotten."""
    losses = torch.stack(since).tolist()
    since.clear()
    if not all(map(math.isfinite, losses)):
        raise FloatingPointError(f"{where}: a loss is not finite: {losses}")
    return sum(losses) / len(losses)


def one_step(
    model: nn.Module, step_loss: Callable[..., Tensor], steppers: list[torch.optim.Optimizer], batch: Batch
) -> Tensor:
    with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
        loss = step_loss(*batch)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for stepper in steppers:
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    return loss.detach()


def schedule(step: int, progress: float, falling: float) -> float:
    """Up over the first steps, level, then down in a straight line to a hundredth."""
    down = max(0.01, min(1.0, (1 - progress) / falling))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * down


def report(where: str, loss: float, factor: float, tokens: int, seconds: float) -> None:
    print(f"{where} loss {loss:.4f} rate x{factor:.3f} {tokens / 1e6:.0f}M tokens {seconds:.0f} s", flush=True)


def digest(model: nn.Module) -> str:
    """Identifies the parameters as they are."""
    found = hashlib.blake2b(digest_size=16, person=b"rekindle-train")
    for name, parameter in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
