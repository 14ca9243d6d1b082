"""The whole idea in one file, without the command line: twenty clients, two algorithms, one clock."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import afield

digits = load_digits()
inputs, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[360:], order[:360]

# Unlike clients: the examples of each class are dealt out by shares from a Dirichlet distribution.
parts, _ = afield.partition.Dirichlet(alpha=0.3).split(labels[train], clients=20, seed=0)
clients = [TensorDataset(inputs[train[part]], labels[train[part]]) for part in parts]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

# FedBuff uses updates as they arrive, in fives. FedAvg waits for the slowest of its ten in every round.
for strategy in (afield.FedBuff(size=5), afield.FedAvg()):
    result = afield.simulate(
        strategy,
        model,  # is left as it is, so both start from the same weights
        clients,
        test=(inputs[test], labels[test]),
        delay=afield.delays.Speeds(median=1.0, spread=0.7, noise=0.2),  # the slow ones are always slow
        rounds=afield.schedulers.Cohort(size=10),
        local=afield.Local(epochs=2, rate=0.2),
        time=20.0,
        measure_time=4.0,
    )
    curve = "  ".join(f"t={row['time']:g} {row['accuracy']:.1%}" for row in result.metrics)
    print(f"{type(strategy).__name__:8} {len(result.receipts):4} updates:  {curve}")
