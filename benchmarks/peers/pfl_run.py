"""pfl 0.6.0 on the workload; prints one line of JSON.

Runs in the throw-away environment: python pfl_run.py MODEL UPDATES THREADS, or the same under
`python -m torch.distributed.run`, as pfl's guide to fast simulations says: a cohort is then split among processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from typing import Any

import numpy as np
import torch
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional


class Classifier(nn.Module):
    """A network as pfl wants it. No metrics: nothing is evaluated, also not at iteration 0."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {}


def run(model: str, data: FederatedDataset, iterations: int) -> float:
    """Federated averaging (pfl has no asynchronous mode) in cohorts of 50; the seconds it took.

    Cohorts of 50 rather than 10: fewer central steps. Users' tensors are at hand and cut into batches once, which
    pfl keeps and does not shuffle.
    """
    torch.manual_seed(0)
    module = Classifier(workload.MODELS[model]())
    wrapped = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    settings = NNAlgorithmParams(
        central_num_iterations=iterations,
        evaluation_frequency=10**9,
        train_cohort_size=workload.CONCURRENCY,
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(
        local_batch_size=workload.BATCH, local_num_epochs=1, local_learning_rate=workload.RATE
    )
    backend = SimulatedBackend(training_data=data, val_data=data)
    began = time.perf_counter()
    FederatedAveraging().run(settings, backend, wrapped, local, send_metrics_to_platform=False)
    return time.perf_counter() - began


def main() -> None:
    model, updates, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    np.random.seed(0)
    inputs, targets = workload.pool()
    users = {
        client: PyTorchTensorDataset((inputs[part.start : part.stop], targets[part.start : part.stop]))
        for client, part in enumerate(workload.parts())
    }
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", list(users)))
    run(model, data, 1)
    iterations = -(-updates // workload.CONCURRENCY)
    rate = iterations * workload.CONCURRENCY / run(model, data, iterations)
    if os.environ.get("RANK", "0") == "0":
        found = {"pfl": {"fedavg": rate}}
        print(json.dumps({"updates_per_s": found, "versions": {"pfl": metadata.version("pfl")}}), flush=True)
    # The usual end, with or without destroy_process_group, is SIGABRT now and then: a thread of torch's still runs.
    os._exit(0)


if __name__ == "__main__":
    main()
