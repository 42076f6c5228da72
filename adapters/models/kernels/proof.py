"""Proves the closed list of products on this machine, and picks what serves fastest among the proven.

Row counts fall into groups within which a row gets the same bits: wherever it stands, whatever its neighbours are (even
if they are not numbers), at every thread count that serves. How a library cuts a sum depends on the shape, the
processor and the threads, so nothing is presumed: every shape that can be asked for is multiplied. The numbers are made
so that each sum cancels: what is left is rounding, and any other order of adding shows in nearly every element.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.models.kernels.products import (
    QUERIES,
    SCORES,
    TILE,
    Attention,
    Heads,
    ProductPlan,
    Products,
    Served,
    Weight,
    spans,
)

TERMS = (1024, 512, 256)  # keys of one product with values; the longest that can be proven saves the most calls
COUNTS = (4, 8, 16, 32, 64, 128, 256, 512)  # query rows that attend together
DECODES = 32  # decode steps that weigh as much as the prefill of one chunk when ways are compared
MARGIN = 0.8  # of the time of the model's own dtype is what another one must beat: the choice should not waver
_MOST = 1 << 22  # random elements of a weight; a larger one repeats them
_RUNS = 4
_WHOLE = {2: torch.int16, 4: torch.int32}

TrialT = TypeVar("TrialT", bound="Trial")


class Multiplier(Protocol):
    """The products themselves, in no particular pieces. Overridden by nothing but tests."""

    def dtypes(self) -> Sequence[torch.dtype]:
        """What products may be computed in, the preferred one first."""
        ...

    def reorder(self, weight: Tensor) -> Tensor: ...

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """`[M, K]`, `[N, K]` -> `[M, N]`."""
        ...

    def multiply_gated(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor: ...


@frozen
class Proof:
    """plan: what serves; None for kernels that need none, or if some product agrees with itself at no row count.

    holds: any row count of a step may serve. shapes: how many products were proven. checks: how many comparisons that
    took. single: one thread gives the same bits, so the thread count is no part of the numerics class. digest: of the
    bits that came out.
    """

    plan: ProductPlan | None
    holds: bool = True
    shapes: int = 0
    checks: int = 0
    failures: tuple[str, ...] = ()
    single: bool = True
    digest: str = ""


@define(eq=False)
class Group:
    """Row counts that agree. reference: every row of the trial's x, as they all compute it."""

    rows: list[int]
    reference: Tensor


@define(eq=False)
class Trial:
    """One product, tried with rows of x `[C, K]`. threads: under which it may be asked for."""

    name: str
    x: Tensor
    threads: tuple[int, ...]
    multiply: Callable[[Tensor], Tensor]
    checks: int = 0
    failures: list[str] = field(factory=list)

    def whole(self, count: int, threads: int) -> Tensor:
        torch.set_num_threads(threads)
        return torch.cat([self.multiply(part) for part in torch.split(self.x, count)])

    def same(self, found: Tensor, expected: Tensor) -> bool:
        self.checks += 1
        whole = _WHOLE[found.itemsize]  # whole elements, wherever they lie: by the byte it took most of a proof's time
        return torch.equal(found.view(whole), expected.view(whole))

    def agrees(self, count: int, reference: Tensor, threads: int) -> str | None:
        """None, or how a row of such a product differs from its reference."""
        torch.set_num_threads(threads)
        x, last = self.x, len(self.x) - count
        for at in sorted({0, last}):
            if not self.same(self.multiply(x[at : at + count]), reference[at : at + count]):
                return f"{count} rows differ from {{}} ({threads} threads)"
        moved, expected = rolled(x, count), rolled(reference, count)
        if not self.same(self.multiply(moved), expected):
            return f"{count} rows: where a row stands changes it ({threads} threads)"
        for others, said in ((0.0, "its neighbours"), (float("nan"), "a neighbour that is not a number")):
            for at, row in ((0, len(x) - 1), (count - 1, 0)):
                beside = torch.full_like(x[:count], others)
                beside[at] = x[row]
                if not self.same(self.multiply(beside)[at], reference[row]):
                    return f"{count} rows: {said} change a row ({threads} threads)"
        return None

    def groups(self, counts: Sequence[int]) -> list[Group]:
        """Each count in the first group that it agrees with; one that does not even agree with itself in none."""
        found: list[Group] = []
        for count in counts:
            home = next((group for group in found if self.differs(count, group.reference) is None), None)
            if home is not None:
                home.rows.append(count)
                continue
            own = self.whole(count, self.threads[0])
            why = self.differs(count, own)
            if why is None:
                found.append(Group([count], own))
            else:
                self.failures.append(f"{self.name}: {why.format('themselves')}")
        return found

    def differs(self, count: int, reference: Tensor) -> str | None:
        return next((why for one in self.threads if (why := self.agrees(count, reference, one)) is not None), None)

    def seconds(self, count: int, threads: int) -> float:
        torch.set_num_threads(threads)
        part, best = self.x[:count], float("inf")
        for _ in range(_RUNS):
            start = time.perf_counter()
            self.multiply(part)
            best = min(best, time.perf_counter() - start)
        return best


@define(eq=False)
class ScoresTrial(Trial):
    """Queries times keys: besides the row count, how many keys there are changes from step to step."""

    keys: Tensor = field(kw_only=True)
    spans: tuple[int, ...] = field(kw_only=True)
    product: Callable[[Tensor, Tensor], Tensor] = field(kw_only=True)
    least: int = field(kw_only=True)

    def agrees(self, count: int, reference: Tensor, threads: int) -> str | None:
        why = super().agrees(count, reference, threads)
        if why is not None:
            return why
        moved, expected = rolled(self.x, count), rolled(reference, count)
        for span in self.spans:
            if count <= max(self.least, SCORES // span):
                found = self.product(moved, self.keys[:span])
                if not self.same(found, expected[:, :span]):
                    return f"{count} rows over {span} keys differ from {{}} over {len(self.keys)} ({threads} threads)"
        return None


@define(eq=False)
class ValuesTrial(Trial):
    """Weights times values: fewer keys than `terms` must give what the missing ones with weight zero give."""

    values: Tensor = field(kw_only=True)  # [K, hd]
    product: Callable[[Tensor, Tensor], Tensor] = field(kw_only=True)

    def agrees(self, count: int, reference: Tensor, threads: int) -> str | None:
        why = super().agrees(count, reference, threads)
        if why is not None:
            return why
        for terms in range(TILE, len(self.values), TILE):
            short = self.x[:count, :terms].contiguous()
            padded = torch.zeros_like(self.x[:count])
            padded[:, :terms] = short
            if not self.same(self.product(short, self.values[:terms]), self.multiply(padded)):
                return f"{count} rows: {terms} values and {len(self.values)} differ ({threads} threads)"
        return None


@define(eq=False)
class Prover:
    """Collects what was found over all products. known: proven here before, with the same kernels."""

    kernels: Multiplier
    products: Products
    threads: tuple[int, int]
    known: ProductPlan | None = None
    checks: int = 0
    shapes: int = 0
    single: bool = True
    failures: list[str] = field(factory=list)
    digest: hashlib.blake2b = field(factory=lambda: hashlib.blake2b(digest_size=8))

    def run(self) -> ProductPlan | None:
        weights = [self.weight(weight) for weight in self.products.weights]
        heads = [self.attention(heads) for heads in self.products.heads]
        served = tuple(one for one in weights if one is not None)
        attended = tuple(one for one in heads if one is not None)
        if len(served) < len(weights) or len(attended) < len(heads):
            return None
        return ProductPlan(self.products.rows, self.threads, served, attended)

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        found = self.kernels.dtypes()
        return found if self.products.wider else found[:1]

    @property
    def regimes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.threads))

    def cost(self, trial: Trial, rows: Sequence[int], chunk: int) -> tuple[float, int]:
        """Seconds of a chunk and some decode steps, and the pieces in which a chunk is quickest."""
        narrow, wide = self.threads
        times = {count: trial.seconds(count, wide) * (chunk / count) for count in rows}
        best = max(times)
        for count, seconds in times.items():
            best = count if seconds < MARGIN * times[best] else best
        return times[best] + DECODES * trial.seconds(rows[0], narrow), best

    def quickest_first(self, trials: Sequence[TrialT], counts: Sequence[int]) -> list[tuple[float, float, TrialT]]:
        """(seconds if nothing were cut, factor, trial), one trial for each dtype in the order of preference."""
        narrow, wide = self.threads
        found = []
        for trial, factor in zip(trials, (MARGIN, 1.0), strict=False):
            seconds = trial.seconds(counts[-1], wide) + DECODES * trial.seconds(counts[0], narrow)
            found.append((seconds * factor, factor, trial))
        return sorted(found, key=lambda one: one[0])

    def weight(self, weight: Weight) -> Served | None:
        if (known := self._known()) is not None:
            for served in known.weights:
                if served.weight == weight and served.weight.most >= weight.most:
                    return served
        counts = [count for count in self.products.rows if count <= weight.most] or list(self.products.rows[:1])
        best: tuple[float, Served, Trial, Group] | None = None
        trials = [self._weight_trial(weight, counts[-1], dtype) for dtype in self.dtypes]
        for bound, factor, trial in self.quickest_first(trials, counts):
            if best is not None and best[0] <= bound:
                continue  # even uncut it would be slower
            for group in trial.groups(counts):
                seconds, piece = self.cost(trial, group.rows, counts[-1])
                if best is None or seconds * factor < best[0]:
                    served = Served(weight, name_of(trial.x.dtype), tuple(group.rows), piece)
                    best = (seconds * factor, served, trial, group)
            self._count(trial)
        if best is None:
            return None
        _, served, trial, group = best
        self._keep(trial, group, len(group.rows) * len(self.regimes))
        return served

    def _weight_trial(self, weight: Weight, chunk: int, dtype: torch.dtype) -> Trial:
        kernels, name = self.kernels, f"{weight.inputs} to {weight.outputs} in {name_of(dtype)}"
        x, w = cancelling(chunk, weight.outputs, weight.inputs, dtype)
        packed = kernels.reorder(w)
        if not weight.gated:
            return Trial(name, x, self.regimes, lambda rows: kernels.multiply(rows, packed))
        up = kernels.reorder(w.roll(1, 0))
        return Trial(f"gated {name}", x, self.regimes, lambda rows: kernels.multiply_gated(rows, packed, up))

    def attention(self, heads: Heads) -> Attention | None:
        least = next(count for count in COUNTS if count >= heads.group)
        counts = [count for count in COUNTS if count <= max(QUERIES, least)]
        if (served := self._further(heads, counts[-1], least)) is not None:
            return served
        scores = self._scores_trial(heads, counts[-1], least, spans(heads.keys))
        scored = scores.groups(counts)
        self._count(scores)
        best: tuple[float, Attention, Group, ValuesTrial, Group] | None = None
        longest = [self._values_trial(heads, counts[-1], TERMS[0], dtype) for dtype in self.dtypes]
        for bound, factor, trial in self.quickest_first(longest, counts):
            if best is not None and best[0] <= bound / TERMS[0]:
                continue
            for terms in TERMS:  # longer sums mean fewer calls
                values = self._values_trial(heads, counts[-1], terms, trial.x.dtype)
                ways = self._ways(heads, values.groups(counts), scored)
                self._count(values)
                for rows, group, weighed in ways:
                    seconds = self.cost(values, rows, counts[-1])[0] / terms * factor
                    if best is None or seconds < best[0]:
                        served = Attention(heads, name_of(trial.x.dtype), rows, terms)
                        best = (seconds, served, group, values, weighed)
                if ways:
                    break
        if best is None:
            self.failures.append(f"attention of {heads.group} query heads of {heads.size}: nothing agrees")
            return None
        _, served, group, values, weighed = best
        each = len(served.rows) * len(self.regimes)
        self._keep(scores, Group(list(served.rows), group.reference), each * len(scores.spans))
        self._keep(values, Group(list(served.rows), weighed.reference), each * (served.terms // TILE))
        return served

    @staticmethod
    def _ways(heads: Heads, weighed: list[Group], scored: list[Group]) -> list[tuple[tuple[int, ...], Group, Group]]:
        """Row counts at which both products agree, if a position's queries fit into one of them."""
        found = []
        for values in weighed:
            for scores in scored:
                rows = tuple(count for count in values.rows if count in scores.rows)
                if rows and rows[-1] >= heads.group:
                    found.append((rows, scores, values))
        return found

    def _known(self) -> ProductPlan | None:
        """What holds here, too: it was proven for the same row counts and threads."""
        known = self.known
        same = known is not None and (known.steps, known.threads) == (self.products.rows, self.threads)
        return known if same else None

    def _further(self, heads: Heads, rows: int, least: int) -> Attention | None:
        """What is known of such attention, if it holds over the keys that it was not proven for, too.

        Those are multiplied, and compared with a span that was proven: it ties them to all others.
        """
        of = (heads.group, heads.size)
        all_known = () if (known := self._known()) is None else known.heads
        served = next((one for one in all_known if (one.heads.group, one.heads.size) == of), None)
        if served is None:
            return None
        before, wanted = set(spans(served.heads.keys)), set(spans(heads.keys))
        if wanted <= before:
            return evolve(served, heads=heads)
        if not wanted & before:
            return None
        trial = self._scores_trial(heads, rows, least, (max(wanted & before), *sorted(wanted - before)))
        groups = trial.groups(served.rows)
        self._count(trial)
        return evolve(served, heads=heads) if [group.rows for group in groups] == [list(served.rows)] else None

    def _scores_trial(self, heads: Heads, rows: int, least: int, found: tuple[int, ...]) -> ScoresTrial:
        x, keys = cancelling(rows, heads.keys, heads.size, torch.float32)
        kernels, name = self.kernels, f"scores of heads of {heads.size}"
        return ScoresTrial(
            name,
            x,
            self.regimes,
            lambda some: kernels.multiply(some, keys),
            keys=keys,
            spans=found,
            product=kernels.multiply,
            least=least,
        )

    def _values_trial(self, heads: Heads, rows: int, terms: int, dtype: torch.dtype) -> ValuesTrial:
        x, w = cancelling(rows, heads.size, terms, dtype)
        values, kernels = w.t().contiguous(), self.kernels
        name = f"{terms} values of heads of {heads.size} in {name_of(dtype)}"

        def product(some: Tensor, those: Tensor) -> Tensor:
            return kernels.multiply(some, those.t())

        return ValuesTrial(name, x, self.regimes, lambda some: product(some, values), values=values, product=product)

    def _count(self, trial: Trial) -> None:
        self.checks += trial.checks
        if trial.failures:
            more = len(trial.failures) - 1
            self.failures.append(trial.failures[0] + (f", and {more} more" if more else ""))

    def _keep(self, trial: Trial, group: Group, shapes: int) -> None:
        self.shapes += shapes
        if 1 not in self.threads and trial.agrees(group.rows[0], group.reference, 1) is not None:
            self.single = False
        self.digest.update(bits(group.reference[:, :TILE]).numpy().data)  # the same however many keys there are


def prove(kernels: Multiplier, products: Products, known: ProductPlan | None = None) -> Proof:
    """Takes a second or so for a small model, more for wide layers; the thread count is left as it was.

    known: proven with the same kernels on this machine, and so not again. The digest is of what was multiplied now.
    """
    narrow, wide = products.threads
    failures: list[str] = []
    checks = 0
    with threads_kept(), torch.inference_mode():
        for threads in dict.fromkeys(((narrow, wide), (wide, wide))):
            prover = Prover(kernels, products, threads, known)
            plan = prover.run()
            checks += prover.checks
            failures += prover.failures
            if plan is not None:
                digest = prover.digest.hexdigest()
                return Proof(plan, True, prover.shapes, checks, tuple(failures), prover.single, digest)
    return Proof(None, False, 0, checks, tuple(failures))


@contextmanager
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cancelling(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[rows, inputs]` and w `[outputs, inputs]` whose products are sums of pairs that cancel each other.

    The same for the same shape. Rounded to bfloat16 an ordinary sum hides most changes of its order; of such a sum
    only rounding errors are left, which no other order repeats.
    """
    generator = torch.Generator().manual_seed(rows * 31 + inputs)
    half, own = -(-inputs // 2), max(1, min(outputs, _MOST // inputs))
    order = torch.randperm(half, generator=generator)
    x = torch.randn(rows, half, generator=generator)
    w = torch.randn(own, half, generator=generator)
    x = torch.cat((x, -x[:, order]), 1)[:, :inputs]
    w = torch.cat((w, w[:, order]), 1)[:, :inputs].to(dtype)
    return x.to(dtype).contiguous(), w.repeat(-(-outputs // own), 1)[:outputs].contiguous()


def rolled(rows: Tensor, count: int) -> Tensor:
    """The last row, and the first ones behind it."""
    return torch.cat((rows[-1:], rows[: count - 1]))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
