"""The sweep of restores: what is forced around the planner's choice, and when the choice counts as the best."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.restore_sweep import PLANNER, Sweep, Variant, list_variants, make_figures

GIVEN = argparse.Namespace(step=0.1, readers="4,16", run_factors="2")


def test_splits_lie_around_the_planners_and_readers_and_runs_follow() -> None:
    names = [variant.name for variant in list_variants(600, 1000, GIVEN)]
    splits = ["compute 0 %", "compute 20 %", "compute 30 %", "compute 50 %", "compute 60 %", "compute 100 %"]
    assert names == [PLANNER, *splits, "4 readers", "16 readers", "2x runs"]
    assert [variant.share for variant in list_variants(1000, 1000, GIVEN)][:5] == [None, 0.0, 0.1, 0.2, 1.0]


def test_each_number_of_readers_has_rates_of_its_own_and_forced_splits_have_the_planners() -> None:
    assert Variant(share=0.5).home == Variant().home
    assert len({Variant().home, Variant(readers=4).home, Variant(run_factor=2).home}) == 3


def sweep_of(times: dict[str, list[float]]) -> Sweep:
    rows = [
        {"variant": name, "runs": 1, "tokens": 2048, "seconds": time, "restored": 1000, "same": True}
        for name, some in times.items()
        for time in some
    ]
    return Sweep(Path(), [], [], found=rows)


def test_a_variant_is_quicker_only_beyond_the_noise() -> None:
    rows = sweep_of({PLANNER: [1.0, 1.0, 1.08], "compute 20 %": [0.95] * 3, "16 readers": [0.9] * 3}).summarise(2048)
    assert [(row["variant"], row["quicker"]) for row in rows] == [
        (PLANNER, False),
        ("compute 20 %", False),
        ("16 readers", True),
    ]
    (figure,) = make_figures(rows, "demo")
    assert (figure.ours, figure.peers, figure.met) == (1.0, {"best forced": 0.9}, False)


def test_a_cold_answer_is_no_variant() -> None:
    rows = sweep_of({PLANNER: [1.0], "cold": [0.5]}).summarise(2048)
    (figure,) = make_figures(rows, "demo")
    assert figure.met
