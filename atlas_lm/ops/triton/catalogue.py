"""Every compilation of a kernel that ships, and how to make it for a card that is not here.

Modules that launch kernels list theirs as `KERNELS`; what writes and reads memories is compiled for
a rule at a shape, and listed here. Kernels decorated under Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from atlas_lm.ops import triton as package
from atlas_lm.ops.networks import init_memory
from atlas_lm.ops.triton.launch import without_wgmma
from atlas_lm.ops.triton.layout import sizes_of
from atlas_lm.ops.triton.muon_kernels import (
    advance_kernel,
    branch_kernel,
    factors_kernel,
    hidden_kernel,
)
from atlas_lm.ops.triton.reading import read_kernel
from atlas_lm.ops.triton.reading_backward import (
    read_inputs_backward_kernel,
    read_pairs_backward_kernel,
)
from atlas_lm.ops.triton.reading_hidden import read_hidden_backward_kernel
from atlas_lm.ops.triton.reads import inputs_registers, takes_wgmma
from atlas_lm.ops.triton.sizes import (
    LINEAR,
    Sizes,
    by_blocks,
    in_narrow_tiles,
    prepares,
    resident_registers,
)
from atlas_lm.ops.triton.writing import write_kernel
from atlas_lm.ops.triton.writing_backward import error_kernel, pull_kernel
from atlas_lm.ops.triton.writing_resident import prepare_kernel, resident_kernel
from atlas_lm.ops.triton.writing_resident_backward import (
    linear_keys_kernel,
    resident_backward_kernel,
)
from atlas_lm.ops.triton.writing_settle import settle_kernel
from atlas_lm.rules import RULES, Rule

KIB = 1024
LIMITS = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}
"""Bytes of shared memory that one program may take, by compute capability."""
HOPPER = 90


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A kernel, with the types and the constants it is compiled for."""

    name: str
    family: str
    """The module that lists it, or that has the kernel."""
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    wgmma: bool = True
    """Whether products may be compiled as Hopper likes them."""
    num_stages: int | None = None
    """None: as many as Triton takes if not told."""
    registers: int | None = None
    """The most a thread may have, if it is told."""


class Compiled(NamedTuple):
    shared: int
    """Bytes of shared memory."""
    registers: int | None
    """Of a thread; None: there is nothing here to look them up with."""
    spilled: int | None
    """Bytes of a thread that found no register."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rule at the shape of one head."""

    rule: Rule
    d_k: int = 64
    d_v: int = 64
    hidden: int | None = None
    team: int = 1


CASES = {
    "linear, degree 2": Case(rule=Rule(features="polynomial", window=16), d_k=16),
    "linear, degree 2, by a team": Case(
        rule=Rule(features="polynomial", window=16), d_k=16, team=4
    ),
    "linear, degree 2, momentum": Case(
        rule=Rule(features="polynomial", optimizer="momentum"), d_k=16
    ),
    "linear_attention": Case(rule=RULES["linear_attention"]),
    "linear_attention, by a team": Case(rule=RULES["linear_attention"], team=4),
    "linear, momentum": Case(rule=Rule(optimizer="momentum", window=16), team=4),
    "titans": Case(rule=RULES["titans"], hidden=256),
    "titans, by a team": Case(rule=RULES["titans"], hidden=256, team=4),
    "titans, window 16": Case(rule=replace(RULES["titans"], window=16), hidden=256),
    "omeganet": Case(rule=RULES["omeganet"], d_k=16, hidden=64),
    "omeganet, by a team": Case(rule=RULES["omeganet"], d_k=16, hidden=64, team=2),
    "gated_mlp, degree 2, momentum": Case(
        rule=replace(RULES["atlas_pp"], optimizer="momentum"), d_k=16, hidden=64
    ),
    "atlas, identity, stride 64": Case(
        rule=replace(RULES["atlas"], features="identity", stride=64), hidden=256
    ),
    "atlas, degree 2, stride 16": Case(rule=replace(RULES["atlas"], stride=16), d_k=16, hidden=64),
    "atlas, identity, every token": Case(
        rule=replace(RULES["atlas"], features="identity"), hidden=64
    ),
}
"""What memories are written and read for: the shapes that speed is measured at."""

BY_BLOCKS = hidden_kernel, branch_kernel, factors_kernel, pull_kernel, error_kernel, settle_kernel
"""Whose programs have a block of a memory each."""
DEEP = hidden_kernel, branch_kernel, pull_kernel, error_kernel, read_hidden_backward_kernel
"""What linear memories do without."""
REGISTERS = {
    read_inputs_backward_kernel: inputs_registers,
    resident_kernel: resident_registers,
    resident_backward_kernel: resident_registers,
}
"""The most that a thread of these may have."""
ROUNDED = {"q", "k", "v", "y", "dq", "dv", "dy", "state", "states", "terms", "entered", "pushes"}
ROUNDED |= {"own_anchor", "u1", "h", "u2", "u3", "d_state", "d_terms", "d_entered"}
ROUNDED |= {"d_u1", "d_h", "d_u2", "d_u3", "u", "d_u", "dz", "dz3", "of_branch", "own", "back"}
ROUNDED |= {"hidden", "anchor", "phi", "do", "known"}
"""Tensors in the dtype of the inputs."""
COUNTS = {"piece", "pieces", "marked", "rows_and_heads", "heads"}


@cache
def compilations() -> tuple[Compilation, ...]:
    """All of them, by family."""
    found = [each for name, case in CASES.items() for each in memory_kernels(name, case)]
    for module in sorted(m.name for m in iter_modules(package.__path__)):
        listed = getattr(import_module(f"{package.__name__}.{module}"), "KERNELS", ())
        found += [from_list(module, each) for each in listed]
    return tuple(sorted(found, key=lambda each: each.family))


def compilations_for(capability: int) -> tuple[Compilation, ...]:
    """Those for a card of this compute capability: what is in Gluon is laid out for Hopper."""
    return tuple(each for each in compilations() if capability == HOPPER or not in_gluon(each.fn))


def in_gluon(fn: Any) -> bool:
    return isinstance(fn, GluonJITFunction)


def from_list(module: str, listed: dict[str, Any]) -> Compilation:
    """What a module lists, but for how pointers are aligned: all are alike."""
    known = {field.name for field in fields(Compilation)} & listed.keys()
    return Compilation(family=module, **{name: listed[name] for name in known})


def memory_kernels(name: str, case: Case) -> list[Compilation]:
    """What writes and reads memories of a rule, in bfloat16 and chunks as they are launched."""
    rule = case.rule
    weights = init_memory(rule, 16, case.d_k, case.d_v, case.hidden, device="meta")
    terms = {"gd": 0, "momentum": 1, "muon": rule.chunk // rule.stride}[rule.optimizer]
    sizes = sizes_of(rule, weights, case.d_k, case.d_v, rule.chunk, terms, case.team)
    muon = hidden_kernel, branch_kernel, factors_kernel, advance_kernel
    additive = (resident_kernel if sizes.resident else write_kernel,)
    prepare = (prepare_kernel,) if any(prepares(sizes)) else ()
    writes = *prepare, *(muon if rule.optimizer == "muon" else additive)
    reads = [read_kernel, read_inputs_backward_kernel, read_hidden_backward_kernel]
    reads += [read_pairs_backward_kernel] * sizes.written
    every = (*writes, *reads, *settled_by(sizes))
    blocks = by_blocks(sizes, 128, 132)
    sized: dict[Any, Sizes] = dict.fromkeys(BY_BLOCKS, blocks)
    sized[settle_kernel] = in_narrow_tiles(blocks)
    return [
        memory_kernel(name, fn, sized.get(fn, sizes))
        for fn in every
        if sizes.network != LINEAR or fn not in DEEP
    ]


def settled_by(sizes: Sizes) -> tuple[Any, ...]:
    """What takes the gradients of writing."""
    if sizes.network == LINEAR and sizes.resident:
        return resident_backward_kernel, linear_keys_kernel
    return pull_kernel, error_kernel, settle_kernel


def memory_kernel(name: str, fn: Any, sizes: Sizes) -> Compilation:
    constants = {"OWN": False, "KEEP": True, "S": sizes, "DOT": tl.bfloat16}
    constants = {n: value for n, value in constants.items() if n in fn.arg_names}

    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument in COUNTS:
            return "i32"
        if argument in ("left", "right", "marks", "arrived"):
            return "*i32"
        return "*bf16" if argument in ROUNDED else "*fp32"

    return Compilation(
        name=f"{fn.__name__} of {name}",
        family=module_of(fn),
        fn=fn,
        signature={argument: kind(argument) for argument in fn.arg_names},
        constexprs=constants,
        num_warps=4,
        wgmma=takes_wgmma(sizes),
        num_stages=1,
        registers=REGISTERS[fn](sizes) if fn in REGISTERS else None,
    )


def module_of(fn: Any) -> str:
    """Where a kernel is defined: what Triton wraps it in may be of a module of Triton's."""
    return fn.fn.__module__.rpartition(".")[2]


def compile_for(compilation: Compilation, capability: int) -> Compiled:
    """Compile a kernel for a card of this compute capability, which need not be here."""
    names = compilation.fn.arg_names
    signature = {name: compilation.signature[name] for name in names}
    # torch aligns what it allocates, and Triton looks at the pointers of every launch
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")
    }
    language = GluonASTSource if in_gluon(compilation.fn) else ASTSource
    source = language(compilation.fn, signature, compilation.constexprs, aligned)
    options = {"num_warps": compilation.num_warps}
    if compilation.num_stages is not None:
        options["num_stages"] = compilation.num_stages
    if compilation.registers is not None:
        options["maxnreg"] = compilation.registers
    with nullcontext() if compilation.wgmma else without_wgmma():
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(made.metadata.shared, *resources(made.asm["cubin"]))


def resources(cubin: bytes) -> tuple[int, int] | tuple[None, None]:
    """Registers and spilled bytes of a thread, by the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [tool, "--dump-resource-usage", file]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    if found is None:
        return None, None
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
