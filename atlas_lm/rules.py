"""Every model of the family as one row of a table.

A rule says what a memory is (network, features), what it is trained on (objective, window), how
(optimizer, chunk, stride), and nothing else: no tensors, no code of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import isfinite

NETWORKS = ("linear", "mlp", "gated_mlp")
FEATURES = ("identity", "polynomial", "exponential")
OBJECTIVES = ("l2", "dot", "lp", "huber")
OPTIMIZERS = ("gd", "momentum", "muon")
RETENTIONS = ("learned", "fixed", "none")
FADES_TO = ("zero", "start")
NS_COEFFICIENTS = ("muon", "polar_express", "cubic")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a memory learns. Make a variant with `dataclasses.replace(RULES["atlas"], window=1)`."""

    network: str | Callable = "linear"
    """"linear", "mlp", "gated_mlp", or a function `(lin, x, f) -> prediction` (`ops.networks`)."""
    features: str | Callable = "identity"
    """"identity", "polynomial", "exponential", or a function of keys, `[... k] -> [... D]`."""
    degree: int = 2
    """Highest degree of the polynomial features."""
    objective: str | Callable = "l2"
    """"l2", "dot", "lp", "huber", or a function `(prediction, target) -> loss of each pair`."""
    power: float = 3.0
    """Exponent of the lp objective."""
    delta: float = 1.0
    """Threshold of the huber objective where the gates bring none."""
    window: int = 1
    """c: how many of the last pairs every step is taken on."""
    optimizer: str = "gd"
    """"gd", "momentum" or "muon"."""
    chunk: int = 64
    """b: gradients are taken at the memory as it stood when the chunk began. Part of the model."""
    stride: int = 1
    """r: muon moves the weights at every r-th token."""
    ns_steps: int = 5
    """Newton-Schulz steps of muon."""
    ns_coefficients: str = "muon"
    """"muon", "polar_express" or "cubic"."""
    eta_inside: bool = False
    """Muon with the rate inside the momentum (paper eq. 57), where Newton-Schulz removes it."""
    decay_first: bool = False
    """Take the error after the decay, as Gated DeltaNet does; chunk 1 only."""
    norm: bool | None = None
    """Layer norm and gain on the branch of a deep memory. None: wherever the network is deep."""
    normalize: bool = False
    """Divide the exponential linear dot-product memory by its sum of weights: softmax attention."""
    retention: str = "learned"
    """"learned", "fixed" or "none": how a layer makes the gate; the operation uses it as given."""
    fades_to: str = "zero"
    """What a memory that forgets goes back to: "zero", as in the papers, or "start", its initial
    weights, W <- W_0 + alpha (W - W_0); behind a norm the former makes it chaotic."""

    def __post_init__(self) -> None:
        if self.norm is None:
            object.__setattr__(self, "norm", self.network in ("mlp", "gated_mlp"))
        self._check_choices()
        self._check_ranges()
        self._check_combinations()

    @property
    def deep(self) -> bool:
        return self.network != "linear"

    @property
    def uses_momentum(self) -> bool:
        return self.optimizer != "gd"

    @property
    def custom(self) -> tuple[str, ...]:
        """The fields that hold a function instead of a name."""
        return tuple(n for n in ("network", "features", "objective") if callable(getattr(self, n)))

    def describe(self) -> dict[str, object]:
        """The fields as plain values; a function becomes `function module.name`."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def _check_choices(self) -> None:
        choices = {
            "network": NETWORKS,
            "features": FEATURES,
            "objective": OBJECTIVES,
            "optimizer": OPTIMIZERS,
            "retention": RETENTIONS,
            "fades_to": FADES_TO,
            "ns_coefficients": NS_COEFFICIENTS,
        }
        takes_function = ("network", "features", "objective")
        for name, valid in choices.items():
            value = getattr(self, name)
            if value in valid or (name in takes_function and callable(value)):
                continue
            also = ", or a function" if name in takes_function else ""
            raise ValueError(f"Rule: {name}={value!r} is not one of {', '.join(valid)}{also}")

    def _check_ranges(self) -> None:
        for name in ("degree", "window", "chunk", "stride", "ns_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Rule: {name}={value!r} must be a whole number, 1 or more")
        for name in ("eta_inside", "decay_first", "norm", "normalize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Rule: {name}={getattr(self, name)!r} must be True or False")
        if not (_is_number(self.power) and self.power >= 2):
            raise ValueError(f"Rule: power={self.power!r} must be a number, 2 or more (an lp loss)")
        if not (_is_number(self.delta) and self.delta > 0):
            raise ValueError(
                f"Rule: delta={self.delta!r} must be a number above 0 (huber's threshold)"
            )

    def _check_combinations(self) -> None:
        exponential = self.features == "exponential"
        normalizable = exponential and self.network == "linear" and self.objective == "dot"
        needs = [
            ("degree", self.features == "polynomial", "features='polynomial'"),
            ("power", self.objective == "lp", "objective='lp'"),
            ("delta", self.objective == "huber", "objective='huber'"),
            ("stride", self.optimizer == "muon", "optimizer='muon'"),
            ("ns_steps", self.optimizer == "muon", "optimizer='muon'"),
            ("ns_coefficients", self.optimizer == "muon", "optimizer='muon'"),
            ("eta_inside", self.optimizer == "muon", "optimizer='muon'"),
            ("decay_first", self.chunk == 1, "chunk=1"),
            ("norm", self.deep, "network='mlp' or 'gated_mlp'"),
            ("fades_to", self.deep and not exponential, "a deep network, no exponential features"),
            (
                "normalize",
                normalizable,
                "network='linear', features='exponential', objective='dot'",
            ),
        ]
        defaults = {f.name: f.default for f in fields(self)} | {"norm": False}
        for name, allowed, where in needs:
            value = getattr(self, name)
            if value != defaults[name] and not allowed:
                raise ValueError(
                    f"Rule: {name}={value!r} works with {where} only; "
                    f"set {name}={defaults[name]!r} or use {where}"
                )
        if exponential and self.optimizer != "gd":
            raise ValueError(
                f"Rule: optimizer={self.optimizer!r} has no exact form on exponential features; "
                "use optimizer='gd' or features='polynomial'"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _plain(value: object) -> object:
    if not callable(value):
        return value
    # an object that is called goes by its class: its repr has an address, another in every process
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"function {named.__module__}.{named.__qualname__}"


RULES: dict[str, Rule] = {
    "linear_attention": Rule(objective="dot", retention="none"),
    "retnet": Rule(objective="dot", retention="fixed"),
    "delta_net": Rule(chunk=1, retention="none"),
    "gated_delta_net": Rule(chunk=1, decay_first=True),
    "swla": Rule(objective="dot", window=16),
    "dla": Rule(network="mlp", objective="dot"),
    "ttt_linear": Rule(retention="none"),
    "ttt_mlp": Rule(network="mlp", retention="none"),
    "titans": Rule(network="mlp", optimizer="momentum"),
    "omeganet": Rule(network="mlp", features="polynomial", window=16),
    "atlas": Rule(network="mlp", features="polynomial", window=16, optimizer="muon"),
    "atlas_pp": Rule(network="gated_mlp", features="polynomial", window=16, optimizer="muon"),
    "deep_transformer": Rule(network="mlp", features="exponential", objective="dot"),
    "swdt": Rule(network="mlp", features="exponential", objective="dot", window=16),
    "dot": Rule(network="mlp", features="exponential", window=16),
    "moneta": Rule(network="mlp", objective="lp", power=3.0),
    "yaad": Rule(network="mlp", objective="huber"),
}
"""The family. What a row leaves out: network linear, features identity, objective l2, window 1,
optimizer gd, chunk 64."""


def rule_of(mixer: str | Rule) -> Rule | None:
    """The rule by which a mixer of a model remembers; None: it has none, as attention."""
    return RULES.get(mixer) if isinstance(mixer, str) else mixer
