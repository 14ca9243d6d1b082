"""The digits, dealt out unevenly; a small network; what one client does with its part."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

TEST = 360  # examples that no client has


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def load(partition: int | None = None, partitions: int = 1) -> tuple[Tensor, Tensor]:
    """One client's examples, or the test set."""
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    if partition is None:
        return inputs[order[:TEST]], labels[order[:TEST]]
    even, uneven = order[TEST:].chunk(2)  # half of them are dealt out as they come, half by their labels
    uneven = uneven[labels[uneven].argsort(stable=True)]
    mine = torch.cat([even[partition::partitions], uneven.tensor_split(partitions)[partition]])
    return inputs[mine], labels[mine]


def train(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, rate: float) -> float:
    """Plain SGD; gives the last epoch's mean loss."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(labels)).split(32):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
            loss.backward()
            optimiser.step()
            total += loss.item() * len(batch)
    return total / len(labels)


@torch.no_grad()
def measure(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy."""
    scores = model(inputs)
    loss = nn.functional.cross_entropy(scores, labels)
    return float(loss), float((scores.argmax(1) == labels).float().mean())
