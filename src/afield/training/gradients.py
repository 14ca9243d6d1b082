"""True gradients of the clients' objectives: over all of a client's data, nothing drawn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from afield.core.flat import own_copy
from afield.core.protocols import Data
from afield.training.local import Local, loss_function, own_randomness, placed

CHUNK = 500  # examples in one pass, where a pass does not depend on which examples are in it


class FullGradients:
    """Gradients of a client's mean loss over its data, plus those of weight decay; P elements, float64.

    Dropout is off. A model with batch norm is taken in batches of the client's own size, each normalised by itself
    as in training: what the client sees on average, since such a loss has no gradient over all its data.
    """

    def __init__(
        self, module: nn.Module, data: Data, local: Local, loss: str, device: torch.device | str = "cpu"
    ) -> None:
        self.data, self.local = data, local
        self._device = torch.device(device)
        self._loss = loss_function(loss)
        self._module, self._layout, self._vector = own_copy(module, device)
        self._module.train()
        for part in self._module.modules():
            if isinstance(part, _DropoutNd):
                part.eval()
        bound = any(isinstance(part, _NormBase) for part in self._module.modules())
        self._chunk = local.batch if bound else max(CHUNK, local.batch)
        named = self._module.named_parameters()
        self._moving = {name: parameter for name, parameter in named if parameter.requires_grad}

    def at(self, client: int, model: Tensor) -> Tensor:
        """The gradient of this client's objective at a model (a whole vector)."""
        self._vector.copy_(model)
        weights = self._vector[: self._layout.parameters]
        found = weights.double() * self.local.weight_decay
        views = self._layout.views(found)
        size = self.data.sizes[client]
        with own_randomness(self._device), torch.enable_grad():
            for start in range(0, size, self._chunk):
                positions = torch.arange(start, min(start + self._chunk, size))
                inputs, targets = self.data.batch(client, positions)
                outputs = self._module(placed(inputs, self._device))
                loss = self._loss(outputs, placed(targets, self._device))
                parts = torch.autograd.grad(loss, list(self._moving.values()), allow_unused=True)
                for name, part in zip(self._moving, parts, strict=True):
                    if part is not None:
                        views[name].add_(part, alpha=len(positions) / size)
        return found

    def along(self, client: int, base: Tensor, steps: int) -> Tensor:
        """The mean direction of a task of `steps` local SGD steps without sampling noise: -delta / (steps rate).

        For one step that is the gradient at the base.
        """
        local, count = self.local, self._layout.parameters
        model, total, speed = base.clone(), torch.zeros(count, dtype=torch.float64), None
        total = total.to(base.device)
        for _ in range(steps):
            direction = self.at(client, model)
            if local.prox:
                direction.add_((model - base)[:count], alpha=local.prox)
            if local.momentum:
                speed = direction if speed is None else speed.mul_(local.momentum).add_(direction)
                direction = speed
            total.add_(direction)
            model[:count].sub_(direction, alpha=local.rate)
        return total / steps
