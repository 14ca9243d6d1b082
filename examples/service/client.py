"""A client: its own examples, its own training loop, afield.Client for the rest.

    python client.py https://HOST:8443 --data DIR --token-file FILE --ca ca.pem [--pause SECONDS]

DIR holds inputs.npy and targets.npy. Nothing of it leaves this machine but the trained network.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from net import Net
from torch.nn.functional import cross_entropy

import afield


def train(net: Net, inputs: torch.Tensor, targets: torch.Tensor, epochs: int = 5, rate: float = 0.3) -> int:
    """Plain SGD; gives the number of steps."""
    optimiser = torch.optim.SGD(net.parameters(), lr=rate)
    steps = 0
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs)).split(32):
            optimiser.zero_grad()
            cross_entropy(net(inputs[batch]), targets[batch]).backward()
            optimiser.step()
            steps += 1
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that this machine is slower")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # the network is small
    inputs = torch.from_numpy(np.load(chosen.data / "inputs.npy")).float()
    targets = torch.from_numpy(np.load(chosen.data / "targets.npy")).long()
    net = Net()
    with afield.Client(chosen.url, chosen.token_file.read_text().strip(), ca=chosen.ca) as client:
        for task in client.tasks():  # waits for its turn; goes on after any interruption
            print(f"task {task.number} from version {task.version}", flush=True)
            task.load_into(net)
            steps = train(net, inputs, targets)
            time.sleep(chosen.pause)
            receipt = task.submit(net, examples=len(inputs), steps=steps)
            told = receipt.refused or f"version {receipt.version}, staleness {receipt.staleness}"
            print(f"task {task.number}: {told}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; the task at hand was given back", flush=True)
