"""Programs that write one memory together: each has a share of its hidden layer.

What the second layer gives is a sum over all shares. Everybody leaves its part in `room`, waits
until the others have left theirs, and adds them up in the same order. There are two rooms, taken in
turns: who enters one again has met the others in between, so they have read what was in it.

A team's programs have neighbouring numbers, and programs are started in the order of their numbers,
so that those that are waited for are running, or start before any that come after them.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.tiles import put


@triton.jit
def arrive(arrived):
    """Tell the team that this program has come to the next meeting and left its parts."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release", scope="gpu")


@triton.jit
def look(arrived):
    """How many have come. A load, in which every thread acquires what those before have left; an
    atomic add of nothing takes a barrier each time it looks."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [arrived.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait(arrived, meeting, S: tl.constexpr):
    """Until the whole team has come to this meeting, the first being number 1."""
    seen = look(arrived)
    while seen < meeting * S.team:
        seen = look(arrived)
    tl.debug_barrier()


@triton.jit
def meet(arrived, meeting, S: tl.constexpr):
    arrive(arrived)
    wait(arrived, meeting, S)


@triton.jit
def leave_part(part, room, meeting, member, rows, vs, height, WHICH: tl.constexpr, S: tl.constexpr):
    """Part WHICH (0 or 1) of `member`, a tile `[rows, vs]`."""
    at = ((meeting % 2) * S.team + member) * 2 + WHICH
    put(room + at * S.pairs * S.d_v, part, rows, vs, height, S.d_v)


@triton.jit
def sum_of_parts(room, meeting, rows, vs, height, WHICH: tl.constexpr, S: tl.constexpr):
    """What all have left, past the L1, which knows what was here two meetings ago."""
    TEAM: tl.constexpr = S.team
    inside = (rows[:, None] < height) & (vs[None, :] < S.d_v)
    at = rows[:, None] * S.d_v + vs[None, :]
    total = tl.zeros((rows.shape[0], vs.shape[0]), tl.float32)
    for member in tl.static_range(TEAM):
        base = (((meeting % 2) * S.team + member) * 2 + WHICH) * S.pairs * S.d_v
        total += tl.load(room + base + at, mask=inside, other=0.0, cache_modifier=".cg")
    return total
