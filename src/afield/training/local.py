"""Local training of one client after another: the definition that faster trainers are tested against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from afield.core.errors import InputError, one_of, within
from afield.core.flat import Layout, own_copy
from afield.core.keys import Stream, mix
from afield.core.protocols import Data
from afield.core.types import LocalResult, Task
from afield.training.augment import augmented, check_images
from afield.training.draws import shuffled
from afield.training.layers import Moment, keyed

Loss = Callable[[Tensor, Tensor], Tensor]
IGNORED = -100  # the target of a token that nobody has to guess


@dataclass(frozen=True)
class Local:
    """What a client does in a task: SGD or AdamW for `epochs`, or for `steps` (one number, or one each)."""

    epochs: int = 1
    steps: int | tuple[int, ...] | None = None
    batch: int = 32
    rate: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    prox: float = 0.0
    optimiser: str = "sgd"
    augment: bool = (
        False  # images are cropped (4 zeros around them) and flipped at random (training/augment.py)
    )

    def __post_init__(self) -> None:
        within("epochs", self.epochs, 1, math.inf)
        if self.steps is not None:
            counts = [self.steps] if isinstance(self.steps, int) else self.steps
            if not counts:
                raise InputError("steps = () is empty: give one number per client, or leave it out")
            for count in counts:
                within("steps", count, 1, math.inf)
        within("batch", self.batch, 1, math.inf)
        within("rate", self.rate, 0, math.inf, above=True, below=True)
        within("momentum", self.momentum, 0, 1, below=True)
        within("weight_decay", self.weight_decay, 0, math.inf, below=True)
        within("prox", self.prox, 0, math.inf, below=True)
        one_of("optimiser", self.optimiser, ("sgd", "adamw"))
        if self.optimiser == "adamw" and self.momentum:
            raise InputError(f"momentum = {self.momentum} means nothing to adamw: leave it at 0")

    def work(self, client: int, size: int) -> int:
        """How many local steps a task of this client takes; a client without data takes none."""
        if size == 0:
            return 0
        if self.steps is None:
            return self.epochs * -(-size // self.batch)
        if isinstance(self.steps, int):
            return self.steps
        if client >= len(self.steps):
            raise InputError(
                f"steps has {len(self.steps)} numbers, but there is a client {client}: give one per client"
            )
        return self.steps[client]

    def over(self, weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimiser of these weights."""
        if self.optimiser == "adamw":
            return torch.optim.AdamW(weights, lr=self.rate, weight_decay=self.weight_decay)
        return torch.optim.SGD(weights, lr=self.rate, momentum=self.momentum, weight_decay=self.weight_decay)


def batches(local: Local, client: int, size: int, key_words: Sequence[int]) -> list[Tensor]:
    """The batches of one task, as positions in the client's data; `key_words` is (seed, client, count).

    Every epoch is shuffled anew and ends in a short batch where the size asks for it; `steps` goes on
    through as many epochs as it needs. A pure function of its arguments.
    """
    wanted = local.work(client, size)
    if not wanted:
        return []
    epochs = -(-wanted // -(-size // local.batch))
    key = torch.tensor([batch_key(*key_words)])
    turns = shuffled(key, epochs, torch.tensor([size]), size)[0]
    return [batch for turn in turns for batch in turn.split(local.batch)][:wanted]


def batch_key(seed: int, client: int, count: int) -> int:
    """The key of a task's shuffles."""
    return mix(seed, client, count, Stream.BATCHES) >> 1


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    # [n, 1] against [n] would broadcast to [n, n], a wrong loss without an error.
    return functional.mse_loss(outputs.reshape(targets.shape), targets.to(outputs.dtype))


def _value(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def guesses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of each text the sum of its tokens' losses, and how many tokens had to be guessed."""
    wanted = targets != IGNORED
    right = functional.log_softmax(outputs, dim=-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return -torch.where(wanted, right, 0.0).sum(dim=-1), wanted.sum(dim=-1)


def _tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    losses, counts = guesses(outputs, targets)
    return losses.sum() / counts.sum().clamp(min=1)


LOSSES: dict[str, Loss] = {"cross-entropy": _cross_entropy, "mse": _mse, "value": _value, "tokens": _tokens}


def loss_function(name: str) -> Loss:
    """The mean loss of a batch, from outputs and targets.

    "value" is the mean of the outputs themselves; "tokens" the mean over the tokens whose target is not IGNORED.
    """
    one_of("loss", name, LOSSES)
    return LOSSES[name]


class LoopTrainer:
    """Trains one task after another, on a private copy of the module.

    Weights and gradients are one vector each, so that the proximal pull, the correction and the optimiser
    take one pass over them. A result depends on (base, correction, data, task) alone: the optimiser, the
    statistics, counters inside the module and the dropout stream start anew in every task. A trainable
    parameter that the loss does not reach has gradient zero, so weight decay still shrinks it.
    """

    method: ClassVar[str] = "loop"

    def __init__(
        self,
        module: nn.Module,
        data: Data,
        local: Local,
        seed: int,
        loss: str = "cross-entropy",
        device: torch.device | str = "cpu",
    ) -> None:
        self.data, self.local, self.seed = data, local, seed
        self.device = torch.device(device)
        self._loss = loss_function(loss)
        own, self.layout, self._work = own_copy(module, self.device)
        self._moment = Moment()
        self._module = keyed(own, self._moment).train()
        self._weights = self._work[: self.layout.parameters]
        self._gradient = torch.zeros_like(self._weights)
        self._distance = torch.empty_like(self._weights) if local.prox else None
        self._optimiser = local.over(self._trainable())
        norms = (part for part in self._module.modules() if isinstance(part, _NormBase))
        self._norms = [norm for norm in norms if norm.track_running_stats]
        if local.augment and any(data.sizes):  # fail here, not in the first task
            full = next(client for client, size in enumerate(data.sizes) if size)
            check_images(data.batch(full, torch.zeros(1, dtype=torch.long))[0])
        self._start_statistics()
        self._buffers = _Buffers(self._module, self.layout)

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        """One result per task, in order."""
        done = []
        with own_randomness(self.device) as reseed, torch.enable_grad():
            for task, base, correction in zip(tasks, bases, corrections, strict=True):
                key = mix(self.seed, task.client, task.count, Stream.DROPOUT) >> 1
                reseed(key)  # for what draws numbers of its own; nn.Dropout draws by key
                self._moment.key = torch.tensor(key, device=self.device)
                with told(task):
                    done.append(self._task(task, base, correction))
        # Losses are read after the last task: reading each would make a GPU wait.
        return [
            LocalResult(model, self.data.sizes[task.client], len(losses), self.local.rate, _mean(losses))
            for task, (model, losses) in zip(tasks, done, strict=True)
        ]

    def _task(self, task: Task, base: Tensor, correction: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        if base.shape != self._work.shape:
            raise InputError(
                f"a base of shape {tuple(base.shape)} is not a model of {self.layout.size} elements"
            )
        if correction is not None and correction.shape != self._weights.shape:
            raise InputError(
                f"a correction of shape {tuple(correction.shape)} does not fit P = {len(self._weights)}"
            )
        base = base.detach()
        self._work.copy_(base)
        self._buffers.restore()
        self._optimiser.state.clear()  # as a new optimiser, without the cost of making one
        anchor = base[: self.layout.parameters].to(self._work) if self._distance is not None else None
        if correction is not None:
            correction = correction.detach().to(self._gradient)
        size = self.data.sizes[task.client]
        losses: list[Tensor] = []
        for positions in batches(self.local, task.client, size, (self.seed, task.client, task.count)):
            losses.append(self._step(task.client, positions, len(losses), anchor, correction))
        self._buffers.collect()
        return torch.empty_like(base).copy_(self._work), losses

    def _step(
        self, client: int, positions: Tensor, step: int, anchor: Tensor | None, correction: Tensor | None
    ) -> Tensor:
        inputs, targets = self.data.batch(client, positions)
        for norm in self._norms:
            if isinstance(norm, _InstanceNorm):  # has no cumulative mean of its own, unlike batch norm
                norm.momentum = 1.0 / (step + 1)
        self._gradient.zero_()
        self._moment.step, self._moment.calls = torch.tensor(step, device=self.device), 0
        inputs = placed(inputs, self.device)
        if self.local.augment and self._moment.key is not None:
            inputs = augmented(inputs, self._moment.key, self._moment.step)
        loss = self._loss(self._module(inputs), placed(targets, self.device))
        loss.backward()  # type: ignore[no-untyped-call]
        if anchor is not None and self._distance is not None:
            torch.sub(self._weights, anchor, out=self._distance)
            self._gradient.add_(self._distance, alpha=self.local.prox)
        if correction is not None:
            self._gradient.add_(correction)
        self._optimiser.step()
        return loss.detach()

    def _trainable(self) -> list[nn.Parameter]:
        """The weights that move: one flat parameter, or more where frozen ones lie between."""
        gradients = self.layout.views(self._gradient)
        runs: list[list[int]] = []
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.grad = gradients[name]  # backward adds into it, in place
            start = self.layout.offsets[self.layout.names.index(name)]
            if runs and runs[-1][1] == start:
                runs[-1][1] += parameter.numel()
            else:
                runs.append([start, start + parameter.numel()])
        if not runs:
            raise InputError("0 parameters of the model have requires_grad: there is nothing to train")
        flat = []
        for start, end in runs:
            flat.append(nn.Parameter(self._weights[start:end]))
            flat[-1].grad = self._gradient[start:end]
        return flat

    def _start_statistics(self) -> None:
        """Let batch norm keep the cumulative mean over the batches of a task, from zero."""
        for norm in self._norms:
            norm.momentum = None
            # On the CPU: batch norm reads this counter in every pass, and a GPU would have to wait for it.
            norm.num_batches_tracked = torch.zeros((), dtype=torch.long)


class _Buffers:
    """Puts a module's buffers back at the start of a task, also those that the module bound anew."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        # The attached buffers themselves, not new views: views share one version counter, and autograd
        # would take one layer's statistics for changed when the next layer writes its own.
        attached = {id(buffer) for name, buffer in module.named_buffers() if name in layout.names}
        self._inside: list[tuple[nn.Module, str, Tensor]] = []
        self._outside: list[tuple[nn.Module, str, Tensor]] = []
        self._placed: dict[int, tuple[Tensor, int]] = {}  # what was put back, and its version then
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                if id(buffer) in attached:
                    self._inside.append((part, name, buffer))
                else:
                    self._outside.append((part, name, buffer.clone()))

    def restore(self) -> None:
        for part, name, buffer in self._inside:
            setattr(part, name, buffer)
        for number, (part, name, value) in enumerate(self._outside):
            before, version = self._placed.get(number, (None, 0))
            if before is not None and getattr(part, name) is before and before._version == version:
                continue  # nobody touched it: frozen weights may be gigabytes
            own = value.clone()
            setattr(part, name, own)
            self._placed[number] = (own, own._version)

    def collect(self) -> None:
        """Copy what the module bound anew (`self.mean = ...`) back into the vector."""
        for part, name, buffer in self._inside:
            now = getattr(part, name)
            if now is not buffer:
                buffer.copy_(now.detach())


@contextmanager
def told(task: Task) -> Iterator[None]:
    """An error in there names the task."""
    try:
        yield
    except Exception as error:
        kind = InputError if isinstance(error, InputError) else RuntimeError
        where = f"client {task.client}, task {task.number}"
        raise kind(f"training failed ({where}): {error}") from error


def check_fits(module: nn.Module, inputs: Any, classes: int, loss: str = "cross-entropy") -> None:
    """Raise unless the module can take the first of `inputs` and tell `classes` classes apart."""
    loss_function(loss)
    example = inputs[:1] if isinstance(inputs, Tensor) else inputs
    shape = tuple(example.shape[1:]) if isinstance(example, Tensor) else type(inputs).__name__
    parameter = next(module.parameters(), None)
    where = torch.device("cpu") if parameter is None else parameter.device
    modes = [(part, part.training) for part in module.modules()]
    try:
        with own_randomness(where), torch.no_grad():
            outputs = module.eval()(placed(example, where))
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise InputError(
            f"the model cannot take inputs of shape {shape}: {(reason or [type(error).__name__])[0]}; "
            f"choose a model for that shape"
        ) from error
    finally:
        for part, mode in modes:
            part.training = mode
    if loss == "value" and outputs.ndim > 1:
        raise InputError(
            f"the model gives outputs of shape {tuple(outputs.shape)}, but the loss 'value' wants one number per "
            f"example, the loss itself: choose a model such as point"
        )
    if loss == "tokens" and outputs.ndim != 3:
        raise InputError(
            f"the model gives outputs of shape {tuple(outputs.shape)}, but the loss 'tokens' wants one score per "
            f"token, place and text: choose a model such as causal-lm"
        )
    if loss != "cross-entropy":
        return
    if outputs.ndim < 2:
        raise InputError(
            f"the model gives outputs of shape {tuple(outputs.shape)}, but cross-entropy wants one score per "
            f"class and example: set loss = 'value' or 'mse', or choose another model"
        )
    if outputs.shape[1] < classes:
        raise InputError(
            f"the model gives {outputs.shape[1]} outputs, but labels reach {classes - 1}: "
            f"give its last layer {classes} outputs"
        )


def placed(value: Any, device: torch.device) -> Any:
    """The value on the device; tuples, lists and mappings of tensors are followed."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: placed(part, device) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(placed(part, device) for part in value)
    return value


def _mean(losses: list[Tensor]) -> dict[str, float]:
    return {"loss": float(torch.stack(losses).double().mean())} if losses else {}


@contextmanager
def own_randomness(device: torch.device) -> Iterator[Callable[[int], object]]:
    """Gives a function that seeds torch's default generators; puts their state back at the end.

    Once per call of `train`, and the generators directly: 2 us, where torch.random.fork_rng with
    torch.manual_seed takes 160 us a task.
    """
    streams = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        streams.append(torch.cuda.default_generators[index])
    states = [stream.get_state() for stream in streams]
    try:
        yield lambda seed: [stream.manual_seed(seed) for stream in streams]
    finally:
        for stream, state in zip(streams, states, strict=True):
            stream.set_state(state)
