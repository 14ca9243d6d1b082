"""nn.Module <-> one flat vector: parameters first, then float buffers. Views, no copies."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from afield.core.errors import InputError


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a module lies in its flat vector.

    The vector holds every parameter once (tied ones too, frozen ones as well), then every float buffer
    that the module saves (*statistics*). Integer buffers and non-persistent ones are no part of a model.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    parameters: int  # P: elements of all parameters
    statistics: int  # S: elements of all float buffers, after the parameters
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of a module. Two modules of one architecture have equal layouts."""
        parameters = dict(module.named_parameters())
        for name, parameter in parameters.items():
            if nn.parameter.is_lazy(parameter):
                raise InputError(f"parameter {name} has no shape yet: run one example through first")
        tensors = _tensors(module)
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        if not parameters:
            raise InputError(f"{type(module).__name__} has 0 parameters: give it one to train")
        first, dtype = next(iter(dtypes.items()))
        for name, other in dtypes.items():
            if other != dtype or not other.is_floating_point:
                raise InputError(
                    f"{first} is {dtype} but {name} is {other}: a model is one vector of one float type; "
                    f"convert it, e.g. module.float()"
                )
        shapes = tuple(tensor.shape for tensor in tensors.values())
        offsets, total = [], 0
        for shape in shapes:
            offsets.append(total)
            total += shape.numel()
        inside = sum(parameter.numel() for parameter in parameters.values())
        return cls(tuple(tensors), shapes, tuple(offsets), inside, total - inside, dtype)

    @property
    def size(self) -> int:
        """Length of the whole vector, P + S."""
        return self.parameters + self.statistics

    def flatten(self, module: nn.Module) -> Tensor:
        """A new vector with the module's values."""
        parts = [tensor.detach().reshape(-1) for tensor in self._own(module).values()]
        return torch.cat(parts)

    def load(self, vector: Tensor, module: nn.Module) -> None:
        """Copy a whole vector into the module."""
        tensors = self._own(module)
        self._check(vector, whole=True)
        with torch.no_grad():
            for name, view in self.views(vector).items():
                tensors[name].copy_(view)

    def attach(self, vector: Tensor, module: nn.Module) -> None:
        """Make the module's parameters and float buffers views of `vector`, with the vector's values."""
        tensors = self._own(module)
        self._check(vector, whole=True)
        if vector.dtype != self.dtype:
            raise InputError(f"the vector is {vector.dtype}, the module {self.dtype}: convert one of them")
        views = self.views(vector.detach())
        for name, tensor in tensors.items():
            if tensor.device != vector.device:
                raise InputError(f"{name} is on {tensor.device}, the vector on {vector.device}: move one")
        for name, tensor in tensors.items():
            # .data keeps the Parameter objects, so tied weights stay tied and optimisers stay valid.
            tensor.data = views[name]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views of a vector, as torch.func.functional_call takes them.

        A vector of the P parameters alone (a gradient) gives the parameters alone; a matrix whose rows are
        vectors gives stacked views, one row per model. Gradients flow through parameters, not statistics
        (torch's batch norm refuses statistics that want one).
        """
        self._check(vector)
        rows, length, still = vector.shape[:-1], vector.shape[-1], vector.detach()
        ends = (offset + shape.numel() for offset, shape in zip(self.offsets, self.shapes, strict=True))
        return {
            name: (vector if end <= self.parameters else still)[..., offset:end].view(rows + shape)
            for name, shape, offset, end in zip(self.names, self.shapes, self.offsets, ends, strict=True)
            if end <= length
        }

    def _own(self, module: nn.Module) -> dict[str, Tensor]:
        """The module's tensors, in order, provided that this is its layout."""
        if Layout.of(module) != self:
            raise InputError(
                f"{type(module).__name__} does not have this layout of {len(self.names)} tensors and "
                f"{self.size} elements: make one with Layout.of(module)"
            )
        return _tensors(module)

    def _check(self, vector: Tensor, whole: bool = False) -> None:
        fits = (self.size,) if whole else (self.size, self.parameters)
        if vector.ndim == 0 or vector.shape[-1] not in fits or (whole and vector.ndim != 1):
            raise InputError(
                f"a vector of shape {tuple(vector.shape)} is not a model of {self.size} elements "
                f"({self.parameters} parameters + {self.statistics} statistics)"
            )


def finite(vector: Tensor) -> bool:
    """Whether a vector is free of NaN and Inf: one pass, as both surface in the sum.

    The extremes took 1.6 times as long, isfinite().all() over 100 times. They are asked where the sum overflowed.
    """
    if math.isfinite(float(vector.sum())):
        return True
    low, high = torch.aminmax(vector)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def own_copy(module: nn.Module, device: torch.device | str = "cpu") -> tuple[nn.Module, Layout, Tensor]:
    """A private copy of the module on the device, its layout, and the vector that it is attached to."""
    own = copy.deepcopy(module).to(device)
    for part in own.modules():
        if isinstance(part, nn.RNNBase):
            # On CUDA this call re-packs the weights elsewhere, which would cut them off from the vector.
            part.flatten_parameters = _stay  # type: ignore[method-assign]
    layout = Layout.of(own)
    vector = layout.flatten(own)
    layout.attach(vector, own)
    return own, layout, vector


def _stay() -> None:
    """Stands in for RNNBase.flatten_parameters."""


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, then float buffers that are saved, each once."""
    saved = module.state_dict(keep_vars=True)
    kept = {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in saved and buffer.is_floating_point()
    }
    return {**dict(module.named_parameters()), **kept}
