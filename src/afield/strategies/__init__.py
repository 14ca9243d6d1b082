"""Every algorithm by name."""

from __future__ import annotations

from afield.strategies.ace import ACE, ACED
from afield.strategies.asgd import ASGD, DelayAdaptiveASGD
from afield.strategies.ca2fl import CA2FL
from afield.strategies.fadas import FADAS
from afield.strategies.fedac import FedAC
from afield.strategies.fedasync import FedAsync
from afield.strategies.fedavg import SGD, FedAvg
from afield.strategies.fedbuff import FedBuff
from afield.strategies.fedecho import FedEcho
from afield.strategies.fedstale import FedStale, FedVARP, UFedAvg
from afield.strategies.mifa import MIFA
from afield.strategies.mr_asyncfl import MRAsyncFL
from afield.strategies.scaffold import Scaffold
from afield.strategies.twafl import TWAFL, RollingFedAvg

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
    "MRAsyncFL",
    "RollingFedAvg",
    "Scaffold",
    "UFedAvg",
]

STRATEGIES: dict[str, type] = {
    "fedasync": FedAsync,
    "mr-asyncfl": MRAsyncFL,
    "twafl": TWAFL,
    "rolling-fedavg": RollingFedAvg,
    "asgd": ASGD,
    "delay-adaptive-asgd": DelayAdaptiveASGD,
    "fedbuff": FedBuff,
    "ca2fl": CA2FL,
    "fadas": FADAS,
    "fedac": FedAC,
    "fedecho": FedEcho,
    "ace": ACE,
    "aced": ACED,
    "fedavg": FedAvg,
    "fedstale": FedStale,
    "u-fedavg": UFedAvg,
    "fedvarp": FedVARP,
    "mifa": MIFA,
    "scaffold": Scaffold,
    "sgd": SGD,
}
