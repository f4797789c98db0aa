"""Stories like bAbI's for where its files are not: people who walk, take, leave and give things.

The world knows where everybody and everything is; the story tells only what happens in it. A
question is asked when the story has told enough to answer it. Facts come in pairs, and after each
pair a question is tried, five a story, as in bAbI's files; qa4 is two rooms beside a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple, TypeVar

import numpy as np

from atlas_lm.tasks.babi import OBJECTS, ROOMS, Question, Questions
from atlas_lm.tasks.samples import Part, check_part, generator_of, part_of

ACTORS = ("Daniel", "John", "Mary", "Sandra")
GIVING_ACTORS = ("Bill", "Fred", "Jeff", "Mary")
MOVED = ("moved to", "went to", "went back to", "journeyed to", "travelled to")
TOOK = ("got", "grabbed", "took", "picked up")
LEFT = ("left", "dropped", "discarded", "put down")
GAVE = ("gave", "handed", "passed")
THERE = 0.2
"""How often a fact that may end with "there" does."""
KEENNESS = 6
"""How much rather than anything else somebody gives; with it stories are as long as bAbI's."""
QUESTIONS_A_STORY = 5
RECENT = 5
"""The last fact that supports an answer is among the last this many, as in bAbI's files."""
COUNTS = {"train": 10_000, "eval": 1_000}
T = TypeVar("T")


def generated_questions(qa: str, part: Part, seed: int = 0, count: int | None = None) -> Questions:
    """As many questions as bAbI has, or `count`; training and evaluation never share one."""
    check_part(part)
    if qa not in MAKERS:
        raise ValueError(
            f"{qa}: no stories of our own; expected {', '.join(MAKERS)}, or a folder of bAbI files"
        )
    count = COUNTS[part] if count is None else count
    generator = generator_of("babi", qa, part, seed)
    items: list[Question] = []
    while len(items) < count:
        items += made_story(qa, generator, lambda question: part_of(question.content) == part)
    source = f"stories of our own by bAbI's rules, seed {seed}"
    return Questions(qa, part, tuple(items[:count]), source)


def made_story(
    qa: str,
    generator: np.random.Generator,
    wanted: Callable[[Question], bool],
    times: int = 1,
) -> list[Question]:
    """The wanted questions of a new story: one or more.

    times    as many questions as one of bAbI's has; the story goes on until they are asked, and of
             two rooms beside a third more is asked
    """
    while True:
        if found := [question for question in MAKERS[qa](generator, times) if wanted(question)]:
            return found


class Seen(NamedTuple):
    """A thing in a room, by a fact that was told."""

    room: str
    fact: int


class Gift(NamedTuple):
    giver: str
    thing: str
    taker: str
    fact: int


class World:
    """What is, and what was told of it."""

    def __init__(
        self,
        generator: np.random.Generator,
        actors: Sequence[str],
        things: Sequence[str] = (),
        giving: bool = False,
        always_there: bool = False,
    ):
        self.generator = generator
        self.giving = giving
        self.always_there = always_there
        """Whether things are always taken "there"."""
        self.room = {actor: self.pick(ROOMS) for actor in actors}
        self.lies = {thing: self.pick(ROOMS) for thing in things}
        self.holder: dict[str, str | None] = dict.fromkeys(things)
        self.facts: list[str] = []
        self.moves: dict[str, int] = {}
        """The fact that told where an actor is."""
        self.handled: dict[str, int] = {}
        """The fact that told who has a thing, or that nobody has it."""
        self.seen: dict[str, list[Seen]] = {thing: [] for thing in things}
        self.gifts: list[Gift] = []

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.generator.integers(len(options)))]

    def happens(self) -> None:
        """Somebody does something that can be done."""
        actor = self.pick(list(self.room))
        held = [thing for thing, holder in self.holder.items() if holder == actor]
        near = [
            thing
            for thing, holder in self.holder.items()
            if holder is None and self.lies[thing] == self.room[actor]
        ]
        others = [
            other for other in self.room if other != actor and self.room[other] == self.room[actor]
        ]
        acts: list[Callable[[], None]] = [lambda: self.move(actor)]
        if near:
            acts.append(lambda: self.take(actor, self.pick(near)))
        if held:
            acts.append(lambda: self.leave(actor, self.pick(held)))
        if held and others and self.giving:
            acts += KEENNESS * [lambda: self.give(actor, self.pick(held), self.pick(others))]
        self.pick(acts)()

    def move(self, actor: str) -> None:
        self.room[actor] = self.pick([room for room in ROOMS if room != self.room[actor]])
        self.moves[actor] = len(self.facts)
        self.facts.append(f"{actor} {self.pick(MOVED)} the {self.room[actor]}.")
        for thing, holder in self.holder.items():
            if holder == actor:
                self._notice(thing, actor)

    def take(self, actor: str, thing: str) -> None:
        self.holder[thing] = actor
        self.handled[thing] = len(self.facts)
        there = " there" if self.always_there or self._there() else ""
        self.facts.append(f"{actor} {self.pick(TOOK)} the {thing}{there}.")
        self._notice(thing, actor)

    def leave(self, actor: str, thing: str) -> None:
        self.holder[thing] = None
        self.lies[thing] = self.room[actor]
        self.handled[thing] = len(self.facts)
        there = " there" if self._there() else ""
        self.facts.append(f"{actor} {self.pick(LEFT)} the {thing}{there}.")
        self._notice(thing, actor)

    def give(self, actor: str, thing: str, taker: str) -> None:
        self.holder[thing] = taker
        self.handled[thing] = len(self.facts)
        self.gifts.append(Gift(actor, thing, taker, len(self.facts)))
        self.facts.append(f"{actor} {self.pick(GAVE)} the {thing} to {taker}.")

    def _there(self) -> bool:
        return bool(self.generator.random() < THERE)

    def _notice(self, thing: str, actor: str) -> None:
        """The reader knows where the thing is if he knows where the actor is."""
        rooms = self.seen[thing]
        if actor in self.moves and (not rooms or rooms[-1].room != self.room[actor]):
            rooms.append(Seen(self.room[actor], self.moves[actor]))


class Asked(NamedTuple):
    text: str
    answer: str
    supporting: tuple[int, ...]


def _story(
    world: World, askable: Callable[[World], Iterator[Asked]], times: int
) -> Iterator[Question]:
    for _ in range(times * QUESTIONS_A_STORY):
        fresh: list[Asked] = []
        while not fresh:
            world.happens()
            world.happens()
            oldest = len(world.facts) - RECENT
            fresh = [each for each in askable(world) if max(each.supporting) >= oldest]
        yield Question(tuple(world.facts), *world.pick(fresh))


def _where_actors_are(world: World) -> Iterator[Asked]:
    for actor, fact in world.moves.items():
        yield Asked(f"Where is {actor}?", world.room[actor], (fact,))


def _where_things_are(world: World) -> Iterator[Asked]:
    """Of things that somebody has carried; whoever has one now has told where he is."""
    for thing, rooms in world.seen.items():
        holder = world.holder[thing]
        if rooms and (holder is None or holder in world.moves):
            supporting = (world.handled[thing], rooms[-1].fact)
            yield Asked(f"Where is the {thing}?", rooms[-1].room, supporting)


def _where_things_were(world: World) -> Iterator[Asked]:
    for thing, rooms in world.seen.items():
        if len(rooms) >= 3:
            before, now = rooms[-2:]
            text = f"Where was the {thing} before the {now.room}?"
            yield Asked(text, before.room, (world.handled[thing], now.fact, before.fact))


def _who_gave_what(world: World) -> Iterator[Asked]:
    """Of the last time that a thing was given, in words that fit no later gift."""
    last = {gift.thing: gift for gift in world.gifts}
    for giver, thing, taker, fact in last.values():
        yield Asked(f"Who gave the {thing}?", giver, (fact,))
        yield Asked(f"Who gave the {thing} to {taker}?", giver, (fact,))
        yield Asked(f"Who received the {thing}?", taker, (fact,))
        yield Asked(f"Who did {giver} give the {thing} to?", taker, (fact,))
        others = [g for g in world.gifts if (g.giver, g.taker) == (giver, taker)]
        if all(gift.thing == thing for gift in others):
            yield from 2 * (Asked(f"What did {giver} give to {taker}?", thing, (fact,)),)


def _actors(generator: np.random.Generator, times: int) -> Iterator[Question]:
    return _story(World(generator, ACTORS), _where_actors_are, times)


def _things(generator: np.random.Generator, times: int) -> Iterator[Question]:
    world = World(generator, ACTORS, OBJECTS, always_there=True)
    return _story(world, _where_things_are, times)


def _things_before(generator: np.random.Generator, times: int) -> Iterator[Question]:
    return _story(World(generator, ACTORS, OBJECTS), _where_things_were, times)


def _gifts(generator: np.random.Generator, times: int) -> Iterator[Question]:
    world = World(generator, GIVING_ACTORS, OBJECTS, giving=True, always_there=True)
    return _story(world, _who_gave_what, times)


def _rooms(generator: np.random.Generator, times: int) -> Iterator[Question]:
    """Three rooms in a line; two facts in any order and wording; neighbours are asked for."""
    names = [ROOMS[i] for i in generator.permutation(len(ROOMS))[:3]]
    forth, back = (("west", "east"), ("north", "south"))[int(generator.integers(2))]
    facts = []
    for one, next_one in pairwise(names):
        worded = ((one, forth, next_one), (next_one, back, one))[int(generator.integers(2))]
        facts.append("The {} is {} of the {}.".format(*worded))
    chosen = tuple(int(generator.integers(2)) for _ in range(3))
    swapped = bool(generator.integers(2))
    told = tuple(facts[::-1] if swapped else facts)
    questions = [chosen]
    if times > 1:
        others = [each for each in product((0, 1), repeat=3) if each != chosen]
        questions += [others[i] for i in generator.permutation(len(others))[: times - 1]]
    for pair, turned, other in questions:
        text, answer = _neighbour(names[pair : pair + 2], forth, back, bool(turned), bool(other))
        yield Question(told, text, answer, (1 - pair if swapped else pair,))


def _neighbour(
    pair: Sequence[str], forth: str, back: str, turned: bool, other: bool
) -> tuple[str, str]:
    """A question for one of the two, seen from the other one, and the answer."""
    one, next_one = pair
    if turned:
        one, next_one, forth, back = next_one, one, back, forth
    text = f"What is the {next_one} {back} of?" if other else f"What is {forth} of the {next_one}?"
    return text, one


MAKERS: dict[str, Callable[[np.random.Generator, int], Iterator[Question]]] = {
    "qa1": _actors,
    "qa2": _things,
    "qa3": _things_before,
    "qa4": _rooms,
    "qa5": _gifts,
}
