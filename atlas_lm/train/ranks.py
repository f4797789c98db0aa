"""One process or many: who takes part, and a model that is trained by all of them.

Every rank reads its own rows of a batch. `ddp` keeps the whole model on each and adds the gradients
up; `fsdp` keeps a part of each matrix on each and gathers a block when it is its turn.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from atlas_lm.models.lm import LanguageModel, ModelState
from atlas_lm.nn.memory import MemoryLayer

T = TypeVar("T")
Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, as one of them sees them."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    """Among those of this machine."""
    joined: bool = False
    """It was here that they met, and here they part."""

    @classmethod
    def join(cls, device: str | None = None) -> Ranks:
        """Meet the others that `torchrun` has started, if that was not done; without it, be alone.

        Several runs in one program: join before the first, leave after the last. PyTorch cannot
        meet again once it has parted.

        device    cpu or cuda; None: on GPUs if there are any
        """
        rank, ranks, local = (_counted(n) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        ranks = max(ranks, 1)
        found = _device(device, local, ranks)
        joined = ranks > 1 and not dist.is_initialized()
        if joined:
            _meet(found)
        return cls(device=found, rank=rank, ranks=ranks, local_rank=local, joined=joined)

    @property
    def first(self) -> bool:
        """The one that speaks and writes files."""
        return self.rank == 0

    def mine(self, numbers: range) -> range:
        """This rank's part of them."""
        share = len(numbers) // self.ranks
        return numbers[self.rank * share : (self.rank + 1) * share]

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks; a new tensor."""
        total = tensor.detach().to(self.device, copy=True)
        if self.ranks > 1:
            dist.all_reduce(total)
        return total

    def mean(self, tensor: Tensor) -> Tensor:
        """Over all ranks; a new tensor."""
        return self.sum(tensor) / self.ranks

    def rows(self, tensor: Tensor) -> Tensor:
        """Rows `[b ...]` of this rank as part of `[ranks*b ...]`, so that a checkpoint holds all of
        them and any number of ranks can take them up. `local` is the way back."""
        if self.ranks == 1:
            return tensor
        return DTensor.from_local(
            tensor, _mesh(self.device.type, self.ranks), [Shard(0)], run_check=False
        )

    def barrier(self) -> None:
        """Wait for all."""
        if self.ranks > 1:
            dist.barrier()

    def leave(self) -> None:
        """Part from the others: at once where something went wrong, else when all are here. Who
        goes while others still talk to it makes them abort."""
        if self.joined and dist.is_initialized():
            if sys.exc_info()[0] is None:
                dist.barrier()
            dist.destroy_process_group()
            self._let_go()

    def _let_go(self) -> None:
        """Let the group end here, and its threads with it: one of gloo's that still lets go of a
        tensor when Python ends aborts the process. DTensor's caches keep the mesh, the mesh keeps
        the group, and a sharded model keeps it until it is collected."""
        if _mesh.cache_info().currsize:
            getattr(_mesh(self.device.type, self.ranks), "_pg_registry", {}).clear()
        _mesh.cache_clear()
        atexit.register(gc.collect)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may lie in parts on many ranks; all of them have to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: LanguageModel) -> dict[str, Tensor]:
    """Every weight on the CPU, on the first rank; on others nothing. All have to call this."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    found = {}
    for name, tensor in model.state_dict().items():
        gathered = whole(tensor)
        if first:
            found[name] = gathered.detach().to("cpu", copy=True)
    return found


def _counted(name: str) -> int:
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        raise ValueError(f"{name}: {text!r} in the environment; expected a number, as of torchrun")
    return int(text)


def _device(name: str | None, local: int, ranks: int) -> torch.device:
    """This rank's own: of several GPUs the one with its number."""
    try:
        found = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if found.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
        torch.empty(0, device=found.type)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name}: cannot be used here ({reason})") from error
    if ranks == 1:
        return found
    if found.type not in ("cpu", "cuda") or found.index is not None:
        raise ValueError(
            f"--device {name}: expected cpu or cuda where torchrun starts {ranks} processes; "
            "each takes the GPU of its own number"
        )
    if found.type == "cpu":
        return found
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}; "
            "start torchrun with as many processes a machine (--nproc-per-node), or --device cpu"
        )
    return torch.device("cuda", local)


def _meet(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


@cache
def _mesh(kind: str, ranks: int) -> DeviceMesh:
    """All ranks in a row, of a kind of devices."""
    return init_device_mesh(kind, (ranks,))


# A model on many ranks


def shard(objective: nn.Module, ranks: Ranks, how: Parallel) -> nn.Module:
    """What to call instead of `objective`, a module around a language model; on one rank, itself.

    Gradients are means over ranks: scale each rank's loss by its share of all targets times ranks.
    """
    if how not in ("ddp", "fsdp"):
        raise ValueError(f"parallel: {how!r} is not one of ddp, fsdp")
    model = language_model(objective)
    for module in model.modules():
        if isinstance(module, MemoryLayer):
            module.register_forward_hook(_always_learning)
    if ranks.ranks == 1:
        return objective
    if how == "ddp":
        return DistributedDataParallel(objective, gradient_as_bucket_view=True)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
    # it means the states that blocks return, and nobody changes those in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    mesh = _mesh(ranks.device.type, ranks.ranks)
    objective.register_forward_pre_hook(_begin_in_blocks, with_kwargs=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    # at once, not in the backward: after an evaluation there is none, and what is gathered is a
    # copy, of which checkpoints and optimizers know nothing
    fully_shard(objective, mesh=mesh, reshard_after_forward=True)
    return objective


def language_model(objective: nn.Module) -> LanguageModel:
    """The language model in a module."""
    for module in objective.modules():
        if isinstance(module, LanguageModel):
            return module
    raise ValueError(f"{type(objective).__name__} holds no LanguageModel")


@contextmanager
def adding_up(objective: nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward of one of several parts of a step: ranks exchange gradients in
    the last one only."""
    if isinstance(objective, FSDPModule):
        objective.set_requires_gradient_sync(last)
    alone = isinstance(objective, DistributedDataParallel) and not last
    with objective.no_sync() if alone else nullcontext():  # pyright: ignore[reportCallIssue]
        yield


class _Untouched(torch.autograd.Function):
    """x as it is, and a gradient of zero for weights that it may not depend on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(w.shape, w.dtype, w.device) for w in weights]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        zeros = (torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.like)
        return grads[0], *zeros


def _always_learning(layer: nn.Module, _args: Any, output: Any) -> Any:
    """Initial memories are read only where a document begins, which may be on some ranks only: the
    others would wait for ever for a gradient that they never have."""
    assert isinstance(layer, MemoryLayer)
    weights = [w for w in layer.memory.values() if w.requires_grad]
    if not weights or not torch.is_grad_enabled():
        return None
    y, state = output
    return _Untouched.apply(y, *weights), state


def _begin_in_blocks(objective: nn.Module, args: tuple, options: dict[str, Any]) -> Any:
    """Let every block make its own first state: outside of its forward its weights are in parts."""
    call = signature(objective.forward).bind(*args, **options)
    if call.arguments.get("state") is None:
        model, tokens = language_model(objective), call.arguments["tokens"]
        blank: Any = (None,) * model.config.depth
        position = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        call.arguments["state"] = ModelState(layers=blank, position=position)
    return call.args, call.kwargs


# What of it a checkpoint holds


class ModelWeights:
    """The weights of a model under their own names, however it is sharded; loaded in place."""

    def __init__(self, model: LanguageModel):
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        found = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        assert len({isinstance(tensor, DTensor) for tensor in found.values()}) == 1
        return found

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                local(tensor).copy_(local(state[name]))


class OptimizerMoments:
    """What optimizers remember of each weight, as `AdamW/blocks.0.norm.weight/exp_avg`.

    Learning rates and other options are the configuration's, not the checkpoint's.
    """

    def __init__(self, model: LanguageModel, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers
        names = {id(p): name for name, p in model.named_parameters()}
        self.parameters: dict[str, Tensor] = {}
        self._keys: list[list[str]] = []
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            inside = [p for group in optimizer.param_groups for p in group["params"]]
            keys = [f"{kind}/{names[id(p)]}" for p in inside]
            self.parameters |= dict(zip(keys, inside, strict=True))
            self._keys.append(keys)

    def state_dict(self) -> dict[str, Tensor]:
        found = {}
        for optimizer, keys in zip(self.optimizers, self._keys, strict=True):
            for key in keys:
                for name, value in optimizer.state.get(self.parameters[key], {}).items():
                    found[f"{key}/{name}"] = torch.as_tensor(value)
        return found

    def blank(self, saved: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        """Places for what a checkpoint holds: a new optimizer has none yet."""
        places = {}
        for key, (shape, dtype) in saved.items():
            parameter = self.parameters.get(key.rpartition("/")[0])
            if parameter is not None and shape == parameter.shape:
                places[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            elif parameter is not None:
                places[key] = torch.zeros(shape, dtype=dtype)
        return places

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        moments: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            key, _, moment = name.rpartition("/")
            moments.setdefault(key, {})[moment] = value
        for optimizer, keys in zip(self.optimizers, self._keys, strict=True):
            remembered = {number: moments[key] for number, key in enumerate(keys) if key in moments}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": remembered})


def model_state(model: LanguageModel) -> ModelWeights:
    """For `Checkpoints.save` and `load`."""
    return ModelWeights(model)


def optimizer_state(
    model: LanguageModel, optimizers: list[torch.optim.Optimizer]
) -> OptimizerMoments:
    """For `Checkpoints.save` and `load`."""
    return OptimizerMoments(model, optimizers)


# Agreeing


def agreed(make: Callable[[], T]) -> T:
    """What the first rank makes, on all of them; what it raises, on all of them."""
    if not dist.is_initialized():
        return make()
    said: list[Any] = [_tried(make) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said, 0)
    return _told(said)[0]


def together(make: Callable[[], T]) -> list[T]:
    """What every rank makes, in their order, on all of them; what one raises, on all of them."""
    if not dist.is_initialized():
        return [make()]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, _tried(make))
    return _told(said)


def _tried(make: Callable[[], T]) -> T | Exception:
    try:
        return make()
    except (OSError, ValueError) as error:
        return error


def _told(said: list[Any]) -> list[Any]:
    for each in said:
        if isinstance(each, Exception):
            raise each
    return said
