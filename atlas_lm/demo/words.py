"""Words of which facts are made: things with an adjective, people, places.

What is for training and what for testing has no word in common.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from atlas_lm.demo.forms import MARKS, Part

SHORTEST, LONGEST = 3, 10
"""Letters of a strange word."""
ENDING = 2
"""Letters by which words are alike: walked and asked, quickly and gladly."""


NUMBERED, NUMBERS = 0.5, (1, 2, 3, 5, 6)
"""Part of the decoys that have a number too, and its digits."""


@dataclass(frozen=True)
class Words:
    """What the subjects and the places of facts are drawn from."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    names: tuple[str, ...]
    places: tuple[str, ...]
    strange: tuple[str, ...] = ()
    """Any words, which stand for any of those now and then: whoever learns with them learns to
    remember words that it never saw in such a sentence."""
    share: float = 0.0
    """How often."""
    invented: float = 0.0
    """Part of the strange words that are made of the beginning of one and the end of another: of
    those there are so many that they cannot be known by heart."""
    around: tuple[str, ...] = ()
    """Any words, which stand around a subject now and then: whoever learns with them learns to read
    sentences that it never saw."""
    loose: float = 0.0
    """How often, up to a half."""
    never: frozenset[str] = frozenset()
    """What no word may be."""

    @property
    def all(self) -> frozenset[str]:
        """Every word that something may be called, in small letters."""
        lists = (self.adjectives, self.nouns, self.names, self.places, self.strange)
        return frozenset(word.lower() for words in lists for word in words)

    def without(self, others: frozenset[str]) -> Words:
        """Those that are not among the others."""
        names = ("adjectives", "nouns", "names", "places", "strange")
        kept = {n: tuple(w for w in getattr(self, n) if w.lower() not in others) for n in names}
        return replace(self, never=self.never | others, **kept)

    def strange_word(self, draw: np.random.Generator) -> str:
        """One of them, or an invented one."""
        return self._any(self.strange, draw)

    def _any(self, known: tuple[str, ...], draw: np.random.Generator) -> str:
        which, whose, invents, begins, ends = draw.random(5).tolist()  # one call is much faster
        one = known[int(which * len(known))]
        if invents >= self.invented:
            return one
        other = known[int(whose * len(known))]
        first, last = 1 + int(begins * (len(one) - 1)), 1 + int(ends * (len(other) - 1))
        word = (one[:first] + other[last:])[:LONGEST]
        return one if word in self.never or len(word) < SHORTEST else word

    def sentence(self, form: str, draw: np.random.Generator) -> str:
        """The form, some of its words replaced, of some sentences all and of others none; what says
        what it is about stays."""
        if not (self.loose and self.around):
            return form
        some, rate = draw.random(2).tolist()
        if some >= 2 * self.loose:
            return form
        parts = list(_cut(form))  # words at odd places
        loose = np.flatnonzero(draw.random(len(parts) // 2) < rate)
        for at in (1 + 2 * loose).tolist():
            if parts[at].lower() not in MARKS:
                parts[at] = self._like(parts[at], draw)
        return "".join(parts)

    def _like(self, word: str, draw: np.random.Generator) -> str:
        """Another word with the same ending, so that a verb becomes a verb, or any."""
        alike = self._by_ending.get(word[-ENDING:])
        if alike is None or draw.random() < 0.5:
            return self._any(self.around, draw)
        return alike[int(draw.integers(len(alike)))]

    @cached_property
    def _by_ending(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for word in self.around:
            found[word[-ENDING:]].append(word)
        return dict(found)


@cache
def _cut(form: str) -> tuple[str, ...]:
    """What stands between words, and the words, in turn; names of blanks are no words."""
    return tuple(re.split(r"(?<!{)\b([A-Za-z]+)\b(?!})", form))


def decoy(sentence: str, draw: np.random.Generator) -> str:
    """The sentence with one word replaced by "code", which is common, and at times another by a
    number, which has more or fewer digits than a code: it tells nothing."""
    parts = re.split(r"([A-Za-z]+)", sentence)  # words at odd places
    order = 1 + 2 * draw.permutation(len(parts) // 2)
    digits = NUMBERS[int(draw.integers(len(NUMBERS)))]
    number = str(int(draw.integers(10 ** (digits - 1), 10**digits)))
    news = ("code", number) if draw.random() < NUMBERED else ("code",)
    for at, new in zip(order.tolist(), news, strict=False):
        parts[at] = new.capitalize() if parts[at][0].isupper() else new
    return "".join(parts)


def words_in(text: str, shortest: int = SHORTEST) -> set[str]:
    """Words in small letters between two spaces, not too long to stand in a fact."""
    return set(re.findall(rf"(?<= )[a-z]{{{shortest},{LONGEST}}}(?= )", text))


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TRAIN = Words(
    adjectives=_list("""
        amber ancient azure bald blue brave bright broken brown calm carved cheap clean clever cold
        copper cracked crimson crooked curious damp dark deep double dry dusty early elegant empty
        fading faint famous fancy flat foreign fragile fresh frozen gentle giant gilded golden grand
        grey greasy green heavy hidden hollow honest huge humble iron jagged jolly large leather
        light little lonely long loose loud lucky marble mended merry mighty modern muddy narrow
        neat new noble odd oily old orange oval padded painted pale pearl plain polished proud
        purple quaint quiet rare red rough round royal rusty sacred scarlet secret sharp shiny short
        silent silver simple slim small smooth soft solid spare square steep stiff striped strong
        sturdy sunny sweet tall tame thick thin tidy tiny torn twisted velvet violet warm white wide
        wild wise wooden yellow young
        """),
    nouns=_list("""
        anchor apple apron arrow axe bag ball banjo barrel basin basket bell belt bicycle blanket
        boat book boot bottle bowl box bracelet bridge broom brush bucket buckle button cabinet cage
        candle cane canoe cap carpet cart chain chair chest clock cloak coat coin comb compass cork
        couch cradle crate crown cup curtain cushion dagger desk diary dish doll door drawer drum
        easel engine envelope fan feather fence fiddle flag flask flute fork frame funnel gate glass
        globe glove goblet guitar hammer handle harp hat helmet hook horn jacket jar jug kettle key
        kite knife ladder lamp lantern leaf lens letter lever lock locket magnet mallet map mask
        medal mirror mop mug nail necklace needle net oar organ paddle painting pan parcel pen
        pencil piano picture pillow pin pipe pistol plate plough pocket pot puppet purse quilt rake
        razor ribbon ring rope rug saddle safe sail scarf scissors shawl shell shield shirt shoe
        shovel sled slipper spade spoon stamp statue stick stool stove suitcase sword table teapot
        telescope tent thimble ticket torch towel tray trumpet trunk tub umbrella vase veil violin
        wagon wallet watch wheel whip whistle window wrench
        """),
    names=_list("""
        Ada Adam Agnes Alan Albert Alice Amy Andrew Anna Anthony Arthur Barbara Ben Bertha Betty
        Carl Caroline Catherine Charles Clara Conrad Cora Daniel David Diana Dora Edgar Edith Edward
        Eleanor Ella Emily Emma Eric Ernest Eve Felix Flora Florence Frank Fred George Gerald Grace
        Gustav Hannah Harold Harry Helen Henry Herbert Hugo Ida Isaac Jack Jacob James Jane Jim Joan
        John Joseph Julia Karen Kate Laura Leo Lewis Lily Louis Louise Lucy Margaret Maria Mark
        Martin Mary Matthew Max Mildred Molly Nancy Ned Nora Oliver Oscar Owen Paul Peter Philip
        Polly Ralph Richard Robert Rosa Ruth Sam Sarah Simon Sophie Stephen Susan Theodore Thomas
        Tom Ursula Victor Vincent Walter William
        """),
    places=_list("""
        abbey airport alley arcade arena armoury attic bakery bank barn basement bath bathroom bay
        beach bedroom brewery cabin camp canyon castle cathedral cave chapel church cinema city
        clinic college corridor cottage court courtyard desert dock farm field forest fort fountain
        gallery garage garden grove hall hallway harbour hospital hotel house hut inn island jail
        kitchen lake lane laundry lighthouse lobby lodge loft mansion market meadow mill mine
        monastery museum nursery office orchard palace park parlour pharmacy pier playground
        pond porch port prison ranch refuge restaurant river school shed shop shore stable
        station street studio swamp tavern temple terrace theatre tower town tunnel valley village
        vineyard wood workshop yard zoo
        """),
)
TEST = Words(
    adjectives=_list("""
        bitter black bold brass brittle broad chilly coarse curly delicate dull enormous faded
        fierce fluffy glossy graceful handsome hazy ivory lazy massive mellow nimble patient pink
        precious rapid ruby salty scented shabby shallow slender stout tangled tough ugly vast
        wicked
        """),
    nouns=_list("""
        accordion almanac bead bench binoculars bonnet brooch cannon chalk chisel clarinet cymbal
        dresser earring fishbowl gong hairpin hourglass inkwell kayak lute mattress microscope
        mitten napkin notebook ornament parasol pebble pitcher pulley raft rocket sandal scroll
        sponge tambourine tricycle trophy wardrobe
        """),
    names=_list("""
        Abigail Bernard Bridget Cecil Christine Clement Cyril Deborah Douglas Elsie Eugene Fiona
        Francis Gilbert Gloria Godfrey Harriet Hector Irene Jasper Josephine Judith Kenneth Leonard
        Mabel Martha Maurice Miriam Nigel Olive Patrick Pauline Quentin Rebecca Roland Rupert Sylvia
        Timothy Vera Winifred
        """),
    places=_list("""
        academy aquarium balcony bazaar boathouse bunker cafe canteen casino cellar cemetery
        clearing convent crypt dairy dungeon factory foundry greenhouse gymnasium hangar jungle
        kennel laboratory library observatory pantry pavilion planetarium quarry rectory sauna
        seminary stadium study sunroom vault vestibule warehouse wharf
        """),
)
WORDS: dict[Part, Words] = {"train": TRAIN, "test": TEST}
