"""Which way of training suits a model and a device: by rules with a measured reason, never by the clock."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from afield.core.errors import InputError, one_of
from afield.core.protocols import Data, Pool
from afield.training import workers
from afield.training.alone import AloneTrainer
from afield.training.block import CACHED, BlockTrainer
from afield.training.convpool import stackable
from afield.training.cuda import GraphTrainer
from afield.training.local import Local, LoopTrainer
from afield.training.streams import StreamTrainer
from afield.training.tape import CannotRecord
from afield.training.workers import WorkersTrainer

log = logging.getLogger("afield")

METHODS = ("auto", "loop", "vmap", "graph", "workers")


@dataclass(frozen=True)
class Training:
    """How local training is computed; what comes out is the same up to rounding (see docs/performance.md).

    auto: `graph` on a GPU; on a CPU `workers` for convolutional models, `vmap` for others (language models that fill
    the caches one client after another). `loop` is the definition.
    `precision` and `channels_last` are for graphs.
    """

    method: str = "auto"
    precision: str = "float32"
    channels_last: bool = False
    compile: bool = False  # worth its minute in runs of more than about 100,000 steps

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        one_of("precision", self.precision, ("float32", "bfloat16"))
        if self.method not in ("auto", "graph"):
            for name in ("channels_last", "compile"):
                if getattr(self, name):
                    raise InputError(
                        f"{name} = true is for method = 'graph', not {self.method!r}: leave it out"
                    )
            if self.precision != "float32":
                raise InputError(
                    f"precision = {self.precision!r} is for method = 'graph', not {self.method!r}"
                )

    def by(self, method: str) -> Training:
        """The same by another method, without what that one does not know."""
        return replace(self, method=method) if method == "graph" else Training(method)


def convolutional(module: nn.Module) -> bool:
    return any(isinstance(part, _ConvNd) for part in module.modules())


def choose(module: nn.Module, device: str, cores: int | None = None) -> str:
    """The method that `auto` stands for."""
    if torch.device(device).type == "cuda":
        return "graph"
    if not convolutional(module):
        return "vmap"
    return "workers" if (workers.cores() if cores is None else cores) > 1 else "loop"


def solitary(module: nn.Module, data: Data) -> bool:
    """Whether a CPU trains one client after another by tape: a language model that fills the caches by itself.

    Stacks of one are no faster, and making their tape takes 4 to 7 times as long and twice the memory: for a BERT of
    22.7 million weights (batches of 32 texts of 64 tokens) 43 s and 6.5 GB in place of 11 s and 3 GB.
    """
    inputs = getattr(data, "inputs", None)
    weights = sum(part.numel() * part.element_size() for part in module.parameters())
    return isinstance(inputs, torch.Tensor) and not inputs.is_floating_point() and weights > CACHED


def trainer(
    module: nn.Module,
    data: Data,
    local: Local,
    seed: int,
    loss: str = "cross-entropy",
    device: str = "cpu",
    training: Training = Training(),
) -> LoopTrainer | BlockTrainer | WorkersTrainer:
    """A trainer by the method wanted; the loop, with a line in the log, where a model allows no other."""
    wanted = training.method if training.method != "auto" else choose(module, device)
    if wanted == "graph" and torch.device(device).type != "cuda":
        raise InputError(
            f"training.method = 'graph' needs a GPU, the device is {device!r}: use 'vmap' or 'workers'"
        )
    if wanted == "workers" and torch.device(device).type != "cpu":
        raise InputError(f"training.method = 'workers' is for CPUs, the device is {device!r}: use 'graph'")
    parts = (module, data, local, seed, loss)
    try:
        if wanted == "workers":
            return WorkersTrainer(*parts)
        if wanted == "vmap" and torch.device(device).type == "cpu" and solitary(module, data):
            return AloneTrainer(*parts)
        if wanted == "vmap":
            return BlockTrainer(*parts, device)  # type: ignore[arg-type]
        if wanted == "graph":
            return graphs(*parts, device, training)  # type: ignore[arg-type]
    except CannotRecord as reason:
        log.warning("training.method = %r cannot take this model, it trains by the loop: %s", wanted, reason)
    return LoopTrainer(*parts, device)


def graphs(
    module: nn.Module, data: Pool, local: Local, seed: int, loss: str, device: str, training: Training
) -> GraphTrainer:
    """Stacked weights where that is faster: without convolutions, or with those that there are kernels for."""
    parts = (module, data, local, seed, loss, device)
    options = (training.precision, training.channels_last, training.compile)
    if not convolutional(module):
        return GraphTrainer(*parts, *options)
    if stackable(module):
        try:
            return GraphTrainer(*parts, *options)
        except CannotRecord as reason:  # a GPU that Triton does not know, say
            log.warning("its convolutions are trained client by client, on streams: %s", reason)
    return StreamTrainer(*parts, *options)
