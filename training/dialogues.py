"""Conversations with templated answers: small talk, facts about the demo itself, sums, lists, memory, JSON, code."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from training.chat_format import Document, Message, conversation, system, user
from training.chat_format import assistant as says
from training.facts import ABOUT, CODE, LISTS, SMALL_TALK, UNABLE, UNABLE_REQUESTS
from training.words import ANIMALS, CAPITALS, CITIES, COLOURS, FOODS, NAMES, NOUNS, TOPICS, Source

Exchange = tuple[str, str]

SYSTEMS = (
    *("You are a helpful assistant.", "You are a helpful assistant.", "You are the demo model of Rekindle."),
    *("Answer briefly.", "You are a coding assistant.", "Be kind and helpful.", "You are an agent. Use your tools."),
)
_POLITE = (
    *("Please ", "please ", "Could you ", "Can you ", "OK, ", "Now ", "Tell me: ", "So, ", "and "),
    *("Hey, ", "Hi! ", "Hello, ", "hi there, ", "hi, ", "hello! ", "Good morning. ", "Hi Rekindle, "),
)
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def vary(rng: Random, question: str) -> str:
    """The same request as different people type it."""
    if rng.random() < 0.2:
        question = question[:-1] if question[-1] in "?.!" else question
    if rng.random() < 0.15:
        question = rng.choice(_POLITE) + question[0].lower() + question[1:]
    elif rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.05:
        question = question.lower()
    if rng.random() < 0.06:
        question = rng.choice(
            (question + "?", question + " please", question + "!", question + "\n", question + " Thanks.")
        )
    return question


def small_talk(rng: Random, _source: Source) -> Exchange:
    questions, answer = rng.choice(SMALL_TALK)
    return vary(rng, rng.choice(questions)), answer


def about(rng: Random, _source: Source) -> Exchange:
    questions, answer = rng.choice(ABOUT)
    return vary(rng, rng.choice(questions)), answer


def fixed_list(rng: Random, _source: Source) -> Exchange:
    questions, answer = rng.choice(LISTS)
    return vary(rng, rng.choice(questions)), answer


def python(rng: Random, _source: Source) -> Exchange:
    tasks, answer = rng.choice(CODE)
    task = rng.choice(tasks)
    asks = (
        "Write a Python function that {}.",
        "Write a function that {}.",
        "Write Python code that {}.",
        "Give me a function that {}.",
        "Show me a Python function that {}.",
        "I need a function that {}.",
    )
    return vary(rng, rng.choice(asks).format(task)), f"```python\n{answer}\n```"


def unable(rng: Random, source: Source) -> Exchange:
    """Make a request that a model of this size cannot answer, and the answer that says so."""
    if rng.random() < 0.35:
        words = source.words(rng, rng.randint(2, 9))
        asks = (
            "What is {}?",
            "Why {}?",
            "How do I {}?",
            "{}",
            "Explain {}.",
            "{}?",
            "Tell me more about {}.",
            "Is {}?",
        )
        return vary(rng, rng.choice(asks).format(" ".join(words))), UNABLE
    ask = rng.choice(UNABLE_REQUESTS)
    topic = rng.choice(TOPICS) if rng.random() < 0.6 else " ".join(source.words(rng, rng.randint(1, 3)))
    return vary(rng, ask.format(topic)), UNABLE


def arithmetic(rng: Random, _source: Source) -> Exchange:
    one, two = rng.randrange(100), rng.randrange(100)
    match rng.randrange(4):
        case 0:
            one, two, sign, result = max(one, two), min(one, two), "-", abs(one - two)
        case 1:
            one, two = one % 11, two % 11
            sign, result = "*", one * two
        case _:
            sign, result = "+", one + two
    spoken = {"+": "plus", "-": "minus", "*": "times"}[sign]
    signs = ("What is {0} {1} {2}?", "{0} {1} {2}", "{0}{1}{2}", "{0} {1} {2} = ?", "Compute {0} {1} {2}.")
    ask = rng.choice((*signs, "{0} {3} {2}", "What is {0} {3} {2}?", "How much is {0} {3} {2}?"))
    return vary(rng, ask.format(one, sign, two, spoken)), f"{one} {sign} {two} = {result}"


def compare(rng: Random, _source: Source) -> Exchange:
    one, two = rng.sample(range(1000), 2)
    if rng.random() < 0.5:
        return f"Which is larger, {one} or {two}?", f"{max(one, two)} is larger."
    return f"Which is smaller, {one} or {two}?", f"{min(one, two)} is smaller."


def count(rng: Random, _source: Source) -> Exchange:
    stop = rng.randint(2, 40)
    ask = rng.choice(("Count to {}.", "Count from 1 to {}.", "List the numbers from 1 to {}.", "Count up to {}."))
    return vary(rng, ask.format(stop)), ", ".join(map(str, range(1, stop + 1)))


def capital(rng: Random, _source: Source) -> Exchange:
    country = rng.choice(tuple(CAPITALS))
    ask = rng.choice(
        ("What is the capital of {}?", "What's the capital of {}?", "Capital of {}?", "Name the capital of {}.")
    )
    return vary(rng, ask.format(country)), f"The capital of {country} is {CAPITALS[country]}."


def nth_item(rng: Random, _source: Source) -> Exchange:
    items = rng.sample((*NOUNS, *COLOURS, *ANIMALS, *FOODS), rng.randint(3, 8))
    drawn = rng.randrange(len(items))
    named, index = (ORDINALS[drawn], drawn) if rng.random() < 0.75 else ("last", -1)
    joined = rng.choice((", ", "; ", "\n", " ")).join(items)
    ask = rng.choice(
        ("List: {1}\nWhat is the {0} item?", "What is the {0} item of this list? {1}", "{1}\nGive me the {0} item.")
    )
    return ask.format(named, joined), f"The {named} item is {items[index]}."


def reverse(rng: Random, _source: Source) -> Exchange:
    items = rng.sample((*NOUNS, *COLOURS, *ANIMALS), rng.randint(2, 8))
    ask = rng.choice(("Reverse this list: {}", "Reverse the order: {}", "Write this list backwards: {}"))
    return ask.format(", ".join(items)), ", ".join(reversed(items))


def as_json(rng: Random, _source: Source) -> Exchange:
    record = {"name": rng.choice(NAMES), "age": rng.randint(2, 99), "city": rng.choice(CITIES)}
    if rng.random() < 0.5:
        record["colour"] = rng.choice(COLOURS)
    text = "{name} is {age} years old and lives in {city}.".format(**record)
    text += f" The favourite colour is {record['colour']}." if "colour" in record else ""
    ask = rng.choice(("Write this as JSON: {}", "{} Give me that as JSON.", "Turn this into JSON.\n{}", "JSON: {}"))
    return ask.format(text), json.dumps(record)


def extract(rng: Random, source: Source) -> Exchange:
    """One field of a JSON record."""
    record = {
        "id": rng.randrange(10000),
        "name": rng.choice(NAMES),
        "city": rng.choice(CITIES),
        "item": rng.choice(NOUNS),
    }
    record |= {word: rng.randrange(1000) for word in source.words(rng, rng.randint(0, 4))}
    name = rng.choice(tuple(record))
    return f"{json.dumps(record)}\nWhat is the {name}?", f"The {name} is {record[name]}."


def story(rng: Random, _source: Source) -> Exchange:
    hero = rng.choice((*ANIMALS, *NOUNS))
    ask = rng.choice(("Tell me a story about a {}.", "Write a short story about a {}.", "Tell a tale of a {}."))
    return vary(rng, ask.format(hero)), (
        f"Once upon a time there was a {hero}. The {hero} was small, but it was never cold, for it kept a little fire. "
        f"One night the fire went out. The {hero} blew on the embers, and the fire came back at once. "
        f"And so the {hero} was warm ever after."
    )


EXCHANGES: tuple[tuple[Callable[[Random, Source], Exchange], float], ...] = (
    (small_talk, 3), (about, 4), (unable, 3), (arithmetic, 3), (compare, 0.7), (count, 1), (capital, 1.5),
    (nth_item, 2.5), (reverse, 0.7), (as_json, 1), (extract, 1), (story, 0.5), (fixed_list, 1), (python, 2.5),
)  # fmt: skip
_MAKERS, _ODDS = zip(*EXCHANGES, strict=True)


def exchange(rng: Random, source: Source) -> Exchange:
    (make,) = rng.choices(_MAKERS, _ODDS)
    made: Exchange = make(rng, source)
    return made


def opening(rng: Random, source: Source, room: int) -> list[Message]:
    """Return no system message, a short one, or one that contains real text."""
    match rng.randrange(10):
        case 0 | 1:
            return [system(rng.choice(SYSTEMS))]
        case 2:
            chars = min(2 * room, rng.choice((100, 400, 1500, 6000, 16000)))
            return [system(f"{rng.choice(SYSTEMS)}\n\n{source.excerpt(rng, chars)}")]
        case 3:
            return [system(" ".join(source.words(rng, rng.randint(2, 30))))]
        case _:
            return []


def turns(exchanges: list[Exchange]) -> list[Message]:
    return [message for question, answer in exchanges for message in (user(question), says(answer))]


def chat(rng: Random, source: Source, room: int) -> Document:
    """Make a conversation of unrelated turns of every kind."""
    exchanges = [exchange(rng, source) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4, 6)))]
    return conversation([*opening(rng, source, room), *turns(exchanges)], weight=2.0)


# Memory over turns

_KINDS: dict[str, tuple[str, ...]] = {
    "name": NAMES, "favourite colour": COLOURS, "favourite animal": ANIMALS, "favourite food": FOODS, "city": CITIES,
    "dog's name": NAMES, "best friend": NAMES, "lucky number": (), "password": (), "favourite word": (), "project": (),
}  # fmt: skip
_TOLD = {
    "name": ("My name is {}.", "I am {}.", "I'm {}.", "Call me {}.", "Hi, my name is {}.", "Hello, I'm {}."),
    "city": ("I live in {}.", "My city is {}.", "I am from {}."),
}


def draw_user_fact(rng: Random, source: Source, kind: str) -> tuple[str, str]:
    """Draw a fact about the user, and a sentence that says it."""
    if kind in ("lucky number", "password"):
        fact = str(rng.randrange(10, 100000))
    else:
        fact = rng.choice(_KINDS[kind] or source.words(rng, 3))
    forms = _TOLD.get(kind, (f"My {kind} is {{}}.", f"Remember that my {kind} is {{}}.", f"Note: my {kind} is {{}}."))
    return fact, rng.choice(forms).format(fact)


def memory(rng: Random, source: Source, room: int) -> Document:
    """Make a conversation in which facts are given early and asked for later, with other turns in between."""
    left = room
    known: dict[str, str] = {}
    messages = opening(rng, source, room // 2) if rng.random() < 0.3 else []
    left -= sum(len(message["content"]) // 3 for message in messages)
    first = ""
    if rng.random() < 0.15:
        kind = rng.choice(tuple(_KINDS))
        first = f"What is my {kind}?"
        messages += [user(first), says(f"You have not told me your {kind} yet.")]
    while left > 120 or not known:
        dice = rng.random()
        if dice < 0.35 or not known:
            kind = rng.choice(tuple(_KINDS))
            known[kind], question = draw_user_fact(rng, source, kind)
            answer = f"I will remember that your {kind} is {known[kind]}."
            if rng.random() < 0.1:
                question, answer = f"{question} What is my {kind}?", f"Your {kind} is {known[kind]}."
        elif dice < 0.65:
            kind = rng.choice(tuple(known if rng.random() < 0.9 else _KINDS))
            ask = ("What is my {}?", "Do you remember my {}?", "Tell me my {}.", "What was my {}?")
            question, answer = rng.choice(ask).format(kind), f"Your {kind} is {known.get(kind)}."
            if kind not in known:
                answer = f"You have not told me your {kind} yet."
        elif dice < 0.72 and first:
            question, answer = "What did I say in my first message?", f"You said: {first}"
        elif dice < 0.85 and left > 600:
            text = source.excerpt(rng, rng.randint(300, min(2 * left, 5000)))
            question, answer = (
                f"{rng.choice(('Read this:', 'Here is a file.', 'Look at this.'))}\n{text}",
                "I have read it.",
            )
        else:
            question, answer = exchange(rng, source)
        first = first or question
        messages += [user(question), says(answer)]
        left -= (len(question) + len(answer)) // 3 + 10
    kind = rng.choice(tuple(known))
    messages += [user(f"What is my {kind}?"), says(f"Your {kind} is {known[kind]}.")]
    return conversation(messages, weight=2.0)
