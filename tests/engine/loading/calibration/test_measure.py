"""Times that an earlier start kept: believed where a few of them are measured again and agree, and read as hostile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.pipeline.pipelined_chunks import SPAN, SPAN_AHEAD
from adapters.sequence_layout import TensorSpec
from effects.all import EffectRequest
from effects.decode import Decoded, RunDecode
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from engine.loading.calibration import calibrate_compute
from engine.loading.calibration.calibrate_compute import (
    RateShape,
    build_rates_key,
    choose_concurrent_rows,
    choose_mixed_rows,
    choose_prefill_span,
    do_rates_agree,
    from_json,
    load_or_measure_rates,
    to_json,
)
from engine.loading.memory.device_survey import Placement
from engine.settings.calibration_cache import CalibrationCache
from states.rates import Rates, TimedStep
from tests.device.fake_shard import FakeShard, NoStates, make_fake_shard
from tests.models.recurrent_shard import RecurrentShard

TIMES = Rates(
    prefill=(1000, 1200, 1500),
    decode=(TimedStep(0, 1, 0, 7_000, 0), TimedStep(0, 1, 4, 8_000, 0), TimedStep(0, 1, 16, 9_000, 0)),
)
GOOD = json.loads(to_json(TIMES))
HOSTILE = {
    "nothing": "",
    "a list": "[]",
    "another version": json.dumps({**GOOD, "version": 1}),
    "a field too many": json.dumps({**GOOD, "host": 1}),
    "a field too few": json.dumps({"version": 2, "prefill": [1]}),
    "no lists": json.dumps({**GOOD, "decode": 7}),
    "words": json.dumps({**GOOD, "prefill": "123"}),
    "negative": json.dumps({**GOOD, "prefill": [-1]}),
    "a fraction": json.dumps({**GOOD, "prefill": [0.5]}),
    "true": json.dumps({**GOOD, "prefill": [True]}),
    "too much": json.dumps({**GOOD, "prefill": [10**12]}),
    "too many": json.dumps({**GOOD, "prefill": [1] * 65}),
    "a short step": json.dumps({**GOOD, "decode": [[0, 1, 0]]}),
    "a step that is none": json.dumps({**GOOD, "decode": [7]}),
}


def test_what_was_measured_comes_back() -> None:
    assert from_json(to_json(TIMES)) == TIMES


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        from_json(text)


@pytest.mark.parametrize(
    ("now", "believed"),
    [
        (Rates((1000,), decode=(TimedStep(0, 1, 0, 7_000, 0), TimedStep(0, 1, 16, 9_000, 0))), True),
        (Rates((3999,), decode=(TimedStep(0, 1, 0, 3_500, 0), TimedStep(0, 1, 16, 36_000, 0))), True),
        (Rates((4001,), decode=(TimedStep(0, 1, 0, 7_000, 0), TimedStep(0, 1, 16, 9_000, 0))), False),
        (Rates((499,), decode=(TimedStep(0, 1, 0, 7_000, 0), TimedStep(0, 1, 16, 9_000, 0))), False),
        (Rates((1000,), decode=(TimedStep(0, 1, 0, 7_000, 0), TimedStep(0, 1, 16, 36_001, 0))), False),
        (Rates((1000,), decode=(TimedStep(0, 1, 0, 7_000, 0), TimedStep(0, 1, 8, 9_000, 0))), False),
        (Rates((1000,)), True),
    ],
)
def test_a_few_of_them_have_to_agree(now: Rates, believed: bool) -> None:
    assert do_rates_agree(TIMES, now) is believed
    assert not do_rates_agree(Rates(), now)


def test_what_does_not_agree_is_measured_again_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock's part is played: what a chunk, a decode step and everything take is said here."""
    kept, asked = CalibrationCache(tmp_path), list[str]()
    monkeypatch.setattr(calibrate_compute, "time_call", lambda _: 64 * 1000)
    monkeypatch.setattr(calibrate_compute, "measure_decode", lambda *_, **__: TIMES.decode[::2])
    monkeypatch.setattr(calibrate_compute, "measure_rates", lambda *_, **__: asked.append("all") or TIMES)

    def start() -> Rates:
        return load_or_measure_rates(kept, "a", None, None, RateShape(64, 512, [0, 3, 15]))  # type: ignore[arg-type]

    assert start() == TIMES
    assert start() == TIMES
    assert asked == ["all"]
    late = [64 * 9000]  # something was in the way, once
    monkeypatch.setattr(calibrate_compute, "time_call", lambda _: late.pop() if late else 64 * 1000)
    assert start() == TIMES
    assert asked == ["all"]
    assert not late
    for other in (to_json(Rates((10_000,), decode=TIMES.decode)), "nonsense"):
        kept.remember("a", other)
        assert start() == TIMES
    assert asked == ["all"] * 3
    assert kept.damaged["rates"] == 1
    assert from_json(kept.locate("rates", "a").read_text(encoding="utf-8")) == TIMES


def test_what_is_quicker_than_what_was_kept_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start on a busy machine measured steps that seemed slow. A later start measures the narrow ones again,
    and each width keeps its shortest times.
    """
    kept, asked = CalibrationCache(tmp_path), list[Sequence[int]]()
    dear = (TimedStep(0, 1, 0, 8_000, 0), TimedStep(0, 1, 4, 16_000, 8_000), TimedStep(0, 1, 16, 30_000, 8_000))
    kept.remember("a", to_json(Rates(prefill=(1000,), decode=dear)))
    monkeypatch.setattr(calibrate_compute, "time_call", lambda _: 64 * 1000)

    def start(*now: tuple[int, int, int, int, int]) -> tuple[tuple[int, int, int, int, int], ...]:
        def decode(*given: Any, **_: Any) -> Any:
            asked.append(given[-1])
            return now

        monkeypatch.setattr(calibrate_compute, "measure_decode", decode)
        widths = [0, 3, 15]
        return load_or_measure_rates(kept, "a", None, None, RateShape(64, 512, widths)).decode  # type: ignore[arg-type]

    better = start(TimedStep(0, 1, 0, 7_000, 0), TimedStep(0, 1, 4, 11_000, 7_000))
    assert better == (
        TimedStep(0, 1, 0, 7_000, 0),
        TimedStep(0, 1, 4, 11_000, 7_000),
        TimedStep(0, 1, 16, 30_000, 8_000),
    )
    assert start(TimedStep(0, 1, 0, 9_000, 0), TimedStep(0, 1, 4, 10_000, 9_000))[1] == TimedStep(
        0, 1, 4, 10_000, 7_000
    ), "of the quickest each"
    assert start(TimedStep(0, 1, 0, 9_000, 0), TimedStep(0, 1, 4, 12_000, 9_000))[1] == TimedStep(
        0, 1, 4, 10_000, 7_000
    )
    assert asked == [[0, 3]] * 3
    assert from_json(kept.locate("rates", "a").read_text(encoding="utf-8")).decode[1] == TimedStep(
        0, 1, 4, 10_000, 7_000
    )


def test_they_are_kept_under_what_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"chunk": 256, "context": 8192, "widths": [0, 3]}
    keys = {
        build_rates_key("a", None, shape),
        build_rates_key("b", None, shape),
        build_rates_key("a", "draft", shape),
        build_rates_key("a", None, {**shape, "chunk": 64}),
    }
    monkeypatch.setattr(calibrate_compute.torch, "get_num_threads", lambda: 7)
    assert len(keys | {build_rates_key("a", None, shape)}) == 5


@pytest.mark.parametrize("context", [32, 100, 101])
def test_prefill_is_measured_in_any_context_of_a_model_with_recurrent_layers(context: int) -> None:
    """Its state stands at some multiples only, wherever the last chunk of the context begins."""
    shard = RecurrentShard(capacity=context, buckets=(4, 8, 16, 32), state_block=16)
    assert min(calibrate_compute.measure_prefill(shard, 32, context)) > 0


ROUND = 3 * calibrate_compute.IN_A_ROW  # steps of three widths


class HeldUp:
    """An executor whose decode steps take 10 for each row, and `slower` times as long in their first round."""

    def __init__(self, slower: int) -> None:
        self.slower, self.outcomes = slower, list[Any]()

    def rehearse(self, _: OpenSlot, following: Callable[[Sequence[Any]], EffectRequest | None]) -> list[Any]:
        while (effect_request := following(self.outcomes)) is not None:
            if isinstance(effect_request.effect, RunPrefill):
                self.outcomes.append(PrefillAdvanced(effect_request.effect.stop))
                continue
            assert isinstance(effect_request.effect, RunDecode)
            proposed, slower = effect_request.effect.propose, self.slower if len(self.outcomes) <= ROUND else 1
            step = Decoded((1,), proposed, ns=10 * (1 + proposed) * slower, accepted=0)
            self.outcomes += [evolve(step, more=left > 0) for left in reversed(range(effect_request.effect.steps))]
        return self.outcomes


@pytest.mark.parametrize(("slower", "rounds"), [(1, 2), (20, 3)])
def test_decode_steps_are_measured_again_while_they_get_quicker(slower: int, rounds: int) -> None:
    shard, executor = RecurrentShard(capacity=100, buckets=(4, 8), state_block=16), HeldUp(slower)
    found = calibrate_compute.measure_decode(executor, shard, 100, (0, 3, 7))  # type: ignore[arg-type]
    assert found == (TimedStep(0, 1, 0, 10, 0), TimedStep(0, 1, 4, 40, 10), TimedStep(0, 1, 8, 80, 10))
    assert len(executor.outcomes) == 1 + rounds * ROUND


@pytest.mark.parametrize(
    ("rounds", "spent", "ends"),
    [
        ([{0: 100}], 1, False),
        ([{0: 100}], 2 * calibrate_compute.BUDGET_NS, True),
        ([{0: 100, 3: 200}, {0: 95, 3: 190}], 1, True),
        ([{0: 100, 3: 200}, {0: 95, 3: 150}], 1, False),
        ([{0: 100, 3: 200}, {0: 95, 3: 150}, {0: 96, 3: 149}], 1, True),
        ([{0: 100}, {0: 50}], 2 * calibrate_compute.BUDGET_NS, True),
    ],
)
def test_it_ends_when_nothing_gets_quicker_or_too_much_is_spent(
    rounds: list[dict[int, int]], spent: int, ends: bool
) -> None:
    assert calibrate_compute.has_enough_rounds(rounds, spent, 2) is ends


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
WHOLE, PROVEN = (Placement(range(1), GPU),), (4, 64, 128, 256, 1024)


@pytest.mark.parametrize(
    ("plan", "shard", "buckets", "drafted", "rows"),
    [
        (WHOLE, make_fake_shard(runs_ahead=True), PROVEN, False, 128),
        (WHOLE, make_fake_shard(runs_ahead=True), PROVEN, True, 0),
        (WHOLE, make_fake_shard(runs_ahead=True), (4, 64, 256, 1024), False, 0),  # 100 rows would run as 256
        (WHOLE, make_fake_shard(runs_ahead=True), (4, 64, 128), False, 0),  # all forwards are as narrow as decode steps
        (WHOLE, FakeShard(), PROVEN, False, 0),
        (WHOLE * 2, make_fake_shard(runs_ahead=True), PROVEN, False, 0),
        ((Placement(range(1), CPU),), make_fake_shard(runs_ahead=True), PROVEN, False, 0),
    ],
    ids=["a GPU", "a draft", "a bucket that is not proven", "no wider chunk", "experts", "two parts", "a CPU"],
)
def test_where_prompts_have_a_lane_of_their_own(plan, shard, buckets, drafted, rows) -> None:  # type: ignore[no-untyped-def]
    assert choose_concurrent_rows(plan, shard, buckets, drafted=drafted) == rows


def stateful(*, commits_per_segment: bool) -> FakeShard:
    specs = (TensorSpec("layers.0.memory", "F32", (1,)),)
    return FakeShard(states=NoStates(specs, commits_per_segment=commits_per_segment))


@pytest.mark.parametrize(
    ("devices", "shard", "rows"),
    [
        ({"cpu"}, FakeShard(), 64),
        ({"cpu"}, stateful(commits_per_segment=False), 64),
        ({"cuda"}, FakeShard(), 0),  # prompts have a stream of their own
        ({"cuda"}, stateful(commits_per_segment=True), 512),
        ({"cuda"}, stateful(commits_per_segment=False), 0),
        ({"cuda", "cpu"}, stateful(commits_per_segment=True), 0),
    ],
    ids=["a CPU", "a hybrid on a CPU", "a GPU", "a hybrid on a GPU", "a hybrid in other processes", "both"],
)
def test_where_prompts_go_with_decode_steps(devices, shard, rows) -> None:  # type: ignore[no-untyped-def]
    assert choose_mixed_rows(devices, Pipeline((shard,))) == rows


@pytest.mark.parametrize(
    ("parts", "concurrent", "chunks"),
    [
        ((make_fake_shard(runs_ahead=True),), True, SPAN_AHEAD),
        ((make_fake_shard(runs_ahead=True),), False, 1),
        ((FakeShard(),), False, 1),
        ((make_fake_shard(layers=range(1)), make_fake_shard(layers=range(1, 2))), False, SPAN),
    ],
    ids=["a GPU", "a GPU with a draft", "a CPU", "two that compute elsewhere"],
)
def test_how_many_chunks_a_launch_may_be_of(parts: tuple[FakeShard, ...], concurrent: bool, chunks: int) -> None:
    assert choose_prefill_span(Pipeline(parts), concurrent=concurrent) == chunks
