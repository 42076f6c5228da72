"""Tests that our products are exactly the chains that they are documented to be, whatever is computed with them, and
however.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

import hatch_build
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native import native_library as compiled
from adapters.models.kernels.cpu.native.products import NativeProducts
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.product_list import NATIVE, Heads, Products, ServedWeight, Weight, check_plan
from engine.loading.memory.device_survey import build_kernels
from engine.settings.user_error import UserError
from tests.pairs import usual_where

FLOAT, BRAIN = torch.float32, torch.bfloat16
LEVELS = (0, 1, 2, 3)
ROOT = Path(hatch_build.__file__).parent


@pytest.fixture(scope="module")
def own(native_code):
    return NativeProducts(native_code, native_code.level)


def levels(own):
    return [evolve(own, level=level) for level in LEVELS if level <= own.compiled.level]


def random(*shape, seed=1, dtype=FLOAT):
    """Return random numbers of many magnitudes, so that roundings show."""
    generator = make_generator(seed)
    return (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp2()).to(dtype)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("terms", [1, 2, 31, 63, 64, 65, 66, 127, 129, 321])
def test_packed_weights_are_panels_of_32_outputs(own, dtype, outputs, terms):
    """`rekindle_pack` says so: zeros for outputs that are not there, and next to an odd last term of bfloat16."""
    weight, each = random(outputs, terms, dtype=dtype), 2 if dtype is BRAIN else 1
    panels = -(-outputs // 32)
    whole = torch.zeros(panels * 32, -(-terms // each) * each, dtype=dtype)
    whole[:outputs, :terms] = weight
    expected = whole.view(panels, 32, -1, each).transpose(1, 2).flatten()
    assert torch.equal(own.pack(weight).panels.flatten(), expected)


def nearest(exact: Fraction) -> np.float32:
    """The float32 next to a number, the even one of two."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(-math.inf)), guess, np.nextafter(guess, np.float32(math.inf))]
    return min(near, key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.uint32)) & 1))


def chain(row, weights) -> np.float32:
    """Compute the chain of a row. In bfloat16 the second of each pair of terms comes first."""
    found, terms = np.float32(0), list(zip(row.tolist(), weights.tolist(), strict=True))
    if weights.dtype is BRAIN:
        terms = [term for at in range(0, len(terms), 2) for term in reversed(terms[at : at + 2])]
    for one, weight in terms:
        found = nearest(Fraction(one) * Fraction(weight) + Fraction(float(found)))
    return found


def same(found, expected):
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
@pytest.mark.parametrize(("rows", "outputs", "terms"), [(1, 1, 1), (3, 5, 9), (13, 33, 4), (2, 100, 3)])
def test_an_output_is_one_chain_of_fused_multiply_adds(own, dtype, rows, outputs, terms):
    x, weight = random(rows, terms, dtype=dtype), random(outputs, terms, seed=2, dtype=dtype)
    exact = torch.tensor([[float(chain(row, one)) for one in weight] for row in x])
    for each in levels(own):
        assert same(each.multiply(x, each.pack(weight)), exact)


@usual_where(lambda places: places["dtype"] == places["outputs"] % 2)
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
@pytest.mark.parametrize(("outputs", "terms"), [(32, 64), (33, 1000), (130, 400), (7, 17)])
def test_bits_are_the_same_for_any_rows_on_any_threads_in_any_instructions(own, two_threads, dtype, outputs, terms):
    x, weight = random(300, terms, dtype=dtype), random(outputs, terms, seed=2, dtype=dtype)
    plain = evolve(own, level=0)
    expected = torch.cat([plain.multiply(row, plain.pack(weight)) for row in x.split(1)])
    gate, up = (random(outputs, terms, seed=seed, dtype=dtype) for seed in (3, 4))
    gated = torch.cat([plain.multiply(row, plain.pack(gate), plain.pack(up)) for row in x.split(1)])
    before = torch.get_num_threads()
    try:
        for each in levels(own):
            packed, both = each.pack(weight), (each.pack(gate), each.pack(up))
            for count in (*range(1, 17), 64, 257, 300):
                torch.set_num_threads(1 + count % 3)
                at = (300 - count) // 2
                assert same(each.multiply(x[at : at + count], packed), expected[at : at + count]), (each.level, count)
                assert same(each.multiply(x[at : at + count], *both), gated[at : at + count]), (each.level, count)
    finally:
        torch.set_num_threads(before)


def test_rows_may_be_columns_of_a_wider_tensor_and_weights_of_a_larger_one(own):
    wide, weights = random(9, 70, dtype=BRAIN), random(40, 50, seed=2, dtype=BRAIN)
    x, weight = wide[:, 11:61], weights[3:38]
    expected = own.multiply(x.contiguous(), own.pack(weight.clone()))
    assert same(own.multiply(x, own.pack(weight)), expected)
    assert same(own.multiply(x.t().contiguous().t(), own.pack(weight)), expected)
    assert same(own.multiply(x[:1].expand(4, -1), own.pack(weight)), expected[:1].expand(4, -1).contiguous())


@pytest.mark.parametrize(
    ("highest", "takes", "serving"),
    [(3, {3: 5, 2: 4}, 2), (3, {3: 4, 2: 5}, 3), (3, {3: 4, 2: 4}, 3), (2, {}, 2), (1, {}, 1), (0, {}, 0)],
)
def test_of_instructions_that_give_the_same_bits_the_quickest_serve(monkeypatch, highest, takes, serving):
    """Once each of them was held up by another process."""
    times, asked, late = [0.0], Counter(), {2: 3, 3: 6}

    class Code:
        def rekindle_product(self, *given):
            level = given[-1]
            times.append(times[-1] + takes[level] + 100 * (asked[level] == late[level]))
            asked[level] += 1

    monkeypatch.setattr(compiled, "perf_counter", lambda: times[-1])
    assert compiled.choose_level(Code(), highest) == serving
    assert asked == dict.fromkeys(takes, compiled.TIMED)


def test_what_serves_is_one_of_what_the_processor_has(native_code):
    assert native_code.serving in {native_code.level, *({2} if native_code.level == compiled.PAIRS else {})}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_in_its_row(own, bad):
    for each in levels(own):
        for rows in (2, 7, 12, 30):
            x, weight = random(rows, 40), each.pack(random(70, 40, seed=2))
            clean = each.multiply(x, weight, weight)
            x[1, 3] = bad
            found = each.multiply(x, weight, weight)
            others = [row for row in range(rows) if row != 1]
            assert same(found[others], clean[others])
            assert not found[1].isfinite().all()


def test_no_row_is_no_work_and_a_gate_takes_any_number(own):
    identity = own.pack(torch.eye(12))
    assert own.multiply(torch.empty(0, 12), identity).shape == (0, 12)
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 88.0, -88.0, 104.0, -104.0, 1e15, -1e15]])
    exact = torch.nn.functional.silu(x.double()) * x.double()
    for each in levels(own):
        assert torch.allclose(each.multiply(x, identity, identity).double(), exact, rtol=1e-6, atol=1e-30)


def test_what_a_gate_lets_through_is_silu(own):
    x = torch.linspace(-60, 60, 4096).view(-1, 1)
    one = own.pack(torch.ones(1, 1))
    found = own.multiply(torch.cat((x, torch.ones_like(x)), 1), *(own.pack(row) for row in torch.eye(2).split(1)))
    exact = torch.nn.functional.silu(x.double())
    assert ((found.double() - exact).abs() <= exact.abs() * 4e-7).all()
    assert own.multiply(torch.full((1, 1), math.nan), one, one).isnan().all()


def test_a_result_is_rounded_once_as_torch_rounds(own):
    x, weight = random(40, 300), own.pack(random(64, 300, seed=2))
    x[3, 0], x[4, 0], x[5], x[6] = math.nan, math.inf, 0, x[6] * 1e-38
    found = own.multiply(x, weight)
    for each in levels(own):
        rounded = evolve(each, to=BRAIN).multiply(x, weight)
        assert rounded[3].isnan().all()
        assert torch.equal(rounded[4:].view(torch.int16), found[4:].bfloat16().view(torch.int16))


HOSTILE = {
    "three dimensions": (lambda: torch.zeros(1, 2, 8), TypeError, "two dimensions"),
    "one dimension": (lambda: torch.zeros(8), TypeError, "two dimensions"),
    "doubles": (lambda: torch.zeros(2, 8, dtype=torch.float64), TypeError, "float64"),
    "halves": (lambda: torch.zeros(2, 8, dtype=torch.float16), TypeError, "float16"),
    "sparse": (lambda: torch.zeros(2, 8).to_sparse(), TypeError, "dense"),
    "no memory": (lambda: torch.zeros(2, 8, device="meta"), TypeError, "host memory"),
    "other terms": (lambda: torch.zeros(2, 9), ValueError, "rows of 9 numbers with a weight of 5 x 8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_multiplied_is_refused(own, name):
    make, kind, said = HOSTILE[name]
    with pytest.raises(kind, match=said):
        own.multiply(make(), own.pack(torch.zeros(5, 8)))


def test_weights_that_cannot_be_packed_or_do_not_fit_each_other_are_refused(own):
    for bad, kind in ((torch.zeros(0, 8), ValueError), (torch.zeros(8, 0), ValueError), (torch.zeros(8), TypeError)):
        with pytest.raises(kind, match="weight"):
            own.pack(bad)
    gate = own.pack(torch.zeros(5, 8))
    for other in (torch.zeros(6, 8), torch.zeros(5, 9), torch.zeros(5, 8, dtype=BRAIN)):
        with pytest.raises(ValueError, match="gate"):
            own.multiply(torch.zeros(2, 8), gate, own.pack(other))


LIST = Products((Weight(64, 48), Weight(96, 64, gated=True)), (Heads(2, 16, 512),), (4, 8, 16, 64), (1, 2))


class Flawed(CpuKernels):
    """Their own products see their neighbours; oneDNN's do not."""

    def _multiply_native(self, x, weight, up=None):
        return super()._multiply_native(x + x.abs().sum() * 1e-7, weight, up)


class OnlyOwn(CpuKernels):
    def ways(self, *, wider):
        return (NATIVE,)


@pytest.fixture
def installed(own, monkeypatch):
    """Let the library seem to have been compiled at installation."""
    monkeypatch.setattr(compiled, "load_library", lambda: (own.compiled, ""))
    monkeypatch.delenv(compiled.SWITCH, raising=False)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, torch.float16])
def test_they_are_proven_as_all_others_are_and_agree_at_every_count_of_rows(installed, two_threads, dtype):
    proof = OnlyOwn(dtype).prove(LIST)
    assert [(one.way, one.rows) for one in proof.plan.weights] == [(NATIVE, LIST.rows)] * 2
    assert not proof.failures
    assert OnlyOwn(dtype).name.startswith("native-")


def test_flawed_ones_serve_nobody_and_whoever_serves_instead_is_no_failure(installed, two_threads):
    proof = Flawed(FLOAT).prove(LIST)
    assert {one.way for one in proof.plan.weights} == {"float32"}
    assert proof.failures == ()


def test_half_precision_is_kept_in_float32_where_there_is_room_for_that(installed):
    assert CpuKernels(torch.float16).ways(wider=True)[0] == NATIVE
    assert NATIVE not in CpuKernels(torch.float16).ways(wider=False)
    assert CpuKernels(BRAIN).ways(wider=False)[0] == NATIVE


def test_the_environment_turns_them_off_and_the_name_tells(installed, monkeypatch):
    on = build_kernels(torch.device("cpu"), FLOAT)
    monkeypatch.setenv(compiled.SWITCH, "off")
    off = build_kernels(torch.device("cpu"), FLOAT)
    assert (on.name, off.name) == (f"native-{off.name}", CpuKernels(FLOAT, own=False).name)
    assert NATIVE not in off.ways(wider=True)
    assert compiled.explain_missing() == "turned off by REKINDLE_NATIVE"
    monkeypatch.setenv(compiled.SWITCH, "perhaps")
    with pytest.raises(UserError, match="REKINDLE_NATIVE=perhaps: accepted: on, off"):
        build_kernels(torch.device("cpu"), FLOAT)


def test_a_plan_may_name_them_and_no_other_way():
    plan = CpuKernels(FLOAT, own=False).prove(LIST).plan
    ours = evolve(plan, weights=tuple(evolve(one, way=NATIVE) for one in plan.weights))
    assert check_plan(ours) == ours
    assert ours.bit_signature() != plan.bit_signature()
    with pytest.raises(ValueError, match="unknown way"):
        check_plan(evolve(plan, weights=(ServedWeight(LIST.weights[0], "magic", (4,), 4),)))


def test_a_library_of_other_sources_or_none_is_not_loaded(compiled_folder, tmp_path):
    found, why = compiled.open_library(tmp_path)
    assert (found, why[:20]) == (None, "no compiled products")
    shutil.copytree(compiled_folder, tmp_path / "stale")
    (tmp_path / "stale" / "tiles.h").write_text("// other\n")
    found, why = compiled.open_library(tmp_path / "stale")
    assert found is None
    assert "install again" in why


def test_what_is_there_of_these_sources_is_not_compiled_again(compiled_folder, tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    folder = tmp_path / hatch_build.FOLDER
    shutil.copytree(compiled_folder, folder)
    library = folder / hatch_build.FILE
    library.touch()
    assert hatch_build.current(tmp_path)
    monkeypatch.setenv("CC", "another")
    assert not hatch_build.current(tmp_path)
    monkeypatch.delenv("CC")
    os.utime(library, (0, 0))  # older than what says how it is made
    assert not hatch_build.current(tmp_path)
    library.touch()
    before = (folder / "tiles.h").read_bytes()
    (folder / "tiles.h").write_text("// other\n")
    assert not hatch_build.current(tmp_path)
    (folder / "tiles.h").write_bytes(before)
    assert hatch_build.current(tmp_path)
    library.unlink()
    assert not hatch_build.current(tmp_path)


def test_where_nothing_can_be_compiled_there_is_no_library_and_no_error(tmp_path, monkeypatch, capfd):
    (tmp_path / hatch_build.FOLDER).mkdir(parents=True)
    for name in hatch_build.SOURCES:
        (tmp_path / hatch_build.FOLDER / name).write_text("this is no C\n")
    assert hatch_build.compiled(tmp_path) is None
    assert "without products of its own" in capfd.readouterr().err
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hatch_build.compiled(tmp_path) is None
    assert "no C compiler" in capfd.readouterr().err


def test_the_hook_and_the_loader_mean_the_same_files():
    assert (hatch_build.SOURCES, hatch_build.FILE) == (compiled.SOURCES, compiled.FILE)
    assert ROOT / hatch_build.FOLDER == compiled.FOLDER
