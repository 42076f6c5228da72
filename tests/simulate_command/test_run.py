"""The real machine on a virtual clock: what is found, kept, lost and counted."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effects.compression import Compression
from effects.ids import RequestId
from effects.scope import parse_scope
from engine.tools.simulation.logs.logged_requests import Agent, Session, make_tokens
from engine.tools.simulation.simulate_scope import Simulation
from engine.tools.simulation.simulated_process import Process
from states.events import Event
from tests.examples import count_examples
from tests.simulate_command.kit import BLOCK_SIZE, COSTS, agent, request, run, session, watch

PIECES = [make_tokens(f"piece {turn}", 40 + 24 * turn) for turn in range(4)]
FOUR = [session(name, turns) for name, turns in (("a", 6), ("b", 5), ("c", 4), ("d", 6))]


def found(one: Simulation) -> list[int]:
    return [count.found for count in one.tally.counts.values()]


def test_with_room_for_everything_nothing_is_missed_whatever_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    for restart_every in (0, 1, 4):
        one = run(FOUR, restart_every=restart_every)
        counts = one.tally.counts.values()
        assert [count.found for count in counts] == [count.infinite for count in counts]
        assert sum(count.found for count in counts) > 0.5 * sum(count.prompt for count in counts)
        assert one.compute_figures().written_of_unique == pytest.approx(1, abs=0.3), (
            "token ids are written with the rows"
        )
        assert one.compute_figures().evictions == 0
    assert {"PrefixFound", "PrefixMissed", "BlocksRestored", "SnapshotSaved", "PrefillAdvanced", "Decoded"} <= set(seen)


def test_a_restart_loses_slots_and_host_memory_and_keeps_the_disk() -> None:
    alone = [session("a", 5)]
    disk = run(alone, restart_every=1)
    assert len(disk.tally.restarts) == 4
    assert {count.tier for count in disk.tally.counts.values()} == {"none", "disk"}
    memory = run(alone, restart_every=1, disk_budget=0, host_budget=1 << 30)
    assert found(memory) == [0] * 5
    assert found(run(alone, disk_budget=0, host_budget=1 << 30)) == found(disk)


def test_what_left_the_slots_comes_back_from_host_memory_or_disk() -> None:
    many = [session(name, 4) for name in "abcdef"]
    assert {count.tier for count in run(many, slots=1, host_budget=1 << 30).tally.counts.values()} == {"none", "host"}
    assert "disk" in {count.tier for count in run(many, slots=1).tally.counts.values()}


def test_a_budget_is_kept_and_evicts() -> None:
    budget = 400 * COSTS.token_bytes
    one = run(FOUR, restart_every=1, disk_budget=budget)
    assert one.disk.index.held_bytes <= budget
    assert one.compute_figures().evictions > 0
    assert one.compute_figures().hit_tokens < one.compute_figures().infinite_hit_tokens


def test_a_model_with_positional_state_finds_what_an_infinite_cache_has_where_turns_only_add(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = watch(monkeypatch)
    for restart_every, places in ((0, 0), (0, 3), (1, 3)):
        one = run(FOUR, restart_every=restart_every, state_bytes=48, places=places)
        plain = run(FOUR, restart_every=restart_every)
        missed = [count.infinite - count.found for count in one.tally.counts.values()]
        assert max(missed) < 2 * BLOCK_SIZE, "a checkpoint may be a block before where two prompts part"
        figures, without = one.compute_figures(), plain.compute_figures()
        assert figures.checkpoint_bytes > 0 == without.checkpoint_bytes
        assert figures.written_bytes - figures.checkpoint_bytes == pytest.approx(without.written_bytes, rel=0.05)
    assert {"PrefixFound", "BlocksRestored", "SnapshotSaved"} <= set(seen)


def test_what_checkpoints_weigh_decides_what_is_worth_loading() -> None:
    """A state as large as thousands of rows comes back later than 40 rows are computed."""
    light, heavy = (run([session("a", 5)], restart_every=1, state_bytes=size) for size in (16, 16 << 20))
    assert light.compute_figures().hit_tokens == heavy.compute_figures().hit_tokens > 0, "it is there"
    assert light.compute_figures().restored_tokens > 0 == heavy.compute_figures().restored_tokens


def test_scopes_limit_what_is_written() -> None:
    written = {
        word: run(FOUR, parse_scope(word), restart_every=1).compute_figures() for word in ("off", "20", "auto", "full")
    }
    assert written["off"].written_bytes == written["off"].hit_tokens == 0
    assert 0 < written["20"].written_bytes < written["auto"].written_bytes < written["full"].written_bytes
    assert written["20"].selected_mean == 20
    assert written["20"].whole_hits == 21 - 4, "all but each session's first"
    assert written["auto"].whole_hits == 0, "each selects all of the prompt before, of which less is kept"
    assert written["auto"].hit_tokens > written["20"].hit_tokens


def test_without_a_cache_nothing_is_shared_and_first_tokens_take_longest() -> None:
    none, full = run(FOUR, None).compute_figures(), run(FOUR).compute_figures()
    assert (none.hit_tokens, none.written_bytes, none.scope) == (0, 0, "no cache")
    assert none.infinite_hit_tokens == full.infinite_hit_tokens
    assert none.first_token_ms[0] > full.first_token_ms[0]


def test_an_agent_waits_for_its_answer_and_takes_its_pause() -> None:
    hasty = Session(
        "h", (Agent((request(0, make_tokens("x", 400), answer=50), request(0.001, make_tokens("y", 9), pause_s=7))),)
    )
    first, second = run([hasty]).tally.counts.values()
    assert second.sent == first.closed + 7_000_000_000


def test_a_subagent_runs_beside_its_parent() -> None:
    parent, child = agent("parent", 3, every_s=0), agent("child", 3, every_s=0)
    counts = list(run([Session("s", (parent, child))]).tally.counts.values())
    assert [count.sent for count in counts[:2]] == [0, 0]
    assert max(count.sent for count in counts[:4]) < min(count.closed for count in counts[2:])


def test_sessions_run_in_rounds_whose_clocks_start_together() -> None:
    one = run([session(name, 3) for name in "abcd"], interleave=2)
    counts = list(one.tally.counts.values())
    assert len(counts) == 12
    first, second = counts[:6], counts[6:]
    assert min(count.sent for count in second) >= max(count.closed for count in first)
    assert second[0].sent == second[1].sent


def test_sessions_of_one_clock_keep_its_times_unless_they_run_in_rounds() -> None:
    early = Session("early", (Agent((request(1000, make_tokens("e", 9)),)),), absolute=True)
    late = Session("late", (Agent((request(1500, make_tokens("l", 9)),)),), absolute=True)
    assert [count.sent for count in run([early, late]).tally.counts.values()] == [0, 500 * 10**9]
    rounds = run([late, early], interleave=2).tally.counts.values()
    assert [count.sent for count in rounds] == [0, 0]


def watched(one: list[Session], monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[Simulation, list[Any], int]:
    """With everything that every request was counted with, and how many events there were."""
    events, feed = list[str](), Process.feed

    def counted(self: Process, number: RequestId, event: Event) -> None:
        feed(self, number, event)
        events.append(type(event).__name__)

    with monkeypatch.context() as patch:
        patch.setattr(Process, "feed", counted)
        ran = run(one, **how)
    counts = [attrs.astuple(count, recurse=False) for count in ran.tally.counts.values()]
    return ran, counts, events.count("Decoded")


@pytest.mark.parametrize("how", [{}, {"slots": 1}, {"slots": 3, "restart_every": 4}, {"host_budget": 4000}])
@pytest.mark.parametrize("scope", ["full", "auto:4", "20"])
def test_decode_steps_that_nothing_comes_between_are_one_event_and_change_nothing(
    how: dict[str, Any], scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that meet each other's prefills, arrivals, lookups, snapshots and writes, and others that are alone."""
    talkative = [
        Session(
            name,
            (Agent(tuple(request(0.3 * turn + at, *PIECES[: turn + 1], answer=30 + 17 * turn) for turn in range(4))),),
        )
        for name, at in (("a", 0.0), ("b", 0.05), ("c", 0.4), ("d", 9.0))
    ]
    together = watched(talkative, monkeypatch, scope=parse_scope(scope), **how)
    monkeypatch.setattr(Process, "count_undisturbed_steps", lambda *_: 1)
    one_by_one = watched(talkative, monkeypatch, scope=parse_scope(scope), **how)
    assert together[0].compute_figures() == one_by_one[0].compute_figures()
    assert together[0].tally.written == one_by_one[0].tally.written
    assert together[0].clock.now == one_by_one[0].clock.now
    assert together[1] == one_by_one[1]
    assert one_by_one[2] == sum(len(each.answer) for one in talkative for each in one.agents[0].requests)
    assert together[2] < one_by_one[2]


def test_the_same_logs_give_the_same_figures() -> None:
    again: dict[str, Any] = {"restart_every": 3, "disk_budget": 500 * COSTS.token_bytes, "interleave": 3}
    assert run(FOUR, **again).compute_figures() == run(FOUR, **again).compute_figures()


@settings(max_examples=count_examples(30), deadline=None)
@given(data=st.data())
def test_no_log_finds_more_than_there_was_or_leaves_anything_open(data: st.DataObject) -> None:
    """Sequences from few pieces, so that they meet and part; any budget, any scope, any restart."""
    words = [make_tokens(f"word {number}", length) for number, length in enumerate((3, 8, 16, 24, 40))]
    piece = st.sampled_from(words)
    agents = st.lists(st.lists(st.lists(piece, min_size=1, max_size=6), min_size=1, max_size=4), min_size=1, max_size=4)
    sessions = [
        Session(
            str(number),
            (Agent(tuple(request(at, *prompt, boundaries=(len(prompt[0]),)) for at, prompt in enumerate(prompts))),),
        )
        for number, prompts in enumerate(data.draw(agents))
    ]
    scope = parse_scope(data.draw(st.sampled_from(("off", "full", "auto:1", "auto", "12"))))
    one = run(
        sessions,
        scope,
        slots=data.draw(st.integers(1, 3)),
        restart_every=data.draw(st.integers(0, 3)),
        disk_budget=data.draw(st.sampled_from((0, 600, 4000, 1 << 30))),
        host_budget=data.draw(st.sampled_from((0, 1000, 1 << 30))),
    )
    for count in one.tally.counts.values():
        assert count.found <= count.infinite
        assert count.restored <= count.found < count.prompt
        assert not count.found % BLOCK_SIZE
        assert count.sent < count.first <= count.closed
    assert len(one.tally.counts) == sum(one.count for one in sessions)
    assert not one.process.keeping.store._leases  # noqa: SLF001
    assert all(not entry.leases for entry in one.disk.index.entries.values())
    assert one.disk.index.held_bytes <= one.disk.index.budget


FREEZING = Compression("always", keep=100, freeze=True)


def test_a_frozen_conversation_is_served_shorter_and_still_found() -> None:
    """Each turn has 24 tokens more and a message for each: what has aged is frozen in lots of 512."""
    talk = [frozen_session(60)]
    plain, frozen = run(talk).build_result(), run(talk, compression=FREEZING, drafter=1 << 20).build_result()
    assert plain.figures.served_tokens == plain.figures.prompt_tokens == frozen.figures.prompt_tokens
    assert frozen.figures.served_tokens < 0.7 * plain.figures.served_tokens
    shorter = [count.served < count.prompt for count in frozen.counts]
    assert shorter[:4] == [True, False, False, False], (
        "a first prompt continues nothing: it goes through the whole gate"
    )
    assert all(shorter[-10:]), "what was frozen stays so"
    late = [count.restored / count.served for count in frozen.counts[-20:]]
    assert sum(share > 0.5 for share in late) >= 15, "a prompt that only grows is found again"


def test_a_restart_finds_what_messages_were_frozen_to() -> None:
    talk = [frozen_session(40)]
    one = run(talk, compression=FREEZING, drafter=1 << 20, restart_every=15).build_result()
    assert one.restarts
    assert all(count.served < count.prompt for count in one.counts[-10:])


def test_a_long_first_prompt_is_compressed_as_a_whole_and_takes_its_time() -> None:
    first = [Session("long", (Agent((request(0, tuple(range(1000))),)),))]
    always = Compression("always", keep=100)
    plain, short = (run(first, compression=how, drafter=1 << 20).build_result() for how in (Compression(), always))
    assert (plain.figures.served_tokens, short.figures.served_tokens) == (1000, 100)
    assert short.counts[0].closed > 0


def frozen_session(turns: int) -> Session:
    """Messages of 80 tokens, one of the agent's and one of its tools' a turn."""
    messages = [tuple(range(at * 100, at * 100 + 80)) for at in range(1 + 2 * turns)]
    return Session(
        "talk",
        (
            Agent(
                tuple(
                    request(at * 60, *messages[: 1 + 2 * at], boundaries=tuple(range(80, 80 * (1 + 2 * at), 80)))
                    for at in range(1, turns)
                )
            ),
        ),
    )


def test_sessions_that_begin_together_compute_their_head_once() -> None:
    """A log has all of them at one moment. The other two wait for the head that the first one computes."""
    head = make_tokens("head", 64)
    together = [Session(name, (Agent((request(0, head, make_tokens(name, 24)),)),)) for name in "abc"]
    figures = run(together, slots=3).compute_figures()
    assert figures.followed_tokens == figures.restored_tokens == 2 * 64
    later = [Session(name, (Agent((request(at, head, make_tokens(name, 24)),)),)) for at, name in enumerate("abc")]
    apart = run([attrs.evolve(one, absolute=True) for one in later], slots=3).compute_figures()
    assert (apart.followed_tokens, apart.restored_tokens) == (0, 2 * 64)
    assert run(together, None, slots=3).compute_figures().followed_tokens == 0, "without a cache nothing is shared"
