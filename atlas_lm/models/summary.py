"""What a model is made of and how much it keeps, as a table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from atlas_lm.rules import RULES, Rule

if TYPE_CHECKING:
    from atlas_lm.models.lm import LanguageModel


def summary(model: LanguageModel) -> str:
    """Parameters by part; bytes of state that a sequence keeps, whatever its length."""
    config, parts = model.config, Counter()
    for name, parameter in model.named_parameters():
        parts[_part(name)] += parameter.numel()
    state = model.begin(1)
    rows = [(name, f"{count:,}") for name, count in parts.items()]
    rows.append(("all parameters", f"{sum(parts.values()):,}"))
    rows.append(("state of a sequence", size_text(state.nbytes)))
    names = [name_of(config.rule_of(i)) for i in range(config.depth)]
    layers = ", ".join(f"{n} x {name}" for name, n in Counter(names).items())
    title = f"{config.block} blocks: {layers}; dim {config.dim}, {config.heads} heads"
    growing = sorted({name_of(rule) for rule in config.rules if grows(rule)})
    if growing:
        rows.append(("grows with the text", ", ".join(growing)))
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value:>14}" for name, value in rows)])


def name_of(rule: str | Rule) -> str:
    """The name of a rule, or what it is nearest to."""
    if isinstance(rule, str):
        return rule
    same = [name for name, known in RULES.items() if known == rule]
    return same[0] if same else f"{rule.describe()['network']} {rule.optimizer}"


def grows(rule: str | Rule) -> bool:
    """Whether the state of a layer grows with every token."""
    if isinstance(rule, str):
        return rule == "attention" or (rule in RULES and grows(RULES[rule]))
    return rule.features == "exponential"


def size_text(count: float) -> str:
    """Bytes as people read them: 812 bytes, 1.2 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def _part(name: str) -> str:
    places = {
        "embedding": "embedding",
        "head": "head",
        "mlp": "feed-forward",
        "memory": "initial memories",
        "attention": "attention",
        "second": "attention",
    }
    found = [places[piece] for piece in name.split(".") if piece in places]
    return found[-1] if found else "mixers and norms"
