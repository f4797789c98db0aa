"""The six tasks of MAD (Poli et al. 2024), as its authors' code makes them.

Ids of a vocabulary of V, in this order: keys, values, noise, and special ids last. Where our rows
differ from theirs, the docstring of the task says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atlas_lm.models.lm import NO_TARGET

# Recall


def in_context_recall(
    count: int,
    length: int,
    generator: torch.Generator | None = None,
    *,
    vocab: int = 16,
    noise_vocab: int = 0,
    noise: float = 0.0,
    every: int = 0,
) -> tuple[Tensor, Tensor]:
    """A key has one value throughout a row and another in the next row.

        tokens    a 7  b 9  ~ ~  a 7  c 8  b 9
        targets   - -  - -  - -  7 -  - -  9 -

    The last pair is one that was told. Their rows end before its value, after which nothing is
    asked.

    noise_vocab    ids that only noise has: a pair is `~ ~` with probability `noise`
    every          1: the target of every token is the next one, which is what they train on
    """
    ids, pairs = vocab - noise_vocab, length // 2
    if length % 2 or pairs < 2 or ids < 2:
        raise ValueError(
            f"recall: {length} tokens with {ids} ids of keys and values; expected an even number, "
            "4 or more, and 2 ids or more"
        )
    half, places = ids // 2, torch.arange(pairs)
    keys = torch.randint(half, (count, pairs), generator=generator)
    means = torch.randint(half, ids, (count, half), generator=generator)
    silent = _uniform((count, pairs), generator) < (noise if noise_vocab else 0.0)
    told = torch.randint(pairs - 1, (count, 1), generator=generator)
    silent.scatter_(1, told, False)  # one is told, whatever the noise
    silent[:, -1] = False
    keys[:, -1] = _one_of(keys[:, :-1], ~silent[:, :-1], half, generator)

    first = torch.full((count, half), pairs)
    first.scatter_reduce_(1, keys, torch.where(silent, pairs, places), "amin")
    again = ~silent & (first.gather(1, keys) < places)
    values = means.gather(1, keys)
    tokens = torch.stack([keys, values], 2)
    if noise_vocab:
        other = torch.randint(ids, vocab, tokens.shape, generator=generator)
        tokens = torch.where(silent[..., None], other, tokens)
    targets = torch.full_like(tokens, NO_TARGET)
    targets[..., 0] = torch.where(again, values, NO_TARGET)
    tokens = tokens.flatten(1)
    return tokens, next_token(tokens) if every else targets.flatten(1)


def recall_answers(*, vocab: int, noise_vocab: int = 0, **_: float) -> int:
    """Possible answers: every value."""
    ids = vocab - noise_vocab
    return ids - ids // 2


def _one_of(keys: Tensor, told: Tensor, most: int, generator: torch.Generator | None) -> Tensor:
    """One of the different keys that were told, each equally likely."""
    seen = torch.zeros(len(keys), most, dtype=torch.long).scatter_add_(1, keys, told.long()) > 0
    return torch.where(seen, _uniform(seen.shape, generator), -1.0).argmax(1)


def next_token(tokens: Tensor) -> Tensor:
    """Targets of a language model; the last token has none."""
    targets = torch.full_like(tokens, NO_TARGET)
    targets[:, :-1] = tokens[:, 1:]
    return targets


def _uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """0 to 1, in one precision whatever the default is."""
    return torch.rand(shape, generator=generator, dtype=torch.float64)


# Fuzzy recall


def fuzzy_recall(
    count: int,
    length: int,
    generator: torch.Generator | None = None,
    *,
    vocab: int = 16,
    key: int = 3,
    value: int = 3,
    shortest_key: int = 3,
    every: int = 0,
) -> tuple[Tensor, Tensor]:
    """Keys and values of one to three tokens, none of which is twice in the same key or value.

        tokens    _ _  a b c 7 8  c b a 9  d a b 7 9 8  a b c 7
        targets   - -  - - - - -  - - - -  - - - - - -  - - 7 8

    What stands last was told before; its last token is not part of the row. `_`, the last id, fills
    the row from the left. In theirs, one row in forty asks for a key that was never told, since the
    place drawn for it may lie behind the last pair; here that pair gives way to it.

    key, value      most tokens of a key and of a value
    shortest_key    fewest of a key: they test on the longest alone and train on all
    every           1: the target of every token is the next one, which is what they train on
    """
    half, longest = (vocab - 1) // 2, key + value
    if not (1 <= shortest_key <= key <= half and 1 <= value <= half) or length <= 2 * longest:
        raise ValueError(
            f"fuzzy recall: keys of {shortest_key} to {key} and values of up to {value} tokens, of "
            f"{half} different ones each, in {length} tokens; expected more than {2 * longest} "
            "tokens, and a vocab for which no key and no value repeats a token"
        )
    pairs = -(-length // (shortest_key + 1))
    # the first is what is asked for in the end
    keys = _motifs(count, 1 + pairs, (0, half), (shortest_key, key), generator)
    values = _motifs(count, 1 + pairs, (half, vocab - 1), (1, value), generator)
    code = ((keys + 1) * (half + 1) ** torch.arange(key)).sum(2)
    values = _chosen(values, _first_alike(code))
    size = (keys >= 0).sum(2) + (values >= 0).sum(2)
    order, kept = _order_of_pairs(code, size, length, longest, generator)
    again = _first_alike(code.gather(1, order)) < torch.arange(order.shape[1])
    parts = _chosen(keys, order), _chosen(values, order)
    tokens, answers = _laid_out(*parts, kept, again, length + 1, blank=vocab - 1)
    targets = tokens[:, 1:] if every else answers[:, 1:]
    return tokens[:, :-1].contiguous(), targets.contiguous()


def fuzzy_answers(*, vocab: int, **_: float) -> int:
    """Possible answers: every token of values."""
    return vocab - 1 - (vocab - 1) // 2


def _motifs(
    count: int,
    number: int,
    ids: tuple[int, int],
    sizes: tuple[int, int],
    generator: torch.Generator | None,
) -> Tensor:
    """`[b n size]`: different ids, as many as a size drawn for each, -1 behind them."""
    size = torch.randint(sizes[0], sizes[1] + 1, (count, number, 1), generator=generator)
    order = _uniform((count, number, ids[1] - ids[0]), generator).argsort(2)[..., : sizes[1]]
    return torch.where(torch.arange(sizes[1]) < size, order + ids[0], -1)


def _first_alike(code: Tensor) -> Tensor:
    """`[b n]`: the place of the first that is the same as each."""
    return (code[:, :, None] == code[:, None]).to(torch.uint8).argmax(2)


def _chosen(parts: Tensor, order: Tensor) -> Tensor:
    return parts.gather(1, order[..., None].expand(-1, -1, parts.shape[2]))


def _order_of_pairs(
    code: Tensor, size: Tensor, length: int, longest: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Which pair stands where, that which is asked for (number 0) told among them and last again;
    and which of them the row has room for."""
    asked, sizes = size[:, :1], size[:, 1:]
    room = length - asked - longest
    begin = sizes.cumsum(1) - sizes
    place = (_uniform(asked.shape, generator) * (length - 2 * asked)).long()
    told = torch.minimum((begin < place).sum(1), (begin < room).sum(1) - 1)[:, None]
    number = torch.arange(sizes.shape[1])
    already = ((code[:, 1:] == code[:, :1]) & (number < told)).any(1, keepdim=True)
    order = (number + 1).repeat(len(code), 1)
    order.scatter_(1, told, torch.where(already, told + 1, 0))
    sizes = size.gather(1, order)
    kept = sizes.cumsum(1) - sizes < room
    last = torch.zeros_like(told)
    return torch.cat([order, last], 1), torch.cat([kept, last == 0], 1)


def _laid_out(
    keys: Tensor, values: Tensor, kept: Tensor, again: Tensor, length: int, blank: int
) -> tuple[Tensor, Tensor]:
    """Pairs as one row that ends with the last of them, and the values of those told before."""
    parts = torch.cat([keys, values], 2)
    there = (parts >= 0) & kept[..., None]
    flat = there.flatten(1)
    place = length - flat.sum(1, keepdim=True) + flat.cumsum(1) - 1
    place = torch.where(flat, place, length)  # what is not there, into a column that is dropped
    tokens = torch.full((len(keys), length + 1), blank).scatter_(1, place, parts.flatten(1))
    answers = torch.where(again[..., None], values, NO_TARGET)
    answers = torch.cat([torch.full_like(keys, NO_TARGET), answers], 2).flatten(1)
    targets = torch.full_like(tokens, NO_TARGET).scatter_(1, place, answers)
    return tokens[:, :-1], targets[:, :-1]


# Copying and compression


def selective_copying(
    count: int,
    length: int,
    generator: torch.Generator | None = None,
    *,
    vocab: int = 16,
    copied: int = 16,
) -> tuple[Tensor, Tensor]:
    """Tokens among blanks are said again, in order, once the copy token has come.

        tokens    _ 3 _ _ 7 3  C  _ _ _
        targets   - - - - - -  -  3 7 3

    Each blank stands before one of the tokens, any of them equally likely: the last comes right
    before the copy token, C, which is the last id; the blank is the one before it.
    """
    blanks = length - 2 * copied - 1
    if copied < 1 or blanks < 0 or vocab < 3:
        raise ValueError(
            f"selective copying: {copied} tokens of {vocab - 2} ids in {length}; expected at least "
            f"{2 * max(copied, 1) + 1} tokens, to be told and said again, and a vocab of 3 or more"
        )
    wanted = torch.randint(vocab - 2, (count, copied), generator=generator)
    before = torch.randint(copied, (count, blanks), generator=generator)
    gaps = torch.zeros_like(wanted).scatter_add_(1, before, torch.ones_like(before))
    tokens = torch.full((count, length), vocab - 2)
    tokens.scatter_(1, gaps.cumsum(1) + torch.arange(copied), wanted)
    tokens[:, -copied - 1] = vocab - 1
    targets = torch.full_like(tokens, NO_TARGET)
    targets[:, -copied:] = wanted
    return tokens, targets


def copying_answers(*, vocab: int, **_: float) -> int:
    """Possible answers: every id but the blank and the copy token."""
    return vocab - 2


def compression(
    count: int,
    length: int,
    generator: torch.Generator | None = None,
    *,
    vocab: int = 47,
    symbols: int = 16,
) -> tuple[Tensor, Tensor]:
    """Random tokens, then the compression token C, then every place is asked for by its name.

        tokens    3 7 5  C  p2 p3 p1
        targets   - - -  -   7  5  3

    In MAD the output at C, one vector, plus the code of a place goes through an MLP that has to say
    what stood there; their row of 32 is ours of 63. Here the model reads the names of the places,
    in any order, and answers by itself. The same is told and asked, no answer helps another, and a
    recurrent model has nothing but what it has made of the row when C has come. It differs in what
    carries that: the whole state instead of one vector of the model's width; and softmax attention
    may look back at the tokens, so that its score says nothing of compression. These scores are
    not MAD's.

    symbols    ids of the tokens and C; those above name the places
    """
    told = (length - 1) // 2
    if length % 2 == 0 or not 1 <= told <= vocab - symbols or symbols < 2:
        raise ValueError(
            f"compression: {length} tokens ask for {told} places, with names for "
            f"{vocab - symbols}; expected an odd number, 3 or more, and the setting "
            f"vocab={symbols + told}"
        )
    wanted = torch.randint(symbols - 1, (count, told), generator=generator)
    order = _uniform(wanted.shape, generator).argsort(1)
    between = torch.full((count, 1), symbols - 1)
    tokens = torch.cat([wanted, between, symbols + order], 1)
    targets = torch.full_like(tokens, NO_TARGET)
    targets[:, told + 1 :] = wanted.gather(1, order)
    return tokens, targets


def compression_answers(*, symbols: int, **_: float) -> int:
    """Possible answers: every token but C."""
    return symbols - 1


# Memorisation


def memorisation(
    count: int,
    length: int,
    generator: torch.Generator | None = None,
    *,
    vocab: int = 256,
    facts: int = 0,
) -> tuple[Tensor, Tensor]:
    """Keys whose values are the same in every row there is, and in none of them.

        tokens    a ?  c ?  a ?
        targets   - 9  - 4  - 9

    It is learned by the weights; no memory of the row is of use. `?` is the last id.

    facts    which of the maps from keys to values is to be learned
    """
    if length % 2 or length < 2 or vocab < 3:
        raise ValueError(
            f"memorisation: {length} tokens of {vocab} ids; expected an even number, and 3 ids or "
            "more"
        )
    values = fact_values(vocab, facts)
    keys = torch.randint(len(values), (count, length // 2), generator=generator)
    tokens = torch.stack([keys, torch.full_like(keys, vocab - 1)], 2).flatten(1)
    targets = torch.full_like(tokens, NO_TARGET)
    targets[:, 1::2] = values[keys]
    return tokens, targets


def fact_values(vocab: int, facts: int = 0) -> Tensor:
    """The value of every key, no two the same."""
    half = (vocab - 1) // 2
    order = torch.randperm(vocab - 1 - half, generator=torch.Generator().manual_seed(facts))
    return half + order[:half]


def memorisation_answers(*, vocab: int, **_: float) -> int:
    """Possible answers: every value."""
    return vocab - 1 - (vocab - 1) // 2
