"""Words that the synthetic tasks draw from, and values made of them."""

from __future__ import annotations

import re
from bisect import bisect
from itertools import accumulate
from random import Random

from attrs import define, field


def split_list(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


NAMES = split_list(
    "Alice Bruno Carla Dmitri Elena Farid Greta Hugo Ingrid Jonas Kira Liam Mira Nadia Oscar Petra Quentin Rosa "
    "Samir Tessa Uma Viktor Wanda Xavier Yara Zeno Anna Ben Clara David Emma Felix Hana Ivan Julia Karl Lena "
    "Marco Nina Otto Paul Rita Sven Tom Vera Walter Maria John Sarah James Linda Peter Susan Mark Laura Chris "
    "Sophie Max Lucy Sam"
)
NOUNS = split_list(
    "apple anchor basket bridge candle castle desk door engine feather forest garden hammer harbour island jacket "
    "kettle key buckets lamp lantern letter magnet mirror mountain needle notebook ocean orchard paper pencil "
    "piano pillow planet pocket river rocket saddle shelf shovel signal spoon station stone table ticket tower "
    "train tunnel umbrella valley violin wagon wallet wheel whistle window winter clock bottle camera carpet "
    "circle cloud coin compass copper cotton curtain diamond drum eagle fence flame flute glass glove helmet "
    "honey jungle kite marble meadow"
)
ADJECTIVES = split_list(
    "amber ancient brave bright calm clever cold crimson curious dusty eager early fancy fierce gentle golden "
    "happy heavy hidden hollow humble icy jolly keen large lively lucky mellow misty modern narrow noble old "
    "orange pale plain proud quick quiet rapid rare red rough round rusty secret sharp shiny silent silver simple "
    "slow small smooth soft solid steady strong sweet tall tiny velvet warm wide wild wise wooden young"
)
COLOURS = split_list("red blue green yellow orange purple pink brown black white grey teal violet gold silver cyan")
ANIMALS = split_list("cat dog fox owl bear wolf horse rabbit tiger lion otter badger eagle dolphin penguin turtle")
FOODS = split_list("pizza pasta soup rice bread cheese salad sushi tacos pancakes curry noodles apples grapes toast")
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Switzerland": "Bern", "Poland": "Warsaw", "Greece": "Athens", "Sweden": "Stockholm",
    "Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki", "Ireland": "Dublin", "Hungary": "Budapest",
    "Belgium": "Brussels", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Russia": "Moscow",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Australia": "Canberra", "Turkey": "Ankara",
    "the United States": "Washington", "the United Kingdom": "London", "the Netherlands": "Amsterdam",
}  # fmt: skip
CITIES = tuple(sorted({*CAPITALS.values(), "Boston", "Munich", "Milan", "Geneva", "Kyoto", "Toronto", "Porto", "Lyon"}))
TOPICS = split_list(
    "quantum physics,the French Revolution,the stock market,cooking,football,love,gravity,the weather,"
    "black holes,war,dinosaurs,politics,photosynthesis,jazz,Shakespeare,blockchain,evolution,the moon,"
    "my taxes,health,religion,history,machine learning,neural networks,climate change,the economy,chess,"
    "Kubernetes,Rust,databases,the ocean,music,cars,my homework,philosophy,relativity,volcanoes,travel,art,"
    "movies,gardening,the Roman Empire,coffee,my girlfriend,my business,electricity,the internet,DNA,vaccines,"
    "space travel,marketing,a holiday,investing,sleep,sports",
    ",",
)

_WORD = re.compile(r"[A-Za-z]{3,12}")


@define(eq=False)
class Source:
    """Real code and real words for the tasks."""

    texts: tuple[str, ...]
    _ends: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._ends = list(accumulate(map(len, self.texts)))

    def excerpt(self, rng: Random, chars: int) -> str:
        """Return whole lines, about `chars` characters, from anywhere in the corpus; fewer where a file ends."""
        at = rng.randrange(self._ends[-1])
        index = bisect(self._ends, at)
        text = self.texts[index]
        offset = at - (self._ends[index] - len(text))
        start = text.rfind("\n", 0, offset) + 1
        if len(text) - start < chars:  # as much of the file's end as is asked for
            start = text.rfind("\n", 0, max(len(text) - chars, 0)) + 1
        stop = text.find("\n", start + chars)
        return text[start : stop + 1 if stop >= 0 else None].rstrip("\n") + "\n"

    def code(self, rng: Random, chars: int) -> str:
        """Return whole lines of one or more files, at least `chars` characters."""
        parts, length = [], 0
        while length < chars:
            parts.append(self.excerpt(rng, min(chars - length, 8000)))
            length += len(parts[-1])
        return "".join(parts)

    def words(self, rng: Random, count: int) -> list[str]:
        """Draw words as they occur in code and its documentation."""
        found: list[str] = []
        while len(found) < count:
            some = _WORD.findall(self.excerpt(rng, 600))
            found.extend(rng.choices(some, k=min(count, 12)) if some else ())
        return found[:count]


def number(rng: Random, digits_max: int = 6) -> str:
    digits = rng.randint(2, digits_max)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def noun_phrase(rng: Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def value(rng: Random, word: str) -> str:
    """Draw a value: a number, a code or a phrase. word: may be a part of it."""
    kinds = (
        number,
        number,
        lambda rng: f"{rng.getrandbits(32):08x}",
        noun_phrase,
        lambda rng: f"{word}-{rng.randrange(100, 10000)}",
        lambda rng: f"{rng.choice(NOUNS)} {rng.randrange(10, 10000)}",
        lambda rng: f"{rng.randrange(1000)}.{rng.randrange(100)}",
        lambda _: word,
        lambda rng: f"{rng.choice(NAMES)} {word.capitalize()}",
    )
    return rng.choice(kinds)(rng)


def key(rng: Random, word: str) -> str:
    """Draw a name for a value."""
    kinds = (
        lambda: word,
        lambda: f"{word}_{rng.choice(NOUNS)}",
        lambda: f"{rng.choice(ADJECTIVES)}_{rng.choice(NOUNS)}",
        lambda: f"{word}{rng.randrange(100)}",
        lambda: rng.choice(NAMES),
        lambda: f"{rng.choice(NOUNS)}.{word}",
        lambda: f"{rng.getrandbits(20):05x}",
    )
    return rng.choice(kinds)()
