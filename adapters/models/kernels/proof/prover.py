"""Proves the closed list of products on this machine, and picks what serves fastest among the proven.

Row counts fall into groups within which a row gets the same bits: wherever it stands, whatever its neighbours are (even
if they are not numbers), at every thread count that serves. How a library cuts a sum depends on the shape, the
processor and the threads, so nothing is presumed: every shape that can be asked for is multiplied (`trials.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from attrs import define, evolve, field

from adapters.models.kernels.delta_interface import DeltaShape
from adapters.models.kernels.multiplier import Multiplier
from adapters.models.kernels.product_list import (
    BATCHED,
    COUNTS,
    NATIVE,
    PACKED,
    QUERIES,
    TILE,
    Heads,
    ProductPlan,
    Products,
    Proof,
    Served,
    ServedDelta,
    ServedHeads,
    Weight,
    batched,
    spans,
)
from adapters.models.kernels.proof.rule_trials import rule_seconds, rule_trial
from adapters.models.kernels.proof.trials import (
    Group,
    Trial,
    ValuesTrial,
    attention_trial,
    batched_trial,
    bits,
    packed_trial,
    scores_trial,
    threads_kept,
    values_trial,
    weight_trial,
)

TERMS = (1024, 512, 256)  # keys of one product with values; the longest that can be proven saves the most calls
DECODES = 32  # decode steps that weigh as much as the prefill of one chunk when ways are compared
# Of the time of packed weights is what unpacked ones must beat. They take the room of two to four, and are tried on a
# weight that stays in the processor's caches, where those of a step do not.
WORTH_UNPACKING = 0.5
IN_TURN = 3  # times, one after the other: a machine that was busy once would decide for good
MARGIN = 0.8  # of the time of a preferred way is what the next one must beat: the choice should not waver

TrialT = TypeVar("TrialT", bound="Trial")


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
    unpacked: dict[Weight, Callable[[], float]] = field(factory=dict[Weight, Callable[[], float]])
    digest: hashlib.blake2b = field(factory=lambda: hashlib.blake2b(digest_size=8))

    def run(self) -> ProductPlan | None:
        weights = [self.weight(weight) for weight in self.products.weights]
        heads = [self.attention(heads) for heads in self.products.heads]
        served = tuple(one for one in weights if one is not None)
        attended = tuple(one for one in heads if one is not None)
        deltas = [self.delta(delta) for delta in self.products.deltas]
        recurrent = tuple(one for one in deltas if one is not None)
        if len(served) < len(weights) or len(attended) < len(heads) or len(recurrent) < len(deltas):
            return None
        packed = tuple(one for weight in self.products.packed if (one := self.packed(weight)) is not None)
        return ProductPlan(self.products.rows, self.threads, served, attended, recurrent, packed)

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
        return times[best] + DECODES * trial.of_a_step(rows[0], narrow), best

    def quickest_first(self, trials: Sequence[TrialT], counts: Sequence[int]) -> list[tuple[float, float, TrialT]]:
        """(seconds if nothing were cut, factor, trial), one trial for each way in the order of preference."""
        narrow, wide = self.threads
        found = []
        for less, trial in enumerate(reversed(trials)):
            seconds = trial.seconds(counts[-1], wide) + DECODES * trial.of_a_step(counts[0], narrow)
            found.append((seconds * MARGIN**less, MARGIN**less, trial))
        return sorted(found, key=lambda one: one[0])

    def weight(self, weight: Weight) -> Served | None:
        if (known := self._known()) is not None:
            for served in known.weights:
                if served.weight == weight and served.weight.most >= weight.most:
                    return served
        counts = [count for count in self.products.rows if count <= weight.most] or list(self.products.rows[:1])
        best: tuple[float, Served, Trial, Group] | None = None
        ways = self.kernels.ways(wider=self.products.wider)
        trials = [weight_trial(self.kernels, weight, counts[-1], way, self.regimes) for way in ways]
        failures = list[str]()
        for bound, factor, trial in self.quickest_first(trials, counts):
            if best is not None and best[0] <= bound:
                continue  # even uncut it would be slower
            for group in trial.groups(counts):
                seconds, piece = self.cost(trial, group.rows, counts[-1])
                if best is None or seconds * factor < best[0]:
                    served = Served(weight, trial.way, tuple(group.rows), piece)
                    best = (seconds * factor, served, trial, group)
            failures += self._counted(trial)
        if best is None:
            self.failures += failures
            return None
        _, served, trial, group = best
        if self.products.packed and self.products.unpacked:
            self.unpacked[weight] = lambda: self.cost(trial, group.rows, counts[-1])[0]
        self._keep(trial, group, len(group.rows) * len(self.regimes))
        return served

    def packed(self, weight: Weight) -> Served | None:
        """None where it is to be unpacked: nothing multiplies it as it is, not at every row count, or it is slower."""
        if (known := self._known()) is not None:
            return next((served for served in known.packed if served.weight == weight), None)
        counts = [count for count in self.products.rows if count <= weight.most] or list(self.products.rows[:1])
        trial = packed_trial(self.kernels, weight, counts[-1], self.regimes)
        if trial is None:
            return None
        groups = trial.groups(counts)
        self._counted(trial)
        if [group.rows for group in groups] != [counts]:
            return None
        whole = Weight(weight.part_of or weight.outputs, weight.inputs, weight.gated)
        # Of all of it: a call takes its time, however small a part is.
        unpacked = self.unpacked.get(whole, lambda: float("inf"))
        if all(unpacked() < WORTH_UNPACKING * self.cost(trial, counts, counts[-1])[0] for _ in range(IN_TURN)):
            return None
        self._keep(trial, groups[0], len(counts) * len(self.regimes))
        return Served(weight, PACKED, tuple(counts), counts[-1])

    def attention(self, heads: Heads) -> ServedHeads | None:
        if (served := self._own_attention(heads)) is not None:
            return served
        least = next(count for count in COUNTS if count >= heads.group)
        counts, multiply = [count for count in COUNTS if count <= max(QUERIES, least)], self.kernels.multiply
        if (served := self._further(heads, counts[-1], least)) is not None:
            return served
        scores = scores_trial(multiply, heads, (counts[-1], least), spans(heads.keys), self.regimes)
        scored = scores.groups(counts)
        failures = self._counted(scores)
        best: tuple[float, ServedHeads, Group, ValuesTrial, Group] | None = None
        longest = [values_trial(multiply, heads, counts[-1], TERMS[0], dtype, self.regimes) for dtype in self.dtypes]
        for bound, factor, trial in self.quickest_first(longest, counts):
            if best is not None and best[0] <= bound / TERMS[0]:
                continue
            for terms in TERMS:  # longer sums mean fewer calls
                values = values_trial(multiply, heads, counts[-1], terms, trial.x.dtype, self.regimes)
                ways = self._ways(heads, values.groups(counts), scored)
                failures += self._counted(values)
                for rows, group, weighed in ways:
                    seconds = self.cost(values, rows, counts[-1])[0] / terms * factor
                    if best is None or seconds < best[0]:
                        served = ServedHeads(heads, trial.way, rows, terms)
                        best = (seconds, served, group, values, weighed)
                if ways:
                    break
        if best is None:
            self.failures += [*failures, f"attention of {heads.group} query heads of {heads.size}: nothing agrees"]
            return None
        _, served, group, values, weighed = best
        each = len(served.rows) * len(self.regimes)
        self._keep(scores, Group(list(served.rows), group.reference), each * len(scores.spans))
        self._keep(values, Group(list(served.rows), weighed.reference), each * (served.terms // TILE))
        return served

    def _own_attention(self, heads: Heads) -> ServedHeads | None:
        """None where there is none. Its tiles stand where they stand, so how many keys there are is not on the list."""
        own, rows = self.kernels.own_attention, self.products.rows
        if own is None:
            return None
        known = self._known_heads(heads)
        if known is not None and known.dtype == NATIVE:
            return evolve(known, heads=heads)
        trial = attention_trial(own, self.kernels.rows_in(NATIVE), (heads.group, heads.size), rows[-1], self.regimes)
        groups = trial.groups(rows)
        self._counted(trial)
        if [group.rows for group in groups] != [list(rows)]:
            return None
        self._keep(trial, groups[0], len(rows) * len(self.regimes))
        return ServedHeads(heads, NATIVE, rows, TILE)

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

    def delta(self, delta: DeltaShape) -> ServedDelta | None:
        """The counts at which all batched products of such a layer agree: the group of the most rows of the first one,
        as far as the others agree on it.
        """
        known = None if (plan := self._known()) is None else plan.deltas
        served = next((one for one in known or () if one.delta == delta), None)
        served = served or self._own_rule(delta)
        if served is not None:
            return served
        rows: list[int] = [*BATCHED]
        proven = list[tuple[Trial, Group]]()
        for heads, terms, outputs in batched(delta):
            trial = batched_trial(BATCHED[-1], (heads, terms, outputs), self.regimes)
            groups = trial.groups(rows)
            failures = self._counted(trial)
            if not groups:
                self.failures += [*failures, f"{trial.name}: nothing agrees"]
                return None
            best = max(groups, key=lambda group: len(group.rows))
            rows = best.rows
            proven.append((trial, best))
        for trial, group in proven:
            self._keep(trial, Group(rows, group.reference), len(rows) * len(self.regimes))
        return ServedDelta(delta, tuple(rows))

    def _own_rule(self, delta: DeltaShape) -> ServedDelta | None:
        """None where there is none, or batched products are quicker. In what pieces a slot's rows may come is tried
        layer by layer (`state_probe.py`).
        """
        own = self.kernels.own_rule(delta)
        rows = self.products.rows
        if own is None:
            return None
        ways = (own, self.kernels.batched_rule())
        times = [rule_seconds(kernels, delta, rows[-1], self.threads, DECODES) for kernels in ways]
        if times[1] < MARGIN * times[0]:
            return None
        trial = rule_trial(own, delta, rows[-1], self.regimes)
        groups = trial.groups(rows)
        self._counted(trial)
        if [group.rows for group in groups] != [list(rows)]:
            return None
        self._keep(trial, groups[0], len(rows) * len(self.regimes))
        return ServedDelta(delta, rows, NATIVE)

    def _known(self) -> ProductPlan | None:
        """What holds here, too: it was proven for the same row counts and threads."""
        known = self.known
        same = known is not None and (known.steps, known.threads) == (self.products.rows, self.threads)
        return known if same else None

    def _known_heads(self, heads: Heads) -> ServedHeads | None:
        known = () if (plan := self._known()) is None else plan.heads
        return next((one for one in known if (one.heads.group, one.heads.size) == (heads.group, heads.size)), None)

    def _further(self, heads: Heads, rows: int, least: int) -> ServedHeads | None:
        """What is known of such attention, if it holds over the keys that it was not proven for, too.

        Those are multiplied, and compared with a span that was proven: it ties them to all others.
        """
        served = self._known_heads(heads)
        if served is None or served.dtype == NATIVE:
            return None
        before, wanted = set(spans(served.heads.keys)), set(spans(heads.keys))
        if wanted <= before:
            return evolve(served, heads=heads)
        if not wanted & before:
            return None
        tied = (max(wanted & before), *sorted(wanted - before))
        trial = scores_trial(self.kernels.multiply, heads, (rows, least), tied, self.regimes)
        groups = trial.groups(served.rows)
        self._counted(trial)
        return evolve(served, heads=heads) if [group.rows for group in groups] == [list(served.rows)] else None

    def _counted(self, trial: Trial) -> list[str]:
        """Its failures in a line. They are told where nothing was left to serve: which other ways are tried at all
        depends on times, and what is told should not.
        """
        self.checks += trial.checks
        more = len(trial.failures) - 1
        return [trial.failures[0] + (f", and {more} more" if more else "")] if trial.failures else []

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
