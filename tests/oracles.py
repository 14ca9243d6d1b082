"""Every algorithm once more, from the papers, in O(N): direct sums over lists of whole vectors, float64 numpy.

Nothing here is incremental or clever, and nothing is taken from the strategies. Deltas are added (`model - base`),
a fresh update has staleness 0. Where paper and public code differ, the docstring says which form this is; a few
forms that the library does not offer are here as options, to pin down the published numbers of all of them. The
second half drives a strategy, through its server, and its oracle over the same arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Vector = np.ndarray


@dataclass
class Arrival:
    client: int
    version: int  # of its base
    model: Vector
    examples: int = 1
    steps: int = 1
    rate: float = 1.0
    correction: Vector | None = None


class Paper:
    """A server that keeps every version it ever had; hyper-parameters are attributes."""

    def __init__(self, initial: Vector, clients: int, **hyper: Any) -> None:
        self.N = clients
        self.w = initial.copy()
        self.versions = [initial.copy()]
        for name, value in hyper.items():
            assert hasattr(type(self), name) or name in type(self).__annotations__, name
            setattr(self, name, value)
        self.start()

    def start(self) -> None:
        """What there is before the first arrival."""

    def receive(self, a: Arrival) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """The end of a round or tick."""
        raise NotImplementedError

    def correction(self, client: int) -> Vector | None:
        """What is added to each local gradient of a task that starts now."""
        return None

    @property
    def t(self) -> int:
        return len(self.versions) - 1

    def delta(self, a: Arrival) -> Vector:
        return a.model - self.versions[a.version]

    def staleness(self, a: Arrival) -> int:
        return self.t - a.version

    def step(self, w: Vector) -> None:
        self.w = w
        self.versions.append(w.copy())

    def zeros(self) -> list[Vector]:
        return [np.zeros_like(self.w) for _ in range(self.N)]


# -- a step at every arrival --------------------------------------------------------------------------------------

# FedAsync, section 4: the forms of s(t - tau)
STALENESS: dict[str, Callable[..., float]] = {
    "constant": lambda s: 1.0,
    "linear": lambda s, a: 1 / (a * s + 1),
    "polynomial": lambda s, a: (s + 1) ** -a,
    "exponential": lambda s, a: math.exp(-a * s),
    "hinge": lambda s, a, b: 1.0 if s <= b else 1 / (a * (s - b) + 1),
}


class FedAsync(Paper):
    """Xie et al. 2019, algorithm 1: x_t = (1 - alpha_t) x_{t-1} + alpha_t x_new, alpha_t = alpha s(t - tau).

    Figures 2-10: alpha is multiplied by 0.5 at epoch 800 (`drops`). Remark 3: alpha_t ~ 1/sqrt(t), t = 1, 2, ...
    """

    alpha = 0.6
    s: Callable[[int], float] = staticmethod(STALENESS["constant"])
    drops: Mapping[int, float] = {}
    root = False

    def receive(self, a: Arrival) -> None:
        alpha = self.alpha * self.s(self.staleness(a))
        alpha *= math.prod(factor for version, factor in self.drops.items() if self.t >= version)
        if self.root:
            alpha /= math.sqrt(self.t + 1)
        self.step((1 - alpha) * self.w + alpha * a.model)


class MRAsyncFL(Paper):
    """Algorithm 1 with eqs 5-12, literally; c_0 = 1/N, every cached model starts as w_0 (so eq. 4 holds)."""

    gamma = 0.8

    def start(self) -> None:
        self.c = [1 / self.N] * self.N
        self.cache = [self.w.copy() for _ in range(self.N)]

    def receive(self, a: Arrival) -> None:
        g, c, i, new = self.gamma, self.c, a.client, a.model
        replaced = self.w - c[i] * self.cache[i] + c[i] * new  # (5)
        w = g * replaced + (1 - g) * new  # (6)
        seven = g * self.w + (1 - g) * new + g * c[i] * (new - self.cache[i])  # (7)
        others = [g * c[j] * self.cache[j] for j in range(self.N) if j != i]
        eight = sum(others) + (g * c[i] + 1 - g) * new  # (8)
        self.c = [g * c[j] + (1 - g if j == i else 0) for j in range(self.N)]  # (12)
        self.cache[i] = new.copy()
        eleven = sum(self.c[j] * self.cache[j] for j in range(self.N))  # (11)
        for same in (seven, eight, eleven):
            np.testing.assert_allclose(same, w, rtol=0, atol=1e-11)
        assert abs(sum(self.c) - 1) < 1e-12  # (13)
        self.step(w)


class TWAFL(Paper):
    """Chen, Sun, Jin 2019, event by event: theta_j <- w_j; w = sum_k n_k f(t - stamp_k) theta_k / sum_k n_k f(...).

    Unseen clients: theta = w_0, stamp 0; where clients count by examples, those unheard have none to count.
    `normalised = False` is the other published form, sum_k (n_k / n) f_k theta_k.
    """

    f: Callable[[int], float] = staticmethod(lambda age: 1.0)
    by_examples = False
    stamp = "dispatch"
    normalised = True

    def start(self) -> None:
        self.theta = [self.w.copy() for _ in range(self.N)]
        self.stamps = [0] * self.N
        self.n = [0 if self.by_examples else 1] * self.N

    def receive(self, a: Arrival) -> None:
        self.theta[a.client] = a.model.copy()
        self.stamps[a.client] = a.version if self.stamp == "dispatch" else self.t
        self.n[a.client] = a.examples if self.by_examples else 1
        # only ratios matter, so ages may count from the newest stamp: a client that is all there is keeps its weight
        newest = max(stamp for stamp, n in zip(self.stamps, self.n, strict=True) if n)
        now = newest if self.normalised else self.t
        f = [n * self.f(now - stamp) for n, stamp in zip(self.n, self.stamps, strict=True)]
        whole = sum(f) if self.normalised else sum(self.n)
        self.step(sum(f[k] * self.theta[k] for k in range(self.N)) / whole)


class ASGD(Paper):
    """Koloskova et al. 2022, algorithm 1: w <- w + eta delta."""

    lr = 1.0

    def receive(self, a: Arrival) -> None:
        self.step(self.w + self.lr * self.delta(a))


class TickASGD(Paper):
    """The same with delays in server iterations: the mean delta of the tick's arrivals; none: w stays."""

    lr = 1.0

    def start(self) -> None:
        self.due: list[Vector] = []

    def receive(self, a: Arrival) -> None:
        self.due.append(self.delta(a))

    def close(self) -> None:
        self.step(self.w + self.lr * np.mean(self.due, axis=0) if self.due else self.w)
        self.due = []


class DelayAdaptive(Paper):
    """Koloskova et al. 2022, eq. 11, and its three readings above tau_C: drop, 1/tau, tau_C/tau."""

    lr = 1.0
    threshold = 1.0
    rule = "scale"

    def receive(self, a: Arrival) -> None:
        tau, limit = self.staleness(a), self.threshold
        eta = self.lr
        if tau > limit:
            eta *= {"drop": lambda: 0, "inverse": lambda: 1 / tau, "scale": lambda: limit / tau}[self.rule]()
        self.step(self.w + eta * self.delta(a))


class TickDelayAdaptive(DelayAdaptive):
    """The same with delays in server iterations: the mean of the tick's scaled deltas; none: w stays."""

    def start(self) -> None:
        self.due: list[Vector] = []

    def receive(self, a: Arrival) -> None:
        tau, limit = self.staleness(a), self.threshold
        self.due.append((1.0 if tau <= limit else limit / tau) * self.delta(a))

    def close(self) -> None:
        self.step(self.w + self.lr * np.mean(self.due, axis=0) if self.due else self.w)
        self.due = []


class ACE(Paper):
    """ACE, algorithm 1 (direct aggregation): U_j <- g_j; w <- w + lr mean_i U_i.

    Its initialisation asks every client at w_0: nothing moves before all were heard (`wait`), or unheard clients
    count as zeros. With `tick` the step comes once per tick, after its arrivals, whether there were any or not.
    """

    lr = 1.0
    wait = True
    tick = False

    def start(self) -> None:
        self.U = self.zeros()
        self.heard: set[int] = set()

    def receive(self, a: Arrival) -> None:
        self.U[a.client] = self.delta(a)
        self.heard.add(a.client)
        if not self.tick:
            self.close()

    def close(self) -> None:
        if len(self.heard) == self.N or not self.wait:
            self.step(self.w + self.lr * sum(self.U) / self.N)


class ACED(Paper):
    """ACE, algorithm a.1, line by line (t is the version; w^1 after everyone was heard at w^0)."""

    lr = 1.0
    max_delay = 10.0

    def start(self) -> None:
        self.U: dict[int, Vector] = {}
        self.stamps: dict[int, int] = {}
        self.alone = 0  # how often nobody was active

    def receive(self, a: Arrival) -> None:
        self.U[a.client] = self.delta(a)  # lines 3-4
        if self.t == 0:  # line 1
            if len(self.U) == self.N:
                self.stamps = dict.fromkeys(self.U, 1)
                self.step(self.w + self.lr * sum(self.U.values()) / self.N)
            return
        active = self.active()  # lines 5-6
        if active:
            w = self.w + self.lr * sum(self.U[i] for i in active) / len(active)  # line 7
        else:
            w = self.w  # line 8
            self.alone += 1
        self.step(w)
        self.stamps[a.client] = self.t  # line 9: t + 1, which t is by now

    def active(self) -> list[int]:
        return [i for i in range(self.N) if self.t - self.stamps[i] <= self.max_delay]


class TickACED(ACED):
    """The same with delays in server iterations: all that is due at t, then lines 5 to 9 once."""

    def start(self) -> None:
        super().start()
        self.due: set[int] = set()

    def receive(self, a: Arrival) -> None:
        self.U[a.client] = self.delta(a)
        self.due.add(a.client)

    def close(self) -> None:
        if self.t == 0:
            if len(self.U) == self.N:
                self.stamps = dict.fromkeys(self.U, 1)
                self.step(self.w + self.lr * sum(self.U.values()) / self.N)
                self.due = set()
            return
        active = self.active()
        self.alone += not active
        self.step(self.w + self.lr * sum(self.U[i] for i in active) / len(active) if active else self.w)
        self.stamps.update(dict.fromkeys(self.due, self.t))
        self.due = set()


class SGD(Paper):
    """FedAsync's algorithm 3: one worker has all the data; its model is the model."""

    def receive(self, a: Arrival) -> None:
        self.step(a.model)


# -- a step per buffer --------------------------------------------------------------------------------------------


class Buffered(Paper):
    size = 5
    lr = 1.0
    tick = False  # the version rises at every tick; one that ends with `size` updates or more makes a step

    def start(self) -> None:
        self.buffer: list[Arrival] = []
        self.fresh()

    def fresh(self) -> None:
        """What there is before the first arrival."""

    def receive(self, a: Arrival) -> None:
        self.buffer.append(a)
        self.arrived(a)
        if len(self.buffer) == self.size and not self.tick:
            w = self.flush()
            self.buffer = []
            self.step(w)

    def close(self) -> None:
        if len(self.buffer) < self.size:
            self.step(self.w)
            return
        w = self.flush()
        self.buffer = []
        self.step(w)

    def arrived(self, a: Arrival) -> None:
        """What happens at once."""

    def flush(self) -> Vector:
        raise NotImplementedError


class FedBuff(Buffered):
    """Nguyen et al. 2022: w + eta_g sum s(tau) delta / M. `divide`: by "size", "count", "weights", or "none"."""

    s: Callable[[int], float] = staticmethod(STALENESS["constant"])
    divide = "size"

    def flush(self) -> Vector:
        weights = [self.s(self.staleness(a)) for a in self.buffer]
        total = sum(s * self.delta(a) for s, a in zip(weights, self.buffer, strict=True))
        by = {"size": self.size, "count": len(self.buffer), "weights": sum(weights), "none": 1}[self.divide]
        return self.w + self.lr * total / by


class CA2FL(Buffered):
    """Wang et al. 2024 as restated in ACE's algorithm a.3: v = mean h at buffer start + sum(delta - h_i) / |S|.

    The cache is replaced at once (all public code); `frozen` subtracts the cache of the buffer's start instead
    (a.3's time index). `distinct = False` divides by the number of updates.
    """

    frozen = False
    distinct = True

    def fresh(self) -> None:
        self.h = self.zeros()
        self.begin()

    def begin(self) -> None:
        self.mean = sum(self.h) / self.N
        self.before = [h.copy() for h in self.h]
        self.calibrated = np.zeros_like(self.w)

    def arrived(self, a: Arrival) -> None:
        self.calibrated += self.delta(a) - (self.before if self.frozen else self.h)[a.client]
        self.h[a.client] = self.delta(a)

    def flush(self) -> Vector:
        count = len({a.client for a in self.buffer}) if self.distinct else self.size
        v = self.mean + self.calibrated / count
        self.begin()
        return self.w + self.lr * v


class FADAS(Buffered):
    """Wang et al. 2024: AMSGrad on the buffer's mean delta, written out as sums over all buffers so far.

    m_t = (1-b1) sum_k b1^(t-k) d_k, v_t = (1-b2) sum_k b2^(t-k) d_k^2, v^_t = max_k v_k. Bias correction
    (sqrt(1 - b2^t) under v^) and the rate above the threshold (eta / tau_max) are those of their code.
    """

    lr = 1e-3
    beta1, beta2, eps = 0.9, 0.99, 1e-8
    threshold: float = math.inf
    bias_correction = True

    def fresh(self) -> None:
        self.d: list[Vector] = []
        self.v: list[Vector] = []
        self.slowed = 0

    def flush(self) -> Vector:
        self.d.append(sum(self.delta(a) for a in self.buffer) / self.size)
        count = len(self.d)
        m = (1 - self.beta1) * sum(self.beta1 ** (count - 1 - k) * d for k, d in enumerate(self.d))
        self.v.append(
            (1 - self.beta2) * sum(self.beta2 ** (count - 1 - k) * d**2 for k, d in enumerate(self.d))
        )
        largest = np.max(self.v, axis=0)
        stalest = max(self.staleness(a) for a in self.buffer)
        eta = self.lr if stalest <= self.threshold else self.lr / stalest
        self.slowed += eta < self.lr
        if not self.bias_correction:
            return self.w + eta * m / (np.sqrt(largest) + self.eps)
        scale = np.sqrt(largest) / math.sqrt(1 - self.beta2**count) + self.eps
        return self.w + eta / (1 - self.beta1**count) * m / scale


class FedAC(Buffered):
    """Zang et al. 2024 by the public port, with the correction in every local step and the divisor in steps.

    r_i = max(cos(w_t - w_s, delta_i), floor) (0 for a zero vector), a_i = r_i / (sum r + eps), d = sum a_i delta_i;
    m, v; m^ = b1 m + (1-b1) d with the new m; w + eta m^ / (sqrt v + eps). C_i+ = (w_s - w_i) / (K eta_l) - (C - C_i)
    with the C and C_i of the task's start; C <- C + sum a_i (C_i+ - C_i), C_i the client's newest.
    """

    lr = 1e-3
    beta1, beta2, eps, floor = 0.6, 0.9, 1e-8, 0.1

    def fresh(self) -> None:
        self.m = self.v = self.C = np.zeros_like(self.w)
        self.Ci = self.zeros()
        self.r: list[float] = []
        self.dC: list[Vector] = []

    def correction(self, client: int) -> Vector:
        return self.C - self.Ci[client]

    def arrived(self, a: Arrival) -> None:
        drift, delta = self.w - self.versions[a.version], self.delta(a)
        lengths = np.linalg.norm(drift) * np.linalg.norm(delta)
        self.r.append(max(float(drift @ delta / lengths) if lengths else 0.0, self.floor))
        new = -delta / (a.steps * a.rate) - a.correction
        self.dC.append(new - self.Ci[a.client])
        self.Ci[a.client] = new

    def flush(self) -> Vector:
        share = [r / (sum(self.r) + self.eps) for r in self.r]
        d = sum(s * self.delta(a) for s, a in zip(share, self.buffer, strict=True))
        self.m = self.beta1 * self.m + (1 - self.beta1) * d
        self.v = self.beta2 * self.v + (1 - self.beta2) * d * d
        ahead = self.beta1 * self.m + (1 - self.beta1) * d
        self.C = self.C + sum(s * dC for s, dC in zip(share, self.dC, strict=True))
        self.r, self.dC = [], []
        return self.w + self.lr * ahead / (np.sqrt(self.v) + self.eps)


class FedEcho(Buffered):
    """FedEcho, algorithm 1 and eqs 2-4: FedBuff's step, then steps towards the mean of all clients' newest logits.

    The steps of eq. 2 are Adam's on the clipped gradient (fresh in each distillation unless `keep`), as in the
    paper's experiments. `outputs(w, rows)` is the network, `batches(k)` the batches of the k-th distillation.
    """

    outputs: Callable[[torch.Tensor, list[int]], torch.Tensor]
    batches: Callable[[int], list[list[int]]]
    samples, rate, clip, alpha_min, alpha_max, keep = 8, 1e-2, 5.0, 0.2, 0.8, False

    def fresh(self) -> None:
        self.y: dict[int, torch.Tensor] = {}
        self.teachers: list[Vector] = []
        self.adam()

    def adam(self) -> None:
        self.m = self.v = np.zeros_like(self.w)
        self.count = 0

    def arrived(self, a: Arrival) -> None:
        self.y[a.client] = self.outputs(torch.from_numpy(a.model), list(range(self.samples)))  # line 5

    def flush(self) -> Vector:
        w = self.w + self.lr * sum(self.delta(a) for a in self.buffer) / self.size  # lines 10-11
        teacher = sum(self.y.values()) / len(self.y)  # line 14, all batches at once
        self.teachers.append(teacher.numpy())
        if not self.keep:
            self.adam()
        for rows in self.batches(len(self.teachers) - 1):
            g = self.slope(w, teacher[rows], rows)
            g = g * min(1.0, self.clip / (np.linalg.norm(g) + 1e-6))  # torch's guard against a zero norm
            self.count += 1
            self.m = 0.9 * self.m + 0.1 * g
            self.v = 0.999 * self.v + 0.001 * g * g
            m, v = self.m / (1 - 0.9**self.count), self.v / (1 - 0.999**self.count)
            w = w - self.rate * m / (np.sqrt(v) + 1e-8)
        return w

    def slope(self, w: Vector, teacher: torch.Tensor, rows: list[int]) -> Vector:
        at = torch.from_numpy(w.copy()).requires_grad_()
        student = self.outputs(at, rows).softmax(1).log()
        p = teacher.softmax(1)
        entropy = -(p * p.log()).sum(1).mean() / math.log(p.shape[1])  # (4)
        alpha = entropy * self.alpha_max + (1 - entropy) * self.alpha_min
        soft = (p * (p.log() - student)).sum(1).mean()
        hard = -student[range(len(rows)), teacher.argmax(1)].mean()
        (alpha * soft + (1 - alpha) * hard).backward()  # (3)
        return at.grad.numpy()


# -- a step per round ---------------------------------------------------------------------------------------------


class Rounds(Paper):
    lr = 1.0

    def start(self) -> None:
        self.S: list[Arrival] = []
        self.fresh()

    def fresh(self) -> None:
        """What there is before the first round."""

    def receive(self, a: Arrival) -> None:
        self.S.append(a)

    def close(self) -> None:
        w = self.end()
        self.S = []
        self.step(w)

    def end(self) -> Vector:
        raise NotImplementedError


class FedAvg(Rounds):
    """McMahan et al. 2017: w + lr sum n_i delta_i / sum n_i; nobody: w stays."""

    by_examples = True

    def end(self) -> Vector:
        n = [a.examples if self.by_examples else 1 for a in self.S]
        total = sum(k * self.delta(a) for k, a in zip(n, self.S, strict=True))
        return self.w + self.lr * total / sum(n) if self.S else self.w


class FedStale(Rounds):
    """Rodio, Neglia 2024, eq. 8: w + lr/N (beta sum_i h_i + sum_{i in S} (delta_i - beta h_i) / p_i), then h.

    beta 0: U-FedAvg (eq. 5), beta 1: U-FedVARP (eq. 7). Without p, FedAU (Wang, Ji 2024) round by round, in the
    order of the authors' loop: a participant uses the mean of its intervals so far (1 if none), then appends
    g + 1; an absent client's g rises, and at the cutoff g itself is appended.
    """

    beta = 0.5
    p: Sequence[float] | None = None
    cutoff: float = math.inf

    def fresh(self) -> None:
        self.h = self.zeros()
        self.intervals: list[list[int]] = [[] for _ in range(self.N)]
        self.g = [0] * self.N

    def end(self) -> Vector:
        inverse: dict[int, float] = {}
        here = {a.client for a in self.S}
        for i in range(self.N):
            if i in here:
                seen = self.intervals[i]
                inverse[i] = sum(seen) / len(seen) if seen else 1.0
                seen.append(self.g[i] + 1)
                self.g[i] = 0
            else:
                self.g[i] += 1
                if self.g[i] >= self.cutoff:
                    self.intervals[i].append(self.g[i])
                    self.g[i] = 0
        if self.p is not None:
            inverse = {i: 1 / self.p[i] for i in here}
        fresh = sum((self.delta(a) - self.beta * self.h[a.client]) * inverse[a.client] for a in self.S)
        u = self.beta * sum(self.h) / self.N + fresh / self.N
        for a in self.S:
            self.h[a.client] = self.delta(a)
        return self.w + self.lr * u


class FedVARP(Rounds):
    """The original for uniform sampling, as in IBM's code: h mean + sum_S (delta - h) / |S|; nobody: w stays."""

    def fresh(self) -> None:
        self.h = self.zeros()

    def end(self) -> Vector:
        if not self.S:
            return self.w
        u = sum(self.h) / self.N + sum(self.delta(a) - self.h[a.client] for a in self.S) / len(self.S)
        for a in self.S:
            self.h[a.client] = self.delta(a)
        return self.w + self.lr * u


class MIFA(Rounds):
    """Gu et al. 2021 at a constant rate, from zeros: h_i <- delta_i (i in S), then w + lr mean_i h_i, always."""

    def fresh(self) -> None:
        self.h = self.zeros()

    def end(self) -> Vector:
        for a in self.S:
            self.h[a.client] = self.delta(a)
        return self.w + self.lr * sum(self.h) / self.N


class Scaffold(Rounds):
    """Karimireddy et al. 2020, option II.

    Locally w <- w - eta_l (grad - c_i + c); c_i+ = c_i - c + (w_s - w_i) / (K eta_l); w + eta_g sum_S delta_i / |S|;
    c + sum_S (c_i+ - c_i) / N.
    """

    def fresh(self) -> None:
        self.c = np.zeros_like(self.w)
        self.ci = self.zeros()

    def correction(self, client: int) -> Vector:
        return self.c - self.ci[client]

    def end(self) -> Vector:
        if not self.S:
            return self.w
        new = {a.client: self.ci[a.client] - self.c - self.delta(a) / (a.steps * a.rate) for a in self.S}
        self.c = self.c + sum(new[i] - self.ci[i] for i in new) / self.N
        for i in new:
            self.ci[i] = new[i]
        return self.w + self.lr * sum(self.delta(a) for a in self.S) / len(self.S)
