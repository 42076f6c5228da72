"""Carries out what `garbage_policy.py` decides: reads marks and reports, writes its own, removes runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from attrs import define, evolve, field

from adapters.store.shared.catalogue import Catalogue
from adapters.store.shared.garbage_policy import (
    SILENT_S,
    Mark,
    ServerReport,
    StoredRun,
    choose_dead_objects,
    choose_runs_to_mark,
    choose_runs_to_remove,
    review_marks,
)
from adapters.store.shared.object_client import ObjectClient, ObjectExists, ObjectFacts
from adapters.store.shared.object_names import (
    MARKS,
    SAMPLES,
    SERVERS,
    is_root,
    name_mark,
    name_report,
    parse_mark_name,
    parse_report_name,
    parse_run_name,
)
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.shared.records import MAX_RECORD_BYTES, encode_mark, encode_report, parse_mark, parse_report

log = logging.getLogger("rekindle.store")

COLLECT_S = 60.0  # between two looks at what might be removed
SWEEP_S = 3600.0  # between two looks at what other identities have left, and at samples of starts that were killed


@define(eq=False)
class GarbageCollector:
    """One server's part in the protocol. Used on the tier's event loop. clock: monotonic seconds."""

    client: ObjectClient
    catalogue: Catalogue
    server: str
    limits: SharedLimits
    clock: Callable[[], float]
    counts: Counter[str]
    _number: int = 0  # of reports and marks of this server
    # name -> (version, mark); None for what is no mark of this version, which is not reported as seen
    _marks: Mapping[str, tuple[str, Mark | None]] = field(factory=dict[str, "tuple[str, Mark | None]"])
    _own: Mark | None = None  # marked here, and not removed yet
    _watched: dict[str, tuple[str, float, ServerReport]] = field(factory=dict)  # server -> (version, since, report)
    _renewed: dict[str, float] = field(factory=dict[str, float])  # run -> the store's time when it was known to be used
    _reported_s: float = 0.0  # when the last report was begun
    _next_collect_s: float = 0.0
    _next_sweep_s: float = 0.0

    # --- the part of every server: see marks, hide runs, report ---

    async def read_marks(self) -> None:
        """Read new marks, and stop finding what they name and this server does not use."""
        marks = dict[str, tuple[str, Mark | None]]()
        for facts in await self.client.list_objects(MARKS):
            known = self._marks.get(facts.name)
            if known is not None and known[0] == facts.version:
                marks[facts.name] = known
            elif parse_mark_name(facts.name):
                with suppress(FileNotFoundError):  # removed since it was listed
                    marks[facts.name] = (facts.version, await self._read_mark(facts))
        self._marks = marks
        with self.catalogue.lock:
            verdict = review_marks(self._list_marks(), self.catalogue.collect_used(self.clock()))
            self.catalogue.hide(verdict.hidden)

    async def _read_mark(self, facts: ObjectFacts) -> Mark | None:
        try:
            return parse_mark(facts.name, await self._read_small(facts))
        except ValueError:
            self.counts["damaged"] += 1
            return None

    async def _read_small(self, facts: ObjectFacts) -> bytes:
        if not 0 < facts.size <= MAX_RECORD_BYTES:
            raise ValueError("empty, or larger than any record")
        return bytes(await self.client.read_range(facts.name, 0, facts.size))

    def _list_marks(self) -> list[Mark]:
        return [mark for _, mark in self._marks.values() if mark is not None]

    async def write_report(self) -> None:
        """Report the marks that this server has seen, and what it keeps of them. All other runs are hidden by now."""
        now_s = self.clock()
        if now_s - self._reported_s > SILENT_S / 2:
            self._own = None  # others may take this server for dead, and remove its mark while it acts on it
        self._reported_s = now_s
        self._number += 1
        marks = self._list_marks()
        named = frozenset(run for mark in marks for run in mark.runs)
        seen = frozenset(mark.name for mark in marks)
        raw = encode_report(self._number, seen, named - self.catalogue.hidden)
        await self.client.write_object(name_report(self.server), [raw], replace=True)

    async def remove_report(self) -> None:
        """Sign off, so that no collector waits for this server. Its own mark goes first."""
        if self._own is not None:
            await self.client.remove_object(self._own.name)
        await self.client.remove_object(name_report(self.server))

    # --- the part of a collector ---

    async def collect(self) -> None:
        """Take the next step: remove what was marked, as soon as all servers agree, or mark what is to be removed."""
        now_s = self.clock()
        if self._own is None and now_s < self._next_collect_s:
            return
        written = await self._watch_servers(now_s)
        reports = {
            server: evolve(report, silent_s=now_s - since) for server, (_, since, report) in self._watched.items()
        }
        if self._own is not None:
            await self._remove_marked(self._own, reports, written)
            return
        # Servers that start together look at different times.
        self._next_collect_s = now_s + COLLECT_S + int(self.server, 16) % int(COLLECT_S)
        await self._remove_dead(reports)
        await self._mark(self.catalogue.describe_runs(written), self.limits.budget, written)
        if self._own is None and now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_S
            await self._sweep(written)

    async def _watch_servers(self, now_s: float) -> float:
        """Read new reports, and return the store's time of our own one."""
        listed = {
            server: stored_object
            for stored_object in await self.client.list_objects(SERVERS)
            if (server := parse_report_name(stored_object.name))
        }
        for server, facts in listed.items():
            if server in self._watched and self._watched[server][0] == facts.version:
                continue
            report = ServerReport(server, frozenset(), frozenset())  # of what cannot be read: it has seen nothing
            with suppress(FileNotFoundError, ValueError):
                report = parse_report(server, await self._read_small(facts))
            self._watched[server] = (facts.version, now_s, report)
        for gone in self._watched.keys() - listed.keys():
            del self._watched[gone]
        own = listed.get(self.server)
        return 0.0 if own is None else own.written.timestamp()

    async def _remove_marked(self, mark: Mark, reports: Mapping[str, ServerReport], written: float) -> None:
        if mark.name not in self._marks:  # removed by a server that took this one for dead
            self._own = None
            return
        if self.server not in reports or (chosen := choose_runs_to_remove(mark, reports.values())) is None:
            return
        for run in sorted(chosen):
            if self.clock() - self._reported_s > SILENT_S / 2:
                break  # the store has become slow: what is left is marked again
            await self.client.remove_object(run)
            self.counts["collected"] += 1
        await self.client.remove_object(mark.name)
        self._own = None
        self._renewed |= dict.fromkeys(mark.runs - chosen, written)
        self._renewed = {run: at for run, at in self._renewed.items() if run in self.catalogue.listed}
        log.info(
            "the shared tier: %d runs removed, %d kept because they are in use", len(chosen), len(mark.runs - chosen)
        )

    async def _mark(self, runs: Iterable[StoredRun], budget: int, written: float) -> None:
        """Mark the runs that are too old or beyond the budget."""
        aged = [evolve(run, age_s=min(run.age_s, written - self._renewed.get(run.name, 0.0))) for run in runs]
        marked = frozenset(name for mark in self._list_marks() for name in mark.runs)
        chosen = choose_runs_to_mark(aged, budget, self.limits.max_age_s, marked)
        if not chosen:
            return
        self._number += 1
        name = name_mark(self.server, self._number % (1 << 32))
        with suppress(ObjectExists):  # of an earlier process: another number next time
            await self.client.write_object(name, [encode_mark(chosen)])
            self._own = Mark(name, self.server, frozenset(chosen))

    async def _remove_dead(self, reports: Mapping[str, ServerReport]) -> None:
        """Remove marks and reports that servers have left behind."""
        marks, servers = choose_dead_objects(self._list_marks(), reports)
        for name in (*marks, *map(name_report, servers)):
            await self.client.remove_object(name)

    async def _sweep(self, written: float) -> None:
        """Mark old runs of other identities, which no server of today collects, and remove old samples."""
        for facts in await self.client.list_objects(SAMPLES):
            if written - facts.written.timestamp() > SWEEP_S:
                await self.client.remove_object(facts.name)
        for folder in await self.client.list_folders():
            if is_root(folder) and folder != self.catalogue.root.hex() and self._own is None:
                listed = await self.client.list_objects(folder)
                named = [stored_object for stored_object in listed if parse_run_name(stored_object.name) is not None]
                runs = [
                    StoredRun(stored_object.name, stored_object.size, written - stored_object.written.timestamp())
                    for stored_object in named
                ]
                await self._mark(runs, 0, written)
