"""Asynchronous federated learning: every algorithm, one exact simulator, one deployable server."""

from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt, ServerState, Task, Update
from afield.runtimes.simulate import Result, simulate
from afield.scenarios import availability, delays, partition, schedulers
from afield.strategies import (
    ACE,
    ACED,
    ASGD,
    CA2FL,
    FADAS,
    MIFA,
    SGD,
    STRATEGIES,
    TWAFL,
    DelayAdaptiveASGD,
    FedAC,
    FedAsync,
    FedAvg,
    FedBuff,
    FedEcho,
    FedStale,
    FedVARP,
    MRAsyncFL,
    RollingFedAvg,
    Scaffold,
    UFedAvg,
    staleness,
)
from afield.training.local import Local

__version__ = "0.1.0"

__all__ = [
    "ACE",
    "ACED",
    "ASGD",
    "CA2FL",
    "FADAS",
    "MIFA",
    "SGD",
    "STRATEGIES",
    "TWAFL",
    "DelayAdaptiveASGD",
    "FedAC",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedEcho",
    "FedStale",
    "FedVARP",
    "InputError",
    "Local",
    "LocalResult",
    "MRAsyncFL",
    "Receipt",
    "Result",
    "RollingFedAvg",
    "Scaffold",
    "Server",
    "ServerState",
    "Task",
    "UFedAvg",
    "Update",
    "availability",
    "delays",
    "partition",
    "schedulers",
    "simulate",
    "staleness",
]
