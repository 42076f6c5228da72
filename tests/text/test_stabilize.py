"""Tests of what agents change in every prompt: the shapes that were captured, and everything that only
looks like them.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from attrs import evolve

from adapters.text.agent_rules import RULES
from adapters.text.conversation import ChatMessage, Conversation, FunctionTool, MovedText
from adapters.text.stabilize import MAX_MOVED_CHARS, MAX_SYSTEM_CHARS, stabilize

YOU = "You are Claude Code, Anthropic's official CLI for Claude."
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
LEFT = "<total_tokens>14999436 tokens left</total_tokens>"
LESS = "<total_tokens>14990011 tokens left</total_tokens>"
ENV = """<env>
Working directory: /srv/shapes
Is directory a git repo: Yes
Platform: linux
OS Version: Linux 6.12.10-76061203-generic
{}</env>
You are powered by the model named Sonnet 4.5."""
OPENCODE = """<env>
  Working directory: /srv/shapes
  Is directory a git repo: yes
  Platform: linux
{}</env>"""
DATE, DAY = "Today's date: 2025-12-19", "Today's date: Sat Nov 22 2026"
GIT = """\
gitStatus: This is the git status at the start of the conversation. Note that this status is a snapshot in time, and \
will not update during the conversation.
Current branch: main

Main branch (you will usually use this for PRs): main

Status:
M package-lock.json
?? notes/

Recent commits:
5183890 feat: functioning /compact and smart thinking model router
d6c99bb fix: Apply ESLint fixes"""
# as 2.1.197 writes it, in a repository without commits
GIT_BEGUN = GIT.partition("Current branch")[0] + "\nCurrent branch: master\n\nStatus:\n?? shapes.py\n\nRecent commits:"
PI = "You are an expert coding assistant operating inside pi.{}\nCurrent working directory: /srv/shapes"
TIME, PI_DATE = "Current date and time: Monday, March 9, 2026 at 06:00:31 PM PDT", "Current date: 2026-06-09"
POWERED = """# Environment
 - OS Version: Linux 6.18.44
 - You are powered by the model named Opus 4.8{}. The exact model ID is claude-opus-4-8{}.
 - Assistant knowledge cutoff is January 2026."""
COMMITS = "Runs a command.\n- End messages with:\nCo-Authored-By: Claude Opus 4.8{} <noreply@anthropic.com>\n- Brief."
LONG = " (1M context)", "[1m]"
SETTINGS = "Runs a command. Not writable: /tmp/claude-settings{}.json"
UUID = "-20fc829c-5ec4-43a6-93f9-62663f5517b1"
TURN = (ChatMessage("user", "Hello"), ChatMessage("assistant", "Hi."), ChatMessage("user", "Why?"))


def asked(system: str, *rest: ChatMessage) -> Conversation:
    return Conversation((ChatMessage("system", system), *(rest or TURN)))


def contents(conversation: Conversation) -> list[str]:
    return [message.content for message in stabilize(conversation).messages]


@pytest.mark.parametrize(
    ("rule", "sent", "system", "first", "last"),
    [
        ("claude-billing-header", f"{BILLING}\n{YOU}", YOU, "", ""),
        ("claude-billing-header", f"{BILLING}\n\n{YOU}", YOU, "", ""),
        ("claude-total-tokens", f"{YOU}\n{LEFT}", YOU, "", LEFT),
        ("claude-total-tokens", f"{YOU}\n\n{LEFT}\n{LESS}", YOU, "", LESS),
        ("claude-total-tokens", f"{YOU}\n\n{LEFT}\n\nBe brief.\n{LESS}\n", f"{YOU}\n\nBe brief.\n", "", LESS),
        ("pi-time", PI.format(f"\n{TIME}"), PI.format(""), "", TIME),
        ("pi-date", PI.format(f"\n{PI_DATE}"), PI.format(""), PI_DATE, ""),
        ("env-date", ENV.format(f"{DATE}\n"), ENV.format(""), DATE, ""),
        ("env-date", OPENCODE.format(f"  {DAY}\n"), OPENCODE.format(""), DAY, ""),
        ("claude-git-status", f"{YOU}\n\n{GIT}", YOU, GIT, ""),
        ("claude-git-status", f"{YOU}\n\n{GIT_BEGUN}\n", f"{YOU}\n", GIT_BEGUN, ""),
        ("claude-git-status", f"{YOU}\n\n{GIT}\nBe brief.", f"{YOU}\nBe brief.", GIT, ""),
        ("claude-git-status", f"{YOU}\n\n{GIT.replace('M package-lock.json', '(clean)')}", YOU, GIT, ""),
    ],
)
def test_a_captured_shape_goes_where_it_costs_little(rule: str, sent: str, system: str, first: str, last: str) -> None:
    result = stabilize(asked(sent))
    assert result.applied_rules == (rule,)
    assert result.messages[0] == ChatMessage("system", system)
    moved = [message.content.partition("\n\n")[2] for message in result.messages[1:]]
    assert [text.replace("(clean)", "M package-lock.json") for text in moved] == [first, "", last]
    assert result.has_volatile_tail == bool(last)
    assert result.lasting_messages[-1].content == "Why?"  # what will be there with the next one
    assert result.messages[-1].cuts == ((len("Why?"),) if last else ())
    assert stabilize(result) == evolve(result, applied_rules=result.applied_rules)


AGENTS = ChatMessage("system", "Available agent types for the Agent tool:\n- mine: Finds things.\n\nUse several.")
SKILLS = ChatMessage("system", "The following skills are available for use with the Skill tool:\n\n- mine: Does it.")
LATER = ChatMessage("system", "Mind the gap.")
HELLO, HI, WHY = TURN


@pytest.mark.parametrize(
    ("rules", "sent", "result"),
    [
        (("claude-agent-types",), [HELLO, AGENTS], [AGENTS, HELLO]),
        (("claude-skills",), [HELLO, LATER, SKILLS], [SKILLS, HELLO, LATER]),
        (("claude-agent-types", "claude-skills"), [HELLO, AGENTS, SKILLS], [AGENTS, SKILLS, HELLO]),
        (("claude-agent-types",), [HELLO, AGENTS, HI, WHY], [AGENTS, HELLO, HI, WHY]),
        ((), [HELLO, HI, AGENTS, WHY], [HELLO, HI, AGENTS, WHY]),
        ((), [evolve(AGENTS, role="user"), WHY], [evolve(AGENTS, role="user"), WHY]),
        ((), [HELLO, LATER, HI, WHY], [HELLO, LATER, HI, WHY]),
        ((), [HELLO, evolve(AGENTS, content=f"So: {AGENTS.content}")], None),
    ],
)
@pytest.mark.parametrize("system", ["", YOU])
def test_a_message_that_is_the_same_in_all_sessions_goes_in_front_of_the_first_question(
    system: str, rules: tuple[str, ...], sent: list[ChatMessage], result: list[ChatMessage] | None
) -> None:
    opening = [ChatMessage("system", system)] if system else []
    found = stabilize(Conversation([*opening, *sent]))
    assert (found.applied_rules, list(found.messages)) == (rules, [*opening, *(sent if result is None else result)])
    assert list(found.lasting_messages) == list(found.messages)
    assert stabilize(found) == found


def test_what_stays_behind_the_first_question_stays_there_beside_such_a_message() -> None:
    found = stabilize(asked(f"{YOU}\n\n{GIT}", HELLO, AGENTS, HI, WHY))
    assert found.applied_rules == ("claude-agent-types", "claude-git-status")
    assert [message.content for message in found.messages] == [
        YOU,
        AGENTS.content,
        f"Hello\n\n{GIT}",
        "Hi.",
        "Why?",
    ]


def test_a_tools_description_keeps_all_but_the_random_part() -> None:
    tools = (FunctionTool("Bash", SETTINGS.format(UUID)), FunctionTool("Read", "Reads a file."), FunctionTool("List"))
    result = stabilize(evolve(asked(YOU), tools=tools))
    assert result.applied_rules == ("claude-settings-id",)
    assert result.tools == [FunctionTool("Bash", SETTINGS.format("")), *tools[1:]]


def test_a_session_that_is_resumed_begins_as_it_did() -> None:
    """Its second process knows its model by another name, in the system prompt and in a tool's description."""
    first, second = (
        stabilize(evolve(asked(POWERED.format(*names)), tools=(FunctionTool("Bash", COMMITS.format(names[0])),)))
        for names in (LONG, ("", ""))
    )
    assert first.applied_rules == ("claude-model-name", "claude-model-id", "claude-model-author")
    assert second.applied_rules == ()
    assert (list(first.messages), list(first.tools)) == (list(second.messages), list(second.tools))


NEXT_DAY, CHANGED = "Today's date: 2025-12-20", GIT_BEGUN.replace("?? shapes.py", "A  shapes.py\n?? notes/")


def list_texts(system: str, count: int, *before: MovedText) -> tuple[list[str], tuple[MovedText, ...] | None]:
    """Return the texts of a conversation with `count` messages after it was stabilized, and what was moved."""
    turns = [ChatMessage("assistant" if at % 2 else "user", f"Number {at}.") for at in range(count)]
    made = stabilize(asked(system, *turns), lambda _: before or None)
    return [message.content for message in made.messages], made.moved_texts


def test_what_has_changed_since_the_last_answer_goes_behind_the_last_message_and_stays_there() -> None:
    """A session that is resumed has another status, and another date; its prompt only grows."""
    begun, moved = list_texts(f"{ENV.format(DATE + chr(10))}\n\n{GIT_BEGUN}", 3)
    assert begun[1:] == [f"Number 0.\n\n{DATE}\n{GIT_BEGUN}", "Number 1.", "Number 2."]
    same, again = list_texts(f"{ENV.format(DATE + chr(10))}\n\n{GIT_BEGUN}", 5, *moved or ())
    assert (same[: len(begun)], again) == (begun, moved)
    resumed, moved = list_texts(f"{ENV.format(NEXT_DAY + chr(10))}\n\n{CHANGED}", 7, *again or ())
    assert resumed[: len(same)] == same
    assert resumed[-1] == f"Number 6.\n\n{NEXT_DAY}\n{CHANGED}"
    later, moved = list_texts(f"{ENV.format(NEXT_DAY + chr(10))}\n\n{CHANGED}", 9, *moved or ())
    assert later == [*resumed, "Number 7.", "Number 8."]
    back, moved = list_texts(f"{ENV.format(NEXT_DAY + chr(10))}\n\n{GIT_BEGUN}", 11, *moved or ())
    assert back == [*later, "Number 9.", f"Number 10.\n\n{GIT_BEGUN}"], "only what has changed is said anew"
    assert moved is not None
    assert [one.message_index for one in moved] == [0, 0, 6, 6, 10]


def test_what_stood_behind_messages_that_are_gone_or_by_a_rule_that_no_longer_applies_is_not_said() -> None:
    system = f"{YOU}\n\n{GIT}"
    moved = (
        MovedText(0, "env-date", DATE),
        MovedText(1, "claude-git-status", GIT),
        MovedText(8, "claude-git-status", GIT),
        MovedText(-9, "claude-git-status", GIT),  # a file that is read at start may say anything
    )
    for before in (moved[:1], moved[1:2], moved[2:3], moved[3:], moved):
        assert list_texts(system, 3, *before)[0] == [YOU, "Number 0.", "Number 1.", f"Number 2.\n\n{GIT}"]


def test_a_text_that_changes_at_every_request_does_not_pile_up_without_end() -> None:
    moved: tuple[MovedText, ...] | None = ()
    for turn in range(0, 200, 2):
        texts, moved = list_texts(f"{YOU}\n\n{GIT}{turn:>2000}", turn + 1, *moved or ())
        assert sum(map(len, texts)) < MAX_MOVED_CHARS + 20 * (turn + 2) + len(YOU)
        assert any(text.endswith(f" {turn}") for text in texts)
    large = GIT.replace("?? notes/", "\n".join("?? " + "n" * 450 for _ in range(40)))
    assert list_texts(f"{YOU}\n\n{large}", 3) == ([YOU, f"Number 0.\n\n{large}", "Number 1.", "Number 2."], None)


def test_all_of_them_at_once_leave_the_same_head_at_every_turn() -> None:
    heads, messages = list[str](), [ChatMessage("user", "Hello")]
    counters = ""
    for turn in range(5):
        counters += f"\n<total_tokens>{15_000_000 - 9 * turn} tokens left</total_tokens>"
        system = f"x-anthropic-billing-header: cc_version=2.1.1; cch={turn:05x};\n{YOU}\n{ENV.format(DATE + chr(10))}"
        result = stabilize(Conversation([ChatMessage("system", f"{system}\n\n{GIT}{counters}"), *messages]))
        heads.append("\0".join(message.content for message in result.messages[: len(messages)]))
        assert result.messages[-1].content.endswith(f"<total_tokens>{15_000_000 - 9 * turn} tokens left</total_tokens>")
        assert set(result.applied_rules) == {
            *("claude-billing-header", "claude-total-tokens", "env-date", "claude-git-status")
        }
        messages += [ChatMessage("assistant", f"Answer {turn}."), ChatMessage("user", f"Question {turn}?")]
    for one, other in pairwise(heads):
        assert other.startswith(one)


@pytest.mark.parametrize(
    "system",
    [
        f"{YOU}\n{BILLING}",  # not the first line
        f"{BILLING} Mind it.\n{YOU}",
        "x-anthropic-billing-header: whatever\nYou help.",
        f"It says {LEFT}",
        f"{LEFT} is left",
        "<total_tokens>many tokens left</total_tokens>",
        "<total_tokens>1234567890123456 tokens left</total_tokens>",
        POWERED.format(" (2M context)", "[2m]"),
        f"It says: {POWERED.format(*LONG)[40:]}".replace("\n - You", " - You"),
        DATE,
        f"{DATE}\nThat is today.\n</env>",
        ENV.format("Today's date: soon\n"),
        f"Current date: 2026-06-09\n{YOU}",
        "Current date and time: now",
        "gitStatus: This is the git status at the start of the conversation.\nAsk git.",
        GIT.replace("\n\nRecent commits:", ""),
        GIT.replace("Current branch: main\n", ""),
    ],
)
def test_what_only_looks_like_one_stays(system: str) -> None:
    conversation = asked(system)
    assert stabilize(conversation) is conversation


def test_what_a_user_an_assistant_a_tool_or_a_later_system_message_says_stays() -> None:
    said = f"{BILLING}\n{LEFT}\n{ENV.format(DATE)}\n{GIT}"
    rest = [ChatMessage(role, said) for role in ("user", "assistant", "tool", "system", "user")]
    conversation = Conversation([ChatMessage("system", YOU), *rest], [FunctionTool(said.replace("\n", ""))])
    assert stabilize(conversation) is conversation


def test_what_stands_in_several_system_messages_is_found_in_each_and_an_empty_one_is_left_out() -> None:
    messages = [ChatMessage("system", text) for text in (BILLING, YOU, LEFT, LESS)]
    assert contents(Conversation([*messages, *TURN])) == [YOU, "Hello", "Hi.", f"Why?\n\n{LESS}"]


def test_where_there_is_no_message_for_it_nothing_is_moved() -> None:
    system = f"{YOU}\n{LEFT}\n{ENV.format(DATE + chr(10))}"
    for rest in ([], [ChatMessage("assistant", "Hi.")]):
        conversation = Conversation([ChatMessage("system", system), *rest])
        assert stabilize(conversation) is conversation


def test_an_answer_that_is_begun_stays_the_last_and_a_tools_result_may_be_what_is_answered() -> None:
    begun = ChatMessage("assistant", "It is")
    assert contents(asked(f"{YOU}\n{LEFT}", *TURN, begun))[-2:] == [f"Why?\n\n{LEFT}", "It is"]
    tool_result = ChatMessage("tool", "", answered_call_id="1")
    result = stabilize(asked(f"{YOU}\n{LEFT}", *TURN, tool_result))
    assert (result.messages[-1].content, result.has_volatile_tail) == (LEFT, False)  # nothing of it stays


def test_cuts_stay_where_the_text_is() -> None:
    text = f"{BILLING}\n{YOU}\n{LEFT}\nBe brief.\nBe kind."
    cuts = tuple(text.index(word) for word in ("cch", YOU, "Claude Code", LEFT[5:], "Be brief", "Be kind"))
    result = stabilize(Conversation([ChatMessage("system", text, cuts=cuts), *TURN])).messages[0]
    left = f"{YOU}\nBe brief.\nBe kind."
    assert result.content == left
    assert result.cuts == tuple(left.index(word) for word in ("Claude Code", "\nBe brief", "Be brief", "Be kind"))


@pytest.mark.parametrize(
    "hostile",
    [
        "<total_tokens>" * (MAX_SYSTEM_CHARS // 14),
        f"{LEFT}\n" * (MAX_SYSTEM_CHARS // 50),
        " " * MAX_SYSTEM_CHARS,
        "\n" * (MAX_SYSTEM_CHARS - 60) + LEFT,
        f"{GIT.partition('Recent')[0]}\n" * (MAX_SYSTEM_CHARS // 400),
        "gitStatus: " * (MAX_SYSTEM_CHARS // 11),
        BILLING[:28] + "a=b; " * (MAX_SYSTEM_CHARS // 6),
        f"{YOU}\n{LEFT}" + "x" * MAX_SYSTEM_CHARS,
    ],
)
def test_hostile_text_is_as_quick_to_read_as_any(hostile: str) -> None:
    """The suite's limit of a test's time is what fails here: with a way to go back, these take hours."""
    result = stabilize(asked(hostile))
    assert len(result.messages[-1].content) <= len(TURN[-1].content) + 100


def test_every_rule_has_a_name_of_its_own_and_a_mark_that_its_shape_begins_with() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.shape.pattern.removeprefix("(?P<part>").startswith(rule.mark[:10])
