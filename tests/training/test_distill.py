"""FedEcho's distillation: the loss by hand, the steps against a plain loop."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.keys import generator
from afield.training.distill import Distil, echo_loss


@dataclass(frozen=True)
class Settings:
    passes: int = 2
    batch: int = 4
    rate: float = 0.01
    clip: float = 5.0
    alpha_min: float = 0.2
    alpha_max: float = 0.8


WORDS = torch.Generator().manual_seed(1)
UNLABELLED = torch.randn(12, 3, generator=WORDS)
TEACHER = 3 * torch.randn(10, 4, generator=WORDS)  # of the first ten: batches of 4, 4, 2


def network() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 4))
    module(torch.randn(20, 3))  # statistics of some data
    return module


def parts(module: nn.Module) -> tuple[Tensor, Tensor]:
    layout = Layout.of(module)
    vector = layout.flatten(module)
    return vector[: layout.parameters].clone(), vector[layout.parameters :].clone()


def test_loss_by_hand() -> None:
    # Two classes. Row 1: teacher (1/2, 1/2), entropy log 2. Row 2: teacher (3/4, 1/4).
    teacher = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], dtype=torch.float64)
    # The student says (1/4, 3/4) and (1/2, 1/2).
    student = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    entropy = (math.log(2) + (0.75 * math.log(4 / 3) + 0.25 * math.log(4))) / 2 / math.log(2)
    alpha = 0.8 * entropy + 0.2 * (1 - entropy)
    soft = (
        (0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))
        + (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))
    ) / 2
    hard = (math.log(4) + math.log(2)) / 2  # both teachers' argmax is class 0
    assert float(echo_loss(student, teacher, 0.2, 0.8)) == pytest.approx(alpha * soft + (1 - alpha) * hard)
    assert float(echo_loss(student, teacher, 1, 1)) == pytest.approx(soft)
    assert float(echo_loss(student, teacher, 0, 0)) == pytest.approx(hard)


def test_alpha_runs_from_min_to_max_with_the_teachers_entropy() -> None:
    student = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
    log = student.log_softmax(1)[0]
    sure = torch.tensor([[1000.0, 0.0, 0.0]], dtype=torch.float64)  # entropy 0, no nan from 0 log 0
    # Both parts are then -log of the student's class 0, whatever alpha.
    assert float(echo_loss(student, sure, 0.2, 0.8)) == pytest.approx(-float(log[0]))
    unsure = torch.zeros(1, 3, dtype=torch.float64)  # entropy log 3: alpha is alpha_max
    soft = -math.log(3) - float(log.mean())
    assert float(echo_loss(student, unsure, 0.0, 1.0)) == pytest.approx(soft)


def test_a_student_that_agrees_feels_the_hard_label_only() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(echo_loss(logits, logits, 1.0, 1.0), logits)
    torch.testing.assert_close(slope, torch.zeros_like(slope))


def test_logits_are_those_of_the_model_given() -> None:
    module, other = network(), network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3)
        other[1].running_mean.add_(0.5)
    distil = Distil(module, UNLABELLED)
    for one in (module, other):
        params, statistics = parts(one)
        one.eval()
        torch.testing.assert_close(distil.logits(params, statistics, 10), one(UNLABELLED[:10]))
    assert not distil.logits(params, statistics, 10).requires_grad


def plain(module: nn.Module, settings: Settings, key: int, adam: Any = None) -> tuple[nn.Module, Any]:
    """The paper's loop, with an Adam of many tensors."""
    if adam is None:
        module = copy.deepcopy(module).eval()
        adam = torch.optim.Adam(module.parameters(), lr=settings.rate)
    for turn in range(settings.passes):
        order = torch.randperm(10, generator=generator(key, turn))
        for start in range(0, 10, settings.batch):
            rows = order[start : start + settings.batch]
            student, target = module(UNLABELLED[rows]).log_softmax(1), TEACHER[rows].softmax(1)
            entropy = float(-(target * target.log()).sum(1).mean()) / math.log(4)
            alpha = settings.alpha_min + entropy * (settings.alpha_max - settings.alpha_min)
            soft = (target * (target.log() - student)).sum(1).mean()
            hard = functional.nll_loss(student, TEACHER[rows].argmax(1))
            adam.zero_grad()
            (alpha * soft + (1 - alpha) * hard).backward()
            norm = torch.cat([p.grad.reshape(-1) for p in module.parameters()]).norm()
            for parameter in module.parameters():
                parameter.grad.mul_(min(1.0, settings.clip / (float(norm) + 1e-6)))
            adam.step()
    return module, adam


@pytest.mark.parametrize("settings", [Settings(), Settings(clip=0.05), Settings(passes=1, batch=10)])
def test_steps_are_those_of_the_plain_loop(settings: Settings) -> None:
    module = network()
    params, statistics = parts(module)
    before = statistics.clone()
    Distil(module, UNLABELLED).distil(params, statistics, TEACHER, 7, settings, None)
    expected, _ = plain(module, settings, 7)
    # Adam divides by the root of v: where a gradient is nearly zero, rounding shows; 1e-4 of steps of 1e-2.
    torch.testing.assert_close(params, parts(expected)[0], rtol=0, atol=1e-4)
    assert float((params - parts(module)[0]).abs().max()) > 5e-3
    assert torch.equal(statistics, before)


def test_memory_carries_adam_over() -> None:
    module, settings = network(), Settings()
    distil = Distil(module, UNLABELLED)
    params, statistics = parts(module)
    memory: dict[str, Any] = {}
    distil.distil(params, statistics, TEACHER, 7, settings, memory)
    assert memory["steps"] == 6  # 2 passes of ceil(10 / 4) batches
    assert type(memory["steps"]) is int
    assert memory["m"].shape == memory["v"].shape == params.shape
    saved = (params.clone(), {key: copy.deepcopy(value) for key, value in memory.items()})
    distil.distil(params, statistics, TEACHER, 8, settings, memory)
    assert memory["steps"] == 12

    expected, adam = plain(module, settings, 7)
    plain(expected, settings, 8, adam)
    torch.testing.assert_close(params, parts(expected)[0], rtol=0, atol=2e-4)

    forgetful = saved[0].clone()
    distil.distil(forgetful, statistics, TEACHER, 8, settings, None)
    assert not torch.allclose(forgetful, params, atol=2e-3)

    # A snapshot of the memory gives the same bits, in a new object too.
    again, held = saved
    Distil(module, UNLABELLED).distil(again, statistics, TEACHER, 8, settings, held)
    assert torch.equal(again, params)
    assert all(torch.equal(held[key], memory[key]) for key in ("m", "v"))


def test_bits_depend_on_the_key_alone_and_rate_0_moves_nothing() -> None:
    module = network()
    distil = Distil(module, UNLABELLED)
    found = []
    for key in (1, 1, 2):
        params, statistics = parts(module)
        torch.manual_seed(len(found))
        distil.distil(params, statistics, TEACHER, key, Settings(), None)
        found.append(params)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    params, statistics = parts(module)
    distil.distil(params, statistics, TEACHER, 1, Settings(rate=0.0), None)
    assert torch.equal(params, parts(module)[0])


def test_the_module_and_the_global_stream_are_left_alone() -> None:
    module = network()
    before = copy.deepcopy(module.state_dict())
    params, statistics = parts(module)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    distil = Distil(module, UNLABELLED)
    distil.distil(params, statistics, TEACHER, 1, Settings(), None)
    distil.logits(params, statistics, 5)
    assert torch.equal(torch.rand(3), expected)
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_frozen_parameters_stay() -> None:
    module = network()
    module[0].weight.requires_grad_(False)
    params, statistics = parts(module)
    Distil(module, UNLABELLED).distil(params, statistics, TEACHER, 1, Settings(), None)
    assert torch.equal(params[:18], parts(module)[0][:18])
    assert not torch.equal(params[18:], parts(module)[0][18:])


def test_models_without_statistics() -> None:
    module = nn.Linear(3, 4)
    params, _ = parts(module)
    distil = Distil(module, UNLABELLED)
    distil.distil(params, None, TEACHER, 1, Settings(), None)
    assert distil.logits(params, None, 12).shape == (12, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_distils_like_the_cpu_for_a_server_on_the_cpu() -> None:
    module, found = network(), []
    for device in ("cpu", "cuda"):
        params, statistics = parts(module)
        distil, memory = Distil(module, UNLABELLED, device), {}
        distil.distil(params, statistics, TEACHER, 1, Settings(), memory)
        distil.distil(params, statistics, TEACHER, 2, Settings(), memory)
        found.append((params, memory["m"], memory["v"], distil.logits(params, statistics, 12)))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_refusals() -> None:
    module = network()
    params, statistics = parts(module)
    distil = Distil(module, UNLABELLED)
    assert len(distil.logits(params, statistics, 13)) == 12  # all there are
    with pytest.raises(InputError, match="64 parameters and 0 statistics are not a model of 64 and 12"):
        distil.logits(params, None, 3)
    with pytest.raises(InputError, match="5 parameters and 12 statistics"):
        distil.distil(params[:5], statistics, TEACHER, 1, Settings(), None)


# Language models: a number per token, place and text.


class Speaker(nn.Module):
    """Scores of 7 tokens from a token and the one before; token 0 fills up."""

    pad = 0

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids)
        return self.out(found + functional.pad(found, (0, 0, 1, 0))[:, :-1])


TEXTS = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 6, 1, 2], [3, 0, 0, 0], [2, 4, 6, 5]])


def speaking() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    module = Speaker()
    return module, Layout.of(module).flatten(module)


def test_what_is_kept_of_a_language_model_is_its_distribution() -> None:
    module, params = speaking()
    distil = Distil(module, TEXTS, top=3)
    other = params + 0.5 * torch.randn(len(params), generator=torch.Generator().manual_seed(0))
    kept = distil.logits(other, None, 4)
    assert kept.shape == (4, 4, 4)
    first = module(TEXTS[:4]).detach()  # of the initial model: it says which tokens are kept
    Layout.of(module).load(other, module)
    shares = module(TEXTS[:4]).detach().softmax(-1)
    for row, place in ((TEXTS[:4] != 0).nonzero()).tolist():
        best = first[row, place].topk(3).indices
        mine = kept[row, place].softmax(0)
        torch.testing.assert_close(mine[:3], shares[row, place][best])
        torch.testing.assert_close(mine[3], 1 - mine[:3].sum())
    assert not kept[TEXTS[:4] == 0].any()


def test_with_the_whole_vocabulary_it_is_the_papers_rule() -> None:
    module, params = speaking()
    settings, there = Settings(), TEXTS != 0
    teacher = torch.randn(5, 4, 7, generator=torch.Generator().manual_seed(1)) * 2
    distil = Distil(module, TEXTS, top=50)
    order = module(TEXTS).detach().topk(7).indices  # how a whole vocabulary is kept
    mine = params.clone()
    distil.distil(mine, None, teacher.gather(-1, order) * there[..., None], 5, settings, None)
    module.eval()
    adam = torch.optim.Adam(module.parameters(), lr=settings.rate)
    for turn in range(settings.passes):
        for rows in torch.split(torch.randperm(5, generator=generator(5, turn)), settings.batch):
            inside = there[rows]
            loss = echo_loss(module(TEXTS[rows])[inside], teacher[rows][inside], 0.2, 0.8)
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), settings.clip)
            adam.step()
    assert not torch.allclose(mine, params)
    torch.testing.assert_close(mine, Layout.of(module).flatten(module), rtol=1e-4, atol=1e-5)


def test_tokens_outside_count_as_equally_likely_and_as_nobodys_label() -> None:
    """The loss over 2 tokens and a rest of 3 is that over 5, where both spread the rest evenly."""
    spread = math.log(3)
    teacher = torch.tensor([[1.0, 0.5, 2.0], [0.0, 2.0, -1.0]], dtype=torch.float64)
    student = torch.tensor([[0.3, -0.2, 0.1], [0.4, 0.0, 0.9]], dtype=torch.float64)
    whole = [
        torch.cat([part[:, :2], (part[:, 2:] - spread).expand(2, 3)], dim=1) for part in (student, teacher)
    ]
    expected = echo_loss(*whole, 0.2, 0.8)
    torch.testing.assert_close(echo_loss(student, teacher, 0.2, 0.8, outside=3), expected)
    # a rest that is likelier than any token is no label: the hard part goes by the tokens
    hard = -student.log_softmax(1)[[0, 1], [0, 1]].mean()
    torch.testing.assert_close(echo_loss(student, teacher, 0.0, 0.0, outside=3), hard)


@pytest.mark.gpu
def test_one_launch_on_a_gpu_is_what_a_cpu_computes() -> None:
    params, statistics = parts(network())
    memory: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {}}
    found = {}
    for device in memory:
        distil = Distil(network(), UNLABELLED, device)
        moved, held = params.clone().to(device), statistics.to(device)
        for key in (1, 2):  # the second goes on with Adam's moments; another teacher is no new recording
            distil.distil(moved, held, (TEACHER + key).to(device), key, Settings(), memory[device])
        distil.distil(moved, held, TEACHER.to(device), 3, Settings(), None)
        found[device] = moved.cpu()
    assert memory["cpu"]["steps"] == memory["cuda"]["steps"] == 12
    assert not torch.equal(found["cpu"], params)
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=1e-5, rtol=1e-4)


def test_a_cpu_ignores_what_is_for_a_gpu() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    params, images = parts(module)[0], torch.randn(12, 3, 6, 6)
    plain, told = (
        Distil(module, images, "cpu", **options)
        for options in ({}, {"precision": "bfloat16", "channels_last": True})
    )
    assert torch.equal(told.logits(params, None, 12), plain.logits(params, None, 12))


@pytest.mark.gpu
def test_halves_on_a_gpu_come_close() -> None:
    torch.manual_seed(4)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )
    images = torch.randn(12, 3, 6, 6)
    params, statistics = parts(module)
    found = {}
    for device, options in (("cpu", {}), ("cuda", {"precision": "bfloat16", "channels_last": True})):
        distil = Distil(module, images, device, **options)
        moved, held = params.clone().to(device), statistics.to(device)
        distil.distil(moved, held, TEACHER.to(device), 1, Settings(), None)
        looks = [distil.logits(vector.to(device), held, 7).cpu() for vector in (params, moved, params)]
        assert torch.equal(looks[0], looks[2])  # the second look did not write to the first
        found[device] = (moved.cpu() - params, *looks)
    for one, two in zip(found["cuda"], found["cpu"], strict=True):
        assert float((one - two).norm() / two.norm()) < 0.05
