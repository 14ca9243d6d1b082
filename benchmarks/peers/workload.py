"""The workload that every system is given: data, models, numbers. Needs torch alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLIENTS, EXAMPLES, CLASSES = 100, 60, 10  # examples: of each client
BATCH, RATE = 20, 0.05  # one local epoch, plain SGD
CONCURRENCY, BUFFER = 50, 10
# Updates before the clock starts: more than fill the 50 places, so that memory for them has been touched; a virtual
# machine may take 10 us for a page that its host has yet to find.
WARM = 200


def pool() -> tuple[Tensor, Tensor]:
    """All examples, 1x28x28 in 10 classes; client k has the k-th 60 of them."""
    stream = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (CLIENTS * EXAMPLES,), generator=stream)
    centres = torch.randn(CLASSES, 1, 28, 28, generator=stream)
    return centres[targets] + torch.randn(len(targets), 1, 28, 28, generator=stream), targets


def parts() -> list[range]:
    """Which of the pool's examples each client has."""
    return [range(client * EXAMPLES, (client + 1) * EXAMPLES) for client in range(CLIENTS)]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, CLASSES)),
    )


MODELS = {"mlp": mlp, "cnn": cnn}
