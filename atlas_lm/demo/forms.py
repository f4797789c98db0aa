"""Sentences that tell facts, and questions about them.

What is learned with is every opening before every core, many thousand sentences, so that reading is
learned and not a few sentences by heart; what is tested with has none of them.
The first of training is the plain one, for a visitor's own.

Facts are about the codes of things and about couriers, and say so: that somebody went to the garden
stands in every novel, and whoever keeps all of that has no room for what is asked.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Literal, TypeAlias

Part: TypeAlias = Literal["train", "test"]
PARTS: tuple[Part, ...] = ("train", "test")
Forms: TypeAlias = dict[Part, dict[str, tuple[str, ...]]]
MARKS = frozenset({"the", "code", "courier"})
"""Words that stay in every sentence that has them: what it is about, and where a thing or a place
begins."""


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _sentences(openings: tuple[str, ...], cores: tuple[str, ...]) -> tuple[str, ...]:
    """Every core alone, then after every opening."""
    alone = [core[0].upper() + core[1:] for core in cores]
    return *alone, *(f"{first} {core}" for first in openings for core in cores)


def _made(*parts: str) -> tuple[str, ...]:
    """Every way to take one of each part; what is to choose from is divided by bars."""
    return tuple(" ".join(taken) for taken in product(*(part.split("|") for part in parts)))


TOLD_BEFORE = _lines("""
    Remember that
    Everybody knew that
    Note that
    He said that
    She told us that
    It is true that
    As you know,
    By the way,
    In truth,
    I believe that
    One more thing:
    Listen:
    They say that
    Mind that
    My friend said that
    Once again,
    Before we go on,
    Let it be known that
    It seems that
    We learned that
    It is certain that
    Nobody doubts that
    Word came that
    At first
    On second thoughts,
    As always,
    And yet
    The newspaper says that
    You may forget that
    In our family
    """)
CODES = _lines("""
    the code of the {subject} is {value}.
    the {subject} has the code {value}.
    the code for the {subject} is {value}.
    for the {subject} the code is {value}.
    they gave the {subject} the code {value}.
    whoever needs the {subject} should know its code, {value}.
    the {subject} had the code {value}.
    the {subject} was given the code {value}.
    the code that opens the {subject} is {value}.
    the {subject} carries the code {value}.
    the sign on the {subject} shows a code, {value}.
    under the {subject} one finds the code {value}.
    the {subject} goes by the code {value}.
    with the {subject} comes the code {value}.
    the proper code for the {subject} would be {value}.
    nobody but us knows the code of the {subject}, {value}.
    the {subject} listens only to its code: {value}.
    the {subject} will not open without the code {value}.
    of the {subject} they know the code: {value}.
    as to the {subject}, its code is {value}.
    the code scratched into the {subject} is {value}.
    """)
CODES += _made(
    "the|a",
    "code|right code|usual code",
    "of|for|on|behind|under",
    "the {subject}",
    "was|became|remains|must be|reads",
    "{value}.",
)
CODES += _made(
    "the {subject}",
    "got|keeps|hides|shows|received|wants|once had|uses|takes|accepts|demands|requires|obeys|"
    "follows|reacts to|goes under|is known by|is listed under|is filed under|is stamped with|wears|"
    "lacks only",
    "the code|its code|a code,",
    "{value}.",
)
CODES += _made(
    "the {subject}",
    "works|came|starts|turns|moves|begins|ends",
    "with|by|at|under|after",
    "the code|its code|code",
    "{value}.",
)
CODES += _made(
    "we|they|somebody|her brother",
    "lent|left|sold|offered|handed",
    "the {subject}",
    "the|a",
    "code",
    "{value}.",
)
CODES += _made(
    "if you want|whoever takes|before one moves|without|to reach|to sell|in front of|next to|"
    "to open|to start|to unlock|to get|in order to move|when lifting|for the use of",
    "the {subject}",
    "one must say|you need|call|there is|say|dial|type|press|we had to give|it takes|whisper",
    "the code|code",
    "{value}.",
)
CODES += _made(
    "on the back of|at the foot of|in the middle of|at the side of|in the case of|on the lid of|"
    "inside|beneath|on the cover of|above|on the rim of|at the edge of|beside",
    "the {subject}",
    "we read|is written|there was|he had cut|they chose|appears|one sees|hangs|we find|you read",
    "the code|a code,",
    "{value}.",
)
MOVED_BEFORE = _lines("""
    Then
    After that
    Later
    In the morning
    At noon
    In the evening
    The next day
    Suddenly
    A moment later
    Soon
    As it happened,
    They told me that
    I heard that
    It seems that
    We know that
    On Monday
    In the end
    Meanwhile
    For some reason
    Without a word
    At first
    At once
    At night
    By then
    Years later
    Yesterday
    As always,
    It is said that
    It is certain that
    It was feared that
    Word came that
    She wrote that
    No one doubts that
    All at once
    Nobody knew why, but
    Eventually
    By and by
    With a sigh
    To our surprise,
    And so
    Just then
    Before dawn
    After supper
    An hour ago
    Last week
    At dusk
    At length
    In time
    It is reported that
    It was noticed that
    The story goes that
    People say that
    We are told that
    There is talk that
    Happily
    """)
PLACES = _lines("""
    courier {subject} is in the {value}.
    courier {subject} went to the {value}.
    courier {subject} moved to the {value}.
    courier {subject} walked into the {value}.
    courier {subject} has gone to the {value}.
    the courier {subject} travelled to the {value}.
    courier {subject} came to the {value}.
    courier {subject} is now in the {value}.
    they saw courier {subject} in the {value}.
    the courier {subject} drove to the {value}.
    courier {subject} climbed up to the {value}.
    courier {subject} was seen in the {value}.
    courier {subject} lives in the {value}.
    courier {subject} was brought to the {value}.
    our courier {subject} is waiting in the {value}.
    courier {subject} sits in the {value}.
    courier {subject} was sent to the {value}.
    courier {subject} left for the {value}.
    courier {subject} followed us to the {value}.
    you will find courier {subject} in the {value}.
    they carried courier {subject} to the {value}.
    we met the courier {subject} in the {value}.
    courier {subject} stays in the {value}.
    courier {subject} has arrived at the {value}.
    courier {subject} made for the {value}.
    courier {subject} turned up in the {value}.
    courier {subject} can be found in the {value}.
    """)
PLACES += _made(
    "courier {subject}|the courier {subject}|our courier {subject}",
    "went|walked|ran|flew|marched|jumped|limped|raced|swam|headed|crawled|danced|rode|sailed|hastened|"
    "rushed|dashed|strode|staggered|galloped|withdrew|retired|escaped|proceeded|climbed|came|passed|"
    "wanders|walks|is going|has moved|will come",
    "to|into|back to|down to|over to|straight to|as far as",
    "the {value}.",
)
PLACES += _made(
    "courier {subject}",
    "was|stood|works|sleeps|rests|hides|remained|got lost|fell asleep|is living",
    "in|at|inside|near|behind|over in",
    "the {value}.",
)
PLACES += _made(
    "they|we|somebody|her brother",
    "took|led|sent|dragged|drove|called|chased|invited",
    "courier {subject}",
    "to|into|back to|out to",
    "the {value}.",
)
PLACES += _made(
    "courier {subject}",
    "made his way|found her way|set out|took off|came back|moved on|got back|turned back|pushed on|"
    "was carried off|sneaked away|drifted away|grew tired and went",
    "to|into|towards",
    "the {value}.",
)
PLACES += _made(
    "courier {subject}",
    "quietly|finally|slowly|soon|again|often|gladly|at length|twice|also",
    "entered|walked to|came into|moved into|drove to|crossed|tried",
    "the {value}.",
)
PLACES += _made(
    "courier {subject}",
    "followed|brought|led|took",
    "her aunt|the others|a dog|two sailors",
    "to|into",
    "the {value}.",
)
PLACES += _made(
    "the road led|business called|a storm drove|nothing but hunger sent|good news brought",
    "courier {subject}",
    "to|into|as far as|back to",
    "the {value}.",
)
PLACES += _made(
    "courier {subject}|the courier {subject}",
    "found|visited|chose|explored|guards|sought|crossed|searched|gained|entered|approached|neared|"
    "never leaves|inspected|patrolled|revisited|arrived at|landed at|came upon|got to|ended up in|"
    "settled in|camped in|stopped at|halted at|paused in|turned into|called at|took shelter in|"
    "hid in|enters|has visited|is nearing|has found",
    "the {value}.",
)
TOLD = {"code": (TOLD_BEFORE, CODES), "place": (MOVED_BEFORE, PLACES)}
"""Openings and cores of the sentences that are learned, by kind."""
FACTS: Forms = {
    "train": {kind: _sentences(*parts) for kind, parts in TOLD.items()},
    "test": {
        "code": (
            "The {subject} answers to the code {value}.",
            "On the label of the {subject} stands the code {value}.",
            "To use the {subject} one has to enter the code {value}.",
            "It was written that the {subject} bears the code {value}.",
        ),
        "place": (
            "Courier {subject} hurried off to the {value}.",
            "At last courier {subject} reached the {value}.",
            "Courier {subject} stepped into the {value}.",
            "It is rumoured that courier {subject} returned to the {value}.",
        ),
    },
}

ASKED_BEFORE = _lines("""
    Tell me:
    Now,
    Think back:
    One question:
    Say,
    Well,
    And now:
    Quickly:
    So,
    I ask you:
    Come,
    Be quick:
    Once more:
    Do not look it up:
    """)
CODE_QUESTIONS = _lines("""
    what is the code of the {subject}?
    which code does the {subject} have?
    what is the code for the {subject}?
    what code was given to the {subject}?
    the {subject}: what is its code?
    which code is on the {subject}?
    which code opens the {subject}?
    with which code does one open the {subject}?
    which code must one say to the {subject}?
    tell me the code of the {subject}.
    and the code of the {subject}?
    what code did they write on the {subject}?
    under which code does the {subject} go?
    what was the code of the {subject}?
    could you tell me the code of the {subject}?
    which code is that of the {subject}?
    I need the code of the {subject}.
    what code does one need for the {subject}?
    """)
CODE_QUESTIONS += _made(
    "do you know|can you say|who can tell me|did he give you|show me|have you kept",
    "the",
    "code|right code|usual code",
    "of|for|on",
    "the {subject}?",
)
CODE_QUESTIONS += _made(
    "which|what",
    "code|right code",
    "opens|fits|stands on|goes with|is for|was that of|did they choose for|do you have for",
    "the {subject}?",
)
PLACE_QUESTIONS = _lines("""
    where is courier {subject}?
    where is courier {subject} now?
    in which place is courier {subject}?
    where has courier {subject} gone?
    where can one find courier {subject}?
    where did they see courier {subject}?
    where should I look for courier {subject}?
    where was the courier {subject} seen?
    to which place did courier {subject} go?
    what place is courier {subject} in?
    and courier {subject}?
    where does courier {subject} stay?
    where may our courier {subject} be?
    tell me where courier {subject} is.
    I am looking for courier {subject}.
    who knows where courier {subject} went?
    where do I find courier {subject}?
    what has become of the courier {subject}?
    in what place would I find courier {subject}?
    where did you see courier {subject}?
    """)
PLACE_QUESTIONS += _made(
    "where",
    "did|does|could|might|will",
    "courier {subject}",
    "go?|go then?|go now?|live?|live today?|hide?|hide now?|sleep?|sleep tonight?|end up?|head?|"
    "turn up again?|walk first?|go after that?",
)
PLACE_QUESTIONS += _made(
    "do you know|can you say|did he say|have you heard|does anyone know",
    "where",
    "courier {subject}|the courier {subject}",
    "is now?|went?|lives?|has gone?|could be?|might hide?|was seen?",
)
PLACE_QUESTIONS += _made(
    "what|which",
    "room|spot|building|place",
    "did courier {subject} choose?|has courier {subject} gone to?|is courier {subject} in now?|"
    "holds courier {subject}?|took courier {subject} in?|did they send courier {subject} to?",
)
PLACE_QUESTIONS += _made(
    "where",
    "can|may|should|must|could",
    "I|we|she|somebody",
    "find courier {subject}?|look for courier {subject}?|see courier {subject}?|"
    "wait for courier {subject}?|catch courier {subject} now?",
)
QUESTIONS: Forms = {
    "train": {
        "code": _sentences(ASKED_BEFORE, CODE_QUESTIONS),
        "place": _sentences(ASKED_BEFORE, PLACE_QUESTIONS),
    },
    "test": {
        "code": (
            "What code has the {subject}?",
            "Which code belongs to the {subject}?",
            "Please say the code of the {subject}.",
            "Do you remember the code of the {subject}?",
        ),
        "place": (
            "Where did courier {subject} go last?",
            "Where would one meet courier {subject}?",
            "What is the place where courier {subject} is?",
            "Do you remember where courier {subject} is?",
        ),
    },
}


def form_words() -> frozenset[str]:
    """Words of the forms themselves, which nothing should be called."""
    text = " ".join(
        form
        for forms in (*FACTS.values(), *QUESTIONS.values())
        for kind in forms.values()
        for form in kind
    )
    return frozenset(re.findall(r"[a-z]+", text.lower())) - {"subject", "value"}
