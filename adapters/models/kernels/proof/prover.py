"""Proves the closed list of products on this machine, and picks one way among the proven ones.

Row counts fall into groups within which a row gets the same bits: wherever it stands, whatever its neighbours are
(even NaN), and on every thread count that serves. How a library cuts a sum depends on the shape, the processor and
the threads. So nothing is presumed, and every shape that can be asked for is multiplied (`trials.py`).

Ways and groups differ in bits, so no measured time may choose among them: times differ from start to start. They are
taken in an order of preference, and by the number of rows that a workload would multiply (`estimate_rows`). A time
chooses only the piece of a wide step, because all pieces of a group give the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from attrs import define, evolve, field

from adapters.models.kernels.interfaces.delta_interface import DeltaShape
from adapters.models.kernels.interfaces.multiplier import Multiplier
from adapters.models.kernels.interfaces.product_list import (
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
    ServedDelta,
    ServedHeads,
    ServedWeight,
    Weight,
    is_unpacked,
    list_batched_products,
    list_spans,
)
from adapters.models.kernels.proof.rule_trials import make_rule_trial
from adapters.models.kernels.proof.trials import (
    Group,
    Trial,
    ValuesTrial,
    find_agreeing_rows,
    make_attention_trial,
    make_batched_trial,
    make_packed_trial,
    make_scores_trial,
    make_values_trial,
    make_weight_trial,
    restore_threads,
    view_bytes,
)

TERMS = (1024, 512, 256)  # keys of one product with values; the longest that can be proven saves the most calls
DECODES = 32  # decode steps that weigh as much as the prefill of one chunk when groups are compared
READING = 16  # rows whose products take as long as reading the weight once
LESS = 0.5  # a less preferred way must need less than this part of the rows: its products may take twice as long
MARGIN = 0.8  # a piece of fewer rows must take less than this part of the time
MAY_UNPACK = True  # benchmarks of packed products turn it off


@define(eq=False)
class Prover:
    """One proof of all products for one pair of thread counts. known: a plan that was proven here before, with the
    same kernels.
    """

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
        weights = [self.prove_weight(weight) for weight in self.products.weights]
        heads = [self.prove_attention(heads) for heads in self.products.heads]
        served = tuple(one for one in weights if one is not None)
        attended = tuple(one for one in heads if one is not None)
        deltas = [self.prove_delta(delta) for delta in self.products.deltas]
        recurrent = tuple(one for one in deltas if one is not None)
        if len(served) < len(weights) or len(attended) < len(heads) or len(recurrent) < len(deltas):
            return None
        packed = tuple(one for weight in self.products.packed if (one := self.prove_packed(weight)) is not None)
        return ProductPlan(self.products.rows, self.threads, served, attended, recurrent, packed)

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        found = self.kernels.attention_dtypes()
        return found if self.products.wider else found[:1]

    @property
    def thread_counts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.threads))

    def choose_piece(self, trial: Trial, rows: Sequence[int]) -> int:
        """Return the piece in which a chunk is quickest. All of them give the same bits, so the time may decide."""
        times = {count: trial.measure(count, self.threads[1]) / count for count in rows}
        best = max(times)
        for count, seconds in times.items():
            best = count if seconds < MARGIN * times[best] else best
        return best

    def prove_weight(self, weight: Weight) -> ServedWeight | None:
        if (known := self._known_plan()) is not None:
            for served in known.weights:
                if served.weight == weight and served.weight.most >= weight.most:
                    return served
        counts = [count for count in self.products.rows if count <= weight.most] or list(self.products.rows[:1])
        least = estimate_rows(counts, counts[-1])
        best: tuple[float, Trial, Group] | None = None
        failures = list[str]()
        for way in self.kernels.ways(wider=self.products.wider):
            if best is not None and best[0] * LESS <= least:
                break  # it would not be taken even if all counts agreed
            trial = make_weight_trial(self.kernels, weight, counts[-1], way, self.thread_counts)
            for group in trial.find_groups(counts):
                rows = estimate_rows(group.rows, counts[-1])
                if best is None or rows < best[0] * (LESS if trial.way != best[1].way else 1):
                    best = (rows, trial, group)
            failures += self._count_checks(trial)
        if best is None:
            self.failures += failures
            return None
        _, trial, group = best
        self._add_to_digest(trial, group, len(group.rows) * len(self.thread_counts))
        return ServedWeight(weight, trial.way, tuple(group.rows), self.choose_piece(trial, group.rows))

    def prove_packed(self, weight: Weight) -> ServedWeight | None:
        """Prove a packed weight. None where it is to be unpacked: by `is_unpacked`, or because nothing multiplies it
        packed, or not at every row count.
        """
        if (known := self._known_plan()) is not None:
            return next((served for served in known.packed if served.weight == weight), None)
        assert weight.layout is not None
        if MAY_UNPACK and self.kernels.has_tiles and is_unpacked(self.products, weight.layout):
            return None
        counts = [count for count in self.products.rows if count <= weight.most] or list(self.products.rows[:1])
        trial = make_packed_trial(self.kernels, weight, counts[-1], self.thread_counts)
        if trial is None:
            return None
        groups = trial.find_groups(counts)
        self._count_checks(trial)
        if [group.rows for group in groups] != [counts]:
            return None
        self._add_to_digest(trial, groups[0], len(counts) * len(self.thread_counts))
        return ServedWeight(weight, PACKED, tuple(counts), counts[-1])

    def prove_attention(self, heads: Heads) -> ServedHeads | None:
        if (served := self._prove_native_attention(heads)) is not None:
            return served
        least = next(count for count in COUNTS if count >= heads.group)
        counts = [count for count in COUNTS if count <= max(QUERIES, least)]
        multiply = self.kernels.multiply
        if (served := self._extend_known(heads, counts[-1], least)) is not None:
            return served
        scores = make_scores_trial(multiply, heads, (counts[-1], least), list_spans(heads.keys), self.thread_counts)
        scored = scores.find_groups(counts)
        failures = self._count_checks(scores)
        best: tuple[float, ServedHeads, Group, ValuesTrial, Group] | None = None
        for dtype in self.dtypes:
            for terms in TERMS:  # longer sums mean fewer calls
                values = make_values_trial(multiply, heads, counts[-1], terms, dtype, self.thread_counts)
                ways = find_agreeing_rows(heads, values.find_groups(counts), scored)
                failures += self._count_checks(values)
                for rows, group, weighed in ways:
                    estimated = estimate_rows(rows, counts[-1])
                    if best is None or estimated < best[0] * (LESS if values.way != best[1].dtype else 1):
                        served = ServedHeads(heads, values.way, rows, terms)
                        best = (estimated, served, group, values, weighed)
                if ways:
                    break
        if best is None:
            self.failures += [*failures, f"attention of {heads.group} query heads of {heads.size}: nothing agrees"]
            return None
        _, served, group, values, weighed = best
        each = len(served.rows) * len(self.thread_counts)
        self._add_to_digest(scores, Group(list(served.rows), group.reference), each * len(scores.spans))
        self._add_to_digest(values, Group(list(served.rows), weighed.reference), each * (served.terms // TILE))
        return served

    def _prove_native_attention(self, heads: Heads) -> ServedHeads | None:
        """Prove the library's attention, or return None. Its tiles start at fixed positions, so the number of keys is
        not on the list.
        """
        own = self.kernels.native_attention
        rows = self.products.rows
        if own is None:
            return None
        known = self._known_heads(heads)
        if known is not None and known.dtype == NATIVE:
            return evolve(known, heads=heads)
        trial = make_attention_trial(
            own, self.kernels.operand_dtype(NATIVE), (heads.group, heads.size), rows[-1], self.thread_counts
        )
        groups = trial.find_groups(rows)
        self._count_checks(trial)
        if [group.rows for group in groups] != [list(rows)]:
            return None
        self._add_to_digest(trial, groups[0], len(rows) * len(self.thread_counts))
        return ServedHeads(heads, NATIVE, rows, TILE)

    def prove_delta(self, delta: DeltaShape) -> ServedDelta | None:
        """Find the counts at which all batched products of a layer agree.

        These are the counts of the largest group of the first product, as far as the other products agree on them.
        """
        known = None if (plan := self._known_plan()) is None else plan.deltas
        served = next((one for one in known or () if one.delta == delta), None)
        served = served or self._prove_native_rule(delta)
        if served is not None:
            return served
        rows: list[int] = [*BATCHED]
        proven = list[tuple[Trial, Group]]()
        for heads, terms, outputs in list_batched_products(delta):
            trial = make_batched_trial(BATCHED[-1], (heads, terms, outputs), self.thread_counts)
            groups = trial.find_groups(rows)
            failures = self._count_checks(trial)
            if not groups:
                self.failures += [*failures, f"{trial.name}: nothing agrees"]
                return None
            best = max(groups, key=lambda group: len(group.rows))
            rows = best.rows
            proven.append((trial, best))
        for trial, group in proven:
            self._add_to_digest(trial, Group(rows, group.reference), len(rows) * len(self.thread_counts))
        return ServedDelta(delta, tuple(rows))

    def _prove_native_rule(self, delta: DeltaShape) -> ServedDelta | None:
        """Prove the library's delta rule. None where it is missing or cannot be proven: it is several times as quick as
        batched products.

        In what pieces a slot's rows may come is tried layer by layer (`state_probe.py`).
        """
        own = self.kernels.native_rule(delta)
        rows = self.products.rows
        if own is None:
            return None
        trial = make_rule_trial(own, delta, rows[-1], self.thread_counts)
        groups = trial.find_groups(rows)
        self._count_checks(trial)
        if [group.rows for group in groups] != [list(rows)]:
            return None
        self._add_to_digest(trial, groups[0], len(rows) * len(self.thread_counts))
        return ServedDelta(delta, rows, NATIVE)

    def _known_plan(self) -> ProductPlan | None:
        """Return the known plan if it holds here too: it was proven for the same row counts and threads."""
        known = self.known
        same = known is not None and (known.steps, known.threads) == (self.products.rows, self.threads)
        return known if same else None

    def _known_heads(self, heads: Heads) -> ServedHeads | None:
        known = () if (plan := self._known_plan()) is None else plan.heads
        return next((one for one in known if (one.heads.group, one.heads.size) == (heads.group, heads.size)), None)

    def _extend_known(self, heads: Heads, rows: int, least: int) -> ServedHeads | None:
        """Return known attention if it also holds over keys that it was not proven for.

        Those keys are multiplied and compared with a span that was proven, which ties them to all others.
        """
        served = self._known_heads(heads)
        if served is None or served.dtype == NATIVE:
            return None
        before = set(list_spans(served.heads.keys))
        wanted = set(list_spans(heads.keys))
        if wanted <= before:
            return evolve(served, heads=heads)
        if not wanted & before:
            return None
        tied = (max(wanted & before), *sorted(wanted - before))
        trial = make_scores_trial(self.kernels.multiply, heads, (rows, least), tied, self.thread_counts)
        groups = trial.find_groups(served.rows)
        self._count_checks(trial)
        return evolve(served, heads=heads) if [group.rows for group in groups] == [list(served.rows)] else None

    def _count_checks(self, trial: Trial) -> list[str]:
        """Count a trial's checks and return its failures in one line.

        They are reported only where nothing is left to serve.
        """
        self.checks += trial.checks
        more = len(trial.failures) - 1
        return [trial.failures[0] + (f", and {more} more" if more else "")] if trial.failures else []

    def _add_to_digest(self, trial: Trial, group: Group, shapes: int) -> None:
        self.shapes += shapes
        if 1 not in self.threads and trial.find_difference(group.rows[0], group.reference, 1) is not None:
            self.single = False
        self.digest.update(view_bytes(group.reference[:, :TILE]).numpy().data)  # the same however many keys there are


def estimate_rows(rows: Sequence[int], chunk: int) -> float:
    """Return the rows that a chunk and some decode steps multiply, in the shapes of a group, if reading a weight counts
    as READING rows. It stands for the time, and is the same at every start.
    """
    piece = rows[-1]
    return (piece + READING) * chunk / piece + DECODES * (rows[0] + READING)


def prove(kernels: Multiplier, products: Products, known: ProductPlan | None = None) -> Proof:
    """Prove the products; the thread count is left as it was. Takes about a second for a small model, more for wide
    layers.

    known: proven with the same kernels on this machine, and so not proven again. The digest is of what was multiplied
    now.
    """
    narrow, wide = products.threads
    failures: list[str] = []
    checks = 0
    with restore_threads(), torch.inference_mode():
        for threads in dict.fromkeys(((narrow, wide), (wide, wide))):
            prover = Prover(kernels, products, threads, known)
            plan = prover.run()
            checks += prover.checks
            failures += prover.failures
            if plan is not None:
                digest = prover.digest.hexdigest()
                return Proof(plan, True, prover.shapes, checks, tuple(failures), prover.single, digest)
    return Proof(None, False, 0, checks, tuple(failures))
