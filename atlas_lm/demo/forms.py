"""Sentences that tell facts, and questions about them.

What is learned with is every opening before every core, many thousand sentences, so that reading is
learned and not a few sentences by heart; what is tested with has none of them.
The first of training is the plain one, for a visitor's own.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Literal, TypeAlias

Part: TypeAlias = Literal["train", "test"]
PARTS: tuple[Part, ...] = ("train", "test")
Forms: TypeAlias = dict[Part, dict[str, tuple[str, ...]]]


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
    the number of the {subject} is {value}.
    the {subject} opens with {value}.
    whoever needs the {subject} should know its code, {value}.
    the {subject} had the code {value}.
    the {subject} was given the number {value}.
    the code that opens the {subject} is {value}.
    the {subject} carries the number {value}.
    he who wants the {subject} must say {value}.
    the {subject} is marked {value}.
    the sign on the {subject} reads {value}.
    under the {subject} one finds the number {value}.
    she called the {subject} number {value}.
    the {subject} goes by the number {value}.
    the owner of the {subject} wrote down {value}.
    with the {subject} comes the code {value}.
    the proper code for the {subject} would be {value}.
    nobody but us knows the code of the {subject}, {value}.
    the {subject} listens only to {value}.
    the {subject} will not open without {value}.
    of the {subject} it is said: {value}.
    the {subject} was sold as number {value}.
    as to the {subject}, its code is {value}.
    the number scratched into the {subject} is {value}.
    """)
CODES += _made(
    "the",
    "code|number|cipher|combination",
    "of|for|on|behind",
    "the {subject}",
    "was|became|remains|must be",
    "{value}.",
)
CODES += _made(
    "the {subject}",
    "got|keeps|hides|shows|received|wants|once had",
    "the|a|its own",
    "code|number|cipher",
    "{value}.",
)
CODES += _made(
    "the {subject}",
    "works|came|starts|turns|moves|sleeps|begins|ends",
    "with|by|at|under|after",
    "{value}.",
)
CODES += _made(
    "we|they|somebody|her brother",
    "lent|left|sold|offered|handed",
    "the {subject}",
    "the|a",
    "code|number|cipher",
    "{value}.",
)
CODES += _made(
    "if you want|whoever takes|before one moves|without|to reach|to sell|in front of|next to",
    "the {subject}",
    "one must say|you need|he cried|call|she wrote|there is the number|say|dial",
    "{value}.",
)
CODES += _made(
    "on the back of|at the foot of|in the middle of|at the side of|as a name for|in the case of",
    "the {subject}",
    "we read|is written|there was|he had cut|they chose|is the cipher",
    "{value}.",
)
CODES += _made(
    "the {subject}",
    "uses|takes|accepts|demands|requires|obeys|follows|reacts to|goes under|is known by|"
    "is listed under|is filed under|is stamped with|wears|lacks only|returns|deserves|fears",
    "the code|the number|number|its cipher",
    "{value}.",
)
CODES += _made(
    "on the lid of|inside|beneath|on the cover of|above|on the rim of|at the edge of|beside",
    "the {subject}",
    "appears|one sees|hangs|we find|someone daubed|shines|gleams|you read",
    "the code|the number|a",
    "{value}.",
)
CODES += _made(
    "to open|to start|to unlock|to wake|to get|in order to move|when lifting|for the use of",
    "the {subject}",
    "one needs|you type|press|we had to dial|everyone must give|it takes|one is to say|whisper",
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
    {subject} is in the {value}.
    {subject} went to the {value}.
    {subject} moved to the {value}.
    {subject} walked into the {value}.
    {subject} has gone to the {value}.
    {subject} travelled to the {value}.
    {subject} came to the {value}.
    {subject} is now in the {value}.
    {subject} ran to the {value}.
    they saw {subject} in the {value}.
    {subject} drove to the {value}.
    {subject} climbed up to the {value}.
    {subject} was seen in the {value}.
    {subject} lives in the {value}.
    {subject} was brought to the {value}.
    {subject} fled to the {value}.
    {subject} is waiting in the {value}.
    {subject} sits in the {value}.
    {subject} crept into the {value}.
    {subject} was sent to the {value}.
    {subject} left for the {value}.
    {subject} followed us to the {value}.
    you will find {subject} in the {value}.
    they carried {subject} to the {value}.
    we met {subject} in the {value}.
    {subject} stays in the {value}.
    {subject} rode to the {value}.
    {subject} has arrived at the {value}.
    {subject} sailed to the {value}.
    {subject} wandered into the {value}.
    {subject} made for the {value}.
    {subject} turned up in the {value}.
    {subject} slipped away to the {value}.
    {subject} rushed to the {value}.
    {subject} can be found in the {value}.
    {subject} strolled over to the {value}.
    """)
PLACES += _made(
    "{subject}",
    "went|walked|ran|flew|marched|jumped|limped|raced|swam|headed|crawled|danced|trotted",
    "to|into|back to|off to|down to|over to|out into|straight to",
    "the {value}.",
)
PLACES += _made(
    "{subject}",
    "found|visited|chose|left us for|inhabits|explored|guards|haunts|cleaned|sought|loves|owns|"
    "occupied|preferred|crossed|searched|saw|knows|admired|gained",
    "the {value}.",
)
PLACES += _made(
    "{subject}",
    "was|stood|works|sleeps|rests|hides|remained|got lost|fell asleep|is living",
    "in|at|inside|near|behind|over in",
    "the {value}.",
)
PLACES += _made(
    "they|we|somebody|her brother",
    "took|led|sent|dragged|drove|called|chased|invited",
    "{subject}",
    "to|into|back to|out to",
    "the {value}.",
)
PLACES += _made(
    "{subject}",
    "made his way|found her way|set out|took off|came back|moved on|got back|turned back|pushed on|"
    "was carried off|sneaked away|drifted away|grew tired and went",
    "to|into|towards",
    "the {value}.",
)
PLACES += _made(
    "{subject}",
    "entered|approached|prefers|enjoys|rented|bought|decorated|attacked|rebuilt|described|discovered|"
    "neared|circled|watched|never leaves|took|missed|holds|studied|drew|likes|won|built|kept",
    "the {value}.",
)
PLACES += _made(
    "{subject}",
    "quietly|finally|slowly|soon|again|often|gladly|at length|twice|also",
    "entered|walked to|came into|moved into|drove to|crossed|tried",
    "the {value}.",
)
PLACES += _made(
    "{subject}",
    "followed|brought|led|took",
    "her aunt|the others|a dog|two sailors",
    "to|into",
    "the {value}.",
)
PLACES += _made(
    "the road led|business called|a storm drove|nothing but hunger sent|good news brought",
    "{subject}",
    "to|into|as far as|back to",
    "the {value}.",
)
PLACES += _made(
    "{subject}",
    "hastened|rushed|dashed|strode|shuffled|tiptoed|staggered|stumbled|galloped|hiked|rowed|skipped|"
    "bolted|withdrew|retreated|retired|escaped|advanced|proceeded|journeyed|sped|trudged|waded|"
    "scrambled|ambled|roamed|strayed|darted|glided|stole|vanished|travelled|drove|climbed|came|"
    "plodded|swept|slid|hobbled|paced|stalked|tramped|rolled|leapt|descended|pressed|shifted|"
    "ventured|burst|migrated|passed|proceeds|wanders|walks|comes|is going|has moved|will come",
    "to|into|towards|back to|away to|up to|along to|as far as",
    "the {value}.",
)
PLACES += _made(
    "{subject}",
    "joined|toured|inspected|attained|boarded|patrolled|stormed|claimed|frequented|passed|skirted|"
    "surveyed|regained|revisited|sighted|made|arrived at|landed at|came upon|chanced upon|got to|"
    "ended up in|settled in|camped in|lodged in|stopped at|halted at|paused in|turned into|"
    "checked into|broke into|dropped into|looked into|called at|took shelter in|hid in|enters|"
    "has visited|is nearing|has found|touched|commands|sketched|remembered|sought out|hated|"
    "climbed|swam across|looked for|was shown|was given|had to leave us for|gave us|opened|locked",
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
            "To use the {subject} one has to enter {value}.",
            "It was written that the {subject} bears the code {value}.",
        ),
        "place": (
            "{subject} hurried off to the {value}.",
            "At last {subject} reached the {value}.",
            "{subject} stepped into the {value}.",
            "It is rumoured that {subject} returned to the {value}.",
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
    which number does the {subject} have?
    what number is on the {subject}?
    what opens the {subject}?
    how does one open the {subject}?
    what is the number of the {subject}?
    what must one say to the {subject}?
    which number was given to the {subject}?
    tell me the code of the {subject}.
    give me the number of the {subject}.
    and the {subject}?
    what did they write on the {subject}?
    under which number does the {subject} go?
    what was the code of the {subject}?
    could you tell me the code of the {subject}?
    which code is that of the {subject}?
    how is the {subject} marked?
    I need the code of the {subject}.
    what code does one need for the {subject}?
    """)
CODE_QUESTIONS += _made(
    "do you know|can you say|who can tell me|did he give you|show me|have you kept",
    "the",
    "code|number|cipher|combination",
    "of|for|on",
    "the {subject}?",
)
CODE_QUESTIONS += _made(
    "which|what",
    "code|number|cipher",
    "opens|fits|stands on|goes with|is for|was that of|did they choose for|do you have for",
    "the {subject}?",
)
PLACE_QUESTIONS = _lines("""
    where is {subject}?
    where is {subject} now?
    in which place is {subject}?
    where has {subject} gone?
    where can one find {subject}?
    where did they see {subject}?
    where should I look for {subject}?
    where was {subject} seen?
    to which place did {subject} go?
    what place is {subject} in?
    and {subject}?
    where does {subject} stay?
    where may {subject} be?
    tell me where {subject} is.
    I am looking for {subject}.
    who knows where {subject} went?
    where do I find {subject}?
    what has become of {subject}?
    in what place would I find {subject}?
    where did you see {subject}?
    """)
PLACE_QUESTIONS += _made(
    "where",
    "did|does|could|might|will",
    "{subject}",
    "go?|go then?|go now?|live?|live today?|hide?|hide now?|sleep?|sleep tonight?|end up?|head?|"
    "turn up again?|walk first?|go after that?",
)
PLACE_QUESTIONS += _made(
    "do you know|can you say|did he say|have you heard|does anyone know",
    "where",
    "{subject}",
    "is now?|went?|lives?|has gone?|could be?|might hide?|was seen?",
)
PLACE_QUESTIONS += _made(
    "what|which",
    "room|spot|building|place",
    "did {subject} choose?|has {subject} gone to?|is {subject} in now?|holds {subject}?|"
    "took {subject} in?|did they send {subject} to?",
)
PLACE_QUESTIONS += _made(
    "where",
    "can|may|should|must|could",
    "I|we|she|somebody",
    "find {subject}?|look for {subject}?|see {subject}?|wait for {subject}?|catch {subject} now?",
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
            "Where did {subject} go last?",
            "Where would one meet {subject}?",
            "What is the place where {subject} is?",
            "Do you remember where {subject} is?",
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
