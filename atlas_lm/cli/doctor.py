"""`atlas-lm doctor`: what this machine has, which implementation each rule takes, what compiles."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, arg

if TYPE_CHECKING:
    from atlas_lm.ops.triton.catalogue import Compilation

DIM, HEADS = 1024, 16
KIB, GIB = 2**10, 2**30
NOTE = (
    "Triton 3.4 to 3.7.0 miscompiled kernels of other projects on Hopper cards: "
    "`python -m benchmarks.speed` checks the numbers of ours on this machine"
)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Tell what this machine has, what each rule runs on here, and whether the kernels compile."""

    compile: FlagCreatePairsOff[bool] = False
    """Compile every kernel for this machine's card. Takes a few minutes."""
    capability: Annotated[int | None, arg(metavar="N")] = None
    """Compile for a card of this compute capability instead, such as 89; it need not be here."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON."""

    def run(self) -> None:
        machine = Machine.here()
        card = self._card(machine)
        takes = list(choices())
        kernels = list(examined(card)) if machine.triton else []
        if self.json:
            said = asdict(machine) | {
                "rules": [asdict(each) for each in takes],
                "compiled_for": card and asdict(card),
                "kernels": [asdict(each) for each in kernels],
            }
            print(json.dumps(said, indent=2))
            return
        for line in (*machine.lines(), *_choice_lines(takes), *_kernel_lines(kernels, card)):
            print(line)
        if machine.triton:
            print(NOTE)

    def _card(self, machine: Machine) -> Card | None:
        """The card to compile for, if it is to be done."""
        if not self.compile:
            if self.capability is not None:
                raise ValueError("--capability: give --compile too, which compiles for it")
            return None
        if machine.triton is None:
            return None
        from atlas_lm.ops.kernels import interpreted
        from atlas_lm.ops.triton.catalogue import LIMITS

        if interpreted():
            raise ValueError("--compile: not under TRITON_INTERPRET=1, where nothing is compiled")
        known = ", ".join(map(str, LIMITS))
        if self.capability is None:
            if machine.gpu is None:
                raise ValueError(f"--compile: no GPU here; name one by --capability: {known}")
            return Card(machine.gpu.capability, machine.gpu.shared)
        if self.capability not in LIMITS:
            raise ValueError(f"--capability: {self.capability} is not one of {known}")
        return Card(self.capability, LIMITS[self.capability])


@dataclass(frozen=True)
class Card:
    capability: int
    shared: int
    """Bytes of shared memory that one program may take."""


@dataclass(frozen=True)
class Gpu(Card):
    name: str
    memory: int


@dataclass(frozen=True)
class Machine:
    version: str
    python: str
    torch: str
    triton: str | None
    gpu: Gpu | None

    @classmethod
    def here(cls) -> Machine:
        import torch

        from atlas_lm import __version__
        from atlas_lm.ops.kernels import installed

        triton = None
        if installed():
            import triton as package

            triton = package.__version__
        gpu = None
        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(torch.cuda.current_device())
            capability = 10 * found.major + found.minor
            shared = found.shared_memory_per_block_optin
            gpu = Gpu(capability, shared, found.name, found.total_memory)
        return cls(__version__, platform.python_version(), str(torch.__version__), triton, gpu)

    def lines(self) -> Iterator[str]:
        triton = f"Triton {self.triton}" if self.triton else "no Triton"
        yield f"atlas-lm {self.version}, Python {self.python}, PyTorch {self.torch}, {triton}"
        if self.gpu is None:
            yield "no GPU"
        else:
            memory = f"{self.gpu.memory / GIB:.0f} GiB"
            yield f"{self.gpu.name}, compute capability {self.gpu.capability}, {memory}"


@dataclass(frozen=True)
class Choice:
    """What `impl="auto"` is for a rule."""

    rule: str
    takes: str
    reason: str | None
    """Why it is not the kernels."""


def choices() -> Iterator[Choice]:
    """Of every rule on this machine, in a layer of the default shape, on bfloat16."""
    import torch

    from atlas_lm.nn import MemoryConfig
    from atlas_lm.ops import init_memory
    from atlas_lm.ops.kernels import preferred, why_not
    from atlas_lm.rules import RULES

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, rule in RULES.items():
        config = MemoryConfig(dim=DIM, heads=HEADS, rule=name)
        d_k, d_v = config.key_width, config.value_width
        weights = init_memory(rule, HEADS, d_k, d_v, config.hidden, device="meta")
        q, v = (
            torch.zeros(1, rule.chunk + 1, HEADS, width, device=device, dtype=torch.bfloat16)
            for width in (d_k, d_v)
        )
        reason = why_not(rule, q, v, weights)
        if reason is None and not preferred(q):
            reason = "the interpreter, which only checks them"
        yield Choice(name, "triton" if reason is None else "chunked", reason)


def _choice_lines(found: list[Choice]) -> Iterator[str]:
    yield f'rules: what impl="auto" takes here in a layer of {DIM} in {HEADS} heads, on bfloat16'
    rows = [("rule", "takes", "why not the kernels")]
    rows += [(each.rule, each.takes, each.reason or "") for each in found]
    yield from _table(rows)


@dataclass(frozen=True)
class Examined:
    """A kernel; what follows its name is known if it was compiled."""

    family: str
    name: str
    shared: int | None = None
    registers: int | None = None
    spilled: int | None = None
    fits: bool | None = None
    error: str | None = None


def examined(card: Card | None) -> Iterator[Examined]:
    """Every kernel, compiled if there is a card to do it for."""
    from tqdm import tqdm

    from atlas_lm.ops.triton.catalogue import compilations, compilations_for

    if card is None:
        yield from (Examined(each.family, each.name) for each in compilations())
        return
    hidden = not sys.stderr.isatty()
    title = f"sm_{card.capability}"
    work = compilations_for(card.capability)
    for each in tqdm(work, title, file=sys.stderr, disable=hidden, dynamic_ncols=True):
        yield _compiled(each, card)


def _compiled(compilation: Compilation, card: Card) -> Examined:
    from atlas_lm.ops.triton.catalogue import compile_for

    family, name = compilation.family, compilation.name
    try:
        made = compile_for(compilation, card.capability)
    except Exception as error:  # whatever a compiler says is what was asked for
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[-1] if lines else type(error).__name__
        return Examined(family, name, fits=False, error=said)
    return Examined(family, name, *made, fits=made.shared <= card.shared)


def _kernel_lines(kernels: list[Examined], card: Card | None) -> Iterator[str]:
    if not kernels:
        yield "kernels: none without Triton; every rule runs as chunked"
        return
    families = [(name, list(these)) for name, these in groupby(kernels, lambda each: each.family)]
    if card is None:
        yield f"kernels: {len(kernels)}, not compiled; --compile tries it, for any card"
        rows = [("family", "kernels")] + [(name, str(len(these))) for name, these in families]
        yield from _table(rows)
        return
    room = f"{card.shared / KIB:.0f} KiB of shared memory"
    yield f"kernels: {len(kernels)}, compiled for sm_{card.capability}, which has {room}"
    rows = [("family", "kernels", "shared at most", "registers", "spilled", "")]
    rows += [_family_row(name, these) for name, these in families]
    yield from _table(rows)
    for each in kernels:
        if each.error is not None:
            yield f"  {each.name}: not compiled: {each.error}"
        elif not each.fits and each.shared is not None:
            yield f"  {each.name}: {each.shared / KIB:.1f} KiB of shared memory, too much"


def _family_row(name: str, kernels: list[Examined]) -> tuple[str, ...]:
    """The most that a kernel of the family takes, and how many of them this card cannot run."""

    def most(values: list[int | None], text: str, unit: int = 1) -> str:
        known = [value for value in values if value is not None]
        return text.format(max(known) / unit) if known else "unknown"

    failed = sum(not each.fits for each in kernels)
    return (
        name,
        str(len(kernels)),
        most([each.shared for each in kernels], "{:.1f} KiB", KIB),
        most([each.registers for each in kernels], "{:.0f}"),
        most([each.spilled for each in kernels], "{:,.0f} bytes"),
        f"{failed} cannot run" if failed else "all fit",
    )


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()
