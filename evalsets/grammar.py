"""The built-in set: 500 minimal pairs of English grammar, generated from templates and word lists of our own.

Each pair is one right and one wrong sentence that differ as little as possible; a model answers by giving the right one
the higher likelihood. Ten phenomena, fifty pairs each; the way of asking follows BLiMP (Warstadt et al. 2020,
arXiv 1912.00582), the sentences do not. Chance is 0.5.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from qtool.evalsets.items import ChoiceSet, Item

PER_PHENOMENON = 50
SEED = 20

Pair = tuple[str, str]  # the right sentence, the wrong one
Maker = Callable[[random.Random], Pair]

PEOPLE = {  # singular → plural
    "teacher": "teachers", "doctor": "doctors", "farmer": "farmers", "child": "children", "woman": "women",
    "man": "men", "student": "students", "neighbour": "neighbours", "sailor": "sailors", "painter": "painters",
    "nurse": "nurses", "singer": "singers", "writer": "writers", "lawyer": "lawyers", "waiter": "waiters",
    "manager": "managers", "officer": "officers", "tourist": "tourists", "guest": "guests", "pilot": "pilots",
}  # fmt: skip
THINGS = {
    "key": "keys", "letter": "letters", "picture": "pictures", "bottle": "bottles", "box": "boxes", "knife": "knives",
    "book": "books", "lamp": "lamps", "chair": "chairs", "shoe": "shoes", "ticket": "tickets", "window": "windows",
    "basket": "baskets", "mirror": "mirrors", "coat": "coats", "map": "maps", "shelf": "shelves", "bicycle": "bicycles",
    "report": "reports", "photograph": "photographs",
}  # fmt: skip
PLACES = ("kitchen", "garden", "office", "cellar", "harbour", "library", "village", "station", "market", "hallway")
ADJECTIVES = ("old", "small", "broken", "heavy", "new", "dirty", "wooden", "expensive", "strange", "beautiful")
TRANSITIVE = {  # base → (third person, past)
    "admire": ("admires", "admired"), "know": ("knows", "knew"), "see": ("sees", "saw"),
    "like": ("likes", "liked"), "help": ("helps", "helped"), "trust": ("trusts", "trusted"),
    "visit": ("visits", "visited"), "follow": ("follows", "followed"),
}  # fmt: skip
STATES = ("tired", "happy", "very late", "quite busy", "ready to leave", "afraid of dogs", "outside", "very rich")
FOUND = ("on the table", "in the drawer", "very old", "too expensive", "ready", "missing", "here", "very dirty")
IRREGULAR = {  # base → (past, participle); only verbs whose past and participle differ
    "eat": ("ate", "eaten"), "write": ("wrote", "written"), "take": ("took", "taken"), "break": ("broke", "broken"),
    "see": ("saw", "seen"), "drive": ("drove", "driven"), "choose": ("chose", "chosen"), "steal": ("stole", "stolen"),
    "hide": ("hid", "hidden"), "draw": ("drew", "drawn"), "forget": ("forgot", "forgotten"), "give": ("gave", "given"),
    "throw": ("threw", "thrown"), "wear": ("wore", "worn"), "shake": ("shook", "shaken"), "tear": ("tore", "torn"),
}  # fmt: skip
OBJECTS_OF = {
    "eat": "the apple", "write": "the letter", "take": "the bus", "break": "the window", "see": "the film",
    "drive": "the truck", "choose": "the colour", "steal": "the bicycle", "hide": "the money", "draw": "the map",
    "forget": "the answer", "give": "the books to me", "throw": "the ball", "wear": "the coat", "shake": "the bottle",
    "tear": "the paper",
}  # fmt: skip
FEMALE = ("Mary", "Susan", "the queen", "the actress", "Linda", "the girl", "my sister", "Emma", "his mother")
MALE = ("John", "Peter", "the king", "the boy", "David", "my brother", "the actor", "Robert", "her father")
REFLEXIVE = ("hurt {}", "introduced {} to the guests", "saw {} in the mirror", "blamed {} for the accident",
             "taught {} to play the piano", "was talking to {}", "bought {} a new coat", "was proud of {}")  # fmt: skip
INTRANSITIVE = ("arrived", "vanished", "fell asleep", "sneezed", "laughed", "disappeared", "went away", "smiled")
COUNTABLE = ("books", "chairs", "people", "questions", "apples", "mistakes", "friends", "cars", "bottles", "letters")
MASS = ("water", "money", "time", "rice", "furniture", "sugar", "advice", "homework", "traffic", "information")
PREPOSITIONS = (  # frame, right word, wrong words
    ("depends {} the weather", "on", ("at", "with", "to")), ("is afraid {} spiders", "of", ("with", "at", "on")),
    ("is interested {} music", "in", ("on", "at", "of")), ("listens {} the radio every day", "to", ("at", "on", "of")),
    ("is good {} mathematics", "at", ("on", "of", "to")), ("is waiting {} the train", "for", ("at", "to", "of")),
    ("believes {} ghosts", "in", ("to", "at", "for")), ("is married {} a dentist", "to", ("with", "at", "of")),
    ("apologized {} the mistake", "for", ("of", "at", "to")), ("agreed {} the plan", "with", ("at", "of", "by")),
    ("suffers {} headaches", "from", ("at", "on", "to")), ("belongs {} a chess club", "to", ("at", "of", "by")),
    ("is famous {} good songs", "for", ("of", "at", "to")), ("succeeded {} finding it", "in", ("to", "at", "on")),
    ("is responsible {} the mistake", "for", ("of", "at", "to")), ("was accused {} theft", "of", ("for", "at", "to")),
)  # fmt: skip


def _noun(rng: random.Random, nouns: dict[str, str], plural: bool) -> str:
    singular = rng.choice(sorted(nouns))
    return nouns[singular] if plural else singular


def _be(plural: bool, past: bool) -> str:
    return ("were" if plural else "was") if past else ("are" if plural else "is")


def agreement_across_a_phrase(rng: random.Random) -> Pair:
    plural, past = rng.random() < 0.5, rng.random() < 0.3
    head, other = _noun(rng, THINGS, plural), _noun(rng, PEOPLE, not plural)
    start, end = f"The {head} of the {other}", rng.choice(FOUND)
    return f"{start} {_be(plural, past)} {end}.", f"{start} {_be(not plural, past)} {end}."


def agreement_across_a_clause(rng: random.Random) -> Pair:
    plural = rng.random() < 0.5
    head, other = _noun(rng, PEOPLE, plural), _noun(rng, PEOPLE, not plural)
    base = rng.choice(sorted(TRANSITIVE))
    verb = TRANSITIVE[base][0] if plural else base  # agrees with `other`, whose number is the opposite
    start, end = f"The {head} that the {other} {verb}", rng.choice(STATES)
    return f"{start} {_be(plural, False)} {end}.", f"{start} {_be(not plural, False)} {end}."


def reflexive(rng: random.Random) -> Pair:
    action = rng.choice(REFLEXIVE)
    match rng.randrange(3):
        case 0:
            who, right, wrong = rng.choice(FEMALE), "herself", "himself"
        case 1:
            who, right, wrong = rng.choice(MALE), "himself", "herself"
        case _:
            who, right, wrong = f"the {_noun(rng, PEOPLE, True)}", "themselves", rng.choice(("himself", "itself"))
            action = action.replace("was ", "were ").replace("a new coat", "new coats")
    who = who[0].upper() + who[1:]
    return f"{who} {action.format(right)}.", f"{who} {action.format(wrong)}."


def determiner_and_noun(rng: random.Random) -> Pair:
    plural = rng.random() < 0.5
    singular = rng.choice(sorted(THINGS))
    right, wrong = (THINGS[singular], singular) if plural else (singular, THINGS[singular])
    determiner = rng.choice(("these", "those") if plural else ("this", "that"))
    base = rng.choice(("bought", "forgot", "cleaned", "moved", "found", "wanted"))
    start = f"The {_noun(rng, PEOPLE, rng.random() < 0.5)} {base} {determiner} {rng.choice(ADJECTIVES)}"
    return f"{start} {right}.", f"{start} {wrong}."


def past_and_participle(rng: random.Random) -> Pair:
    base = rng.choice(sorted(IRREGULAR))
    (past, participle), thing = IRREGULAR[base], OBJECTS_OF[base]
    who = f"The {_noun(rng, PEOPLE, False)}"
    if rng.random() < 0.5:
        return f"{who} has {participle} {thing}.", f"{who} has {past} {thing}."
    when = rng.choice(("Yesterday", "Last week", "Two days ago"))
    who = who.lower()
    return f"{when} {who} {past} {thing}.", f"{when} {who} {participle} {thing}."


def word_order(rng: random.Random) -> Pair:
    who = f"the {_noun(rng, PEOPLE, False)}"
    third, past = TRANSITIVE[rng.choice(sorted(TRANSITIVE))]
    other = f"the {_noun(rng, PEOPLE, True)}"
    match rng.randrange(4):
        case 0:
            question, base = rng.choice(("Where", "When", "Why")), rng.choice(sorted(TRANSITIVE))
            return f"{question} did {who} {base} {other}?", f"{question} {who} did {base} {other}?"
        case 1:
            return f"I wonder why {who} {past} {other}.", f"I wonder why did {who} {past} {other}."
        case 2:
            adverb = rng.choice(("always", "never", "often", "still"))
            return f"{who.capitalize()} {adverb} {third} {other}.", f"{who.capitalize()} {third} {adverb} {other}."
        case _:
            adjective, thing, place = rng.choice(ADJECTIVES), _noun(rng, THINGS, False), rng.choice(PLACES)
            start, end = "There was a", f"in the {place}."
            return f"{start} very {adjective} {thing} {end}", f"{start} {thing} very {adjective} {end}"


def licensing(rng: random.Random) -> Pair:
    """`ever`, `any` and `yet` need a negative word."""
    who, place = f"the {_noun(rng, PEOPLE, True)}", rng.choice(PLACES)
    match rng.randrange(3):
        case 0:
            end = f"of {who} have ever been to the {place}."
            return f"None {end}", f"Most {end}"
        case 1:
            end = f"seen any {_noun(rng, THINGS, True)} in the {place}."
            return f"{who.capitalize()} have not {end}", f"{who.capitalize()} have now {end}"
        case _:
            end = f"has found the {rng.choice(ADJECTIVES)} {_noun(rng, THINGS, False)} yet."
            return f"Nobody in the {place} {end}", f"Everybody in the {place} {end}"


def transitivity(rng: random.Random) -> Pair:
    who, thing = f"The {_noun(rng, PEOPLE, False)}", f"the {_noun(rng, THINGS, False)}"
    if rng.random() < 0.5:
        base = rng.choice(("bought", "lost", "cleaned", "found", "carried", "dropped"))
        return f"{who} {base} {thing}.", f"{who} {rng.choice(INTRANSITIVE)} {thing}."
    end, lacks_object = f"in the {rng.choice(PLACES)}.", rng.choice(("devoured", "mentioned", "avoided", "owned"))
    return f"{who} {rng.choice(INTRANSITIVE)} {end}", f"{who} {lacks_object} {end}"


def quantity(rng: random.Random) -> Pair:
    countable = rng.random() < 0.5
    noun = rng.choice(COUNTABLE if countable else MASS)
    many, much = rng.choice((("many", "much"), ("fewer", "a little"), ("a few", "a little"), ("too many", "too much")))
    right, wrong = (many, much) if countable else (much, many)
    who, place = f"The {_noun(rng, PEOPLE, True)}", rng.choice(PLACES)
    frames = ((f"{who} had", "left."), (f"{who} found", f"in the {place}."), (f"{who} needed", "today."))
    start, end = rng.choice(frames)
    return f"{start} {right} {noun} {end}", f"{start} {wrong} {noun} {end}"


def prepositions(rng: random.Random) -> Pair:
    frame, right, wrongs = rng.choice(PREPOSITIONS)
    who = rng.choice((f"The {_noun(rng, PEOPLE, False)}", "My sister", "His uncle", "Our neighbour", "The old man"))
    return f"{who} {frame.format(right)}.", f"{who} {frame.format(rng.choice(wrongs))}."


PHENOMENA: Sequence[Maker] = (
    agreement_across_a_phrase, agreement_across_a_clause, reflexive, determiner_and_noun, past_and_participle,
    word_order, licensing, transitivity, quantity, prepositions,
)  # fmt: skip


def grammar_set() -> ChoiceSet:
    """The 500 pairs, the same on every machine; which choice is right alternates at random."""
    items: list[Item] = []
    for maker in PHENOMENA:
        rng = random.Random(f"{SEED} {maker.__name__}")
        seen: set[Pair] = set()
        while len(seen) < PER_PHENOMENON:
            pair = maker(rng)
            if pair in seen:
                continue
            seen.add(pair)
            answer = rng.randrange(2)
            choices = pair if answer == 0 else pair[::-1]
            items.append(Item(f"{maker.__name__}-{len(seen)}", "", choices, answer, "", maker.__name__))
    return ChoiceSet("grammar", tuple(items), f"built in, seed {SEED}")
