"""Text experiments end to end: configs, run folders, FedEcho on texts, refusals."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from written import write_gsm8k, write_mathinstruct, write_mrpc, write_news

from afield.cli import main
from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.experiments.codec import merge
from afield.experiments.config import Config, config
from afield.experiments.run import prepare, run
from afield.runtimes.rows import Measurement

pytest.importorskip("transformers")
pytest.importorskip("peft")

REAL = os.environ.get("AFIELD_DATA", "/nowhere")
SMALL = {"layers": 1, "width": 16, "vocabulary": 300}
SPEAKER = {"name": "causal-lm", **SMALL, "length": 80, "answer": 16}
ECHO = {"name": "fedecho", "size": 2, "samples": 6, "batch": 4, "rate": 1e-3, "top": 20}
BASE: dict[str, Any] = {
    "strategy": {"name": "fedbuff", "size": 2},
    "local": {"optimiser": "adamw", "rate": 1e-3, "batch": 4},
    "scenario": {"clients": 3, "partition": {"name": "dirichlet", "alpha": 0.6}},
    "measure": {"versions": 2},
    "stop": {"updates": 6},
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mrpc distilbert": (
        write_mrpc,
        {"model": {"name": "distilbert", **SMALL}, "scenario": {"data": {"name": "mrpc"}}},
    ),
    "mrpc bert lora": (
        write_mrpc,
        {"model": {"name": "bert", **SMALL, "rank": 2}, "scenario": {"data": {"name": "mrpc"}}},
    ),
    "mrpc bert fedecho": (
        write_mrpc,
        {
            "model": {"name": "bert", **SMALL},
            "strategy": ECHO,
            "scenario": {"data": {"name": "mrpc", "unlabelled": "test"}},
        },
    ),
    "newsgroups distilbert": (
        write_news,
        {"model": {"name": "distilbert", **SMALL}, "scenario": {"data": {"name": "newsgroups"}}},
    ),
    "gsm8k causal": (write_gsm8k, {"model": SPEAKER, "scenario": {"data": {"name": "gsm8k"}}}),
    "gsm8k causal lora": (
        write_gsm8k,
        {"model": {**SPEAKER, "rank": 2}, "scenario": {"data": {"name": "gsm8k"}}},
    ),
    "mathinstruct causal fedecho": (
        write_mathinstruct,
        {"model": SPEAKER, "strategy": ECHO, "scenario": {"data": {"name": "mathinstruct", "held_out": 6}}},
    ),
    "mathinstruct causal lora fedecho": (
        write_mathinstruct,
        {
            "model": {**SPEAKER, "rank": 2},
            "strategy": ECHO,
            "scenario": {"data": {"name": "mathinstruct", "held_out": 6}},
        },
    ),
}


def made(case: str, root: Path, **more: Any) -> Config:
    write, changes = CASES[case]
    if not any(root.iterdir()):
        write(root)
    table = merge(merge(BASE, changes), {"scenario": {"data": {"folder": str(root)}}})
    return config(merge(table, more))


@pytest.mark.parametrize("case", CASES)
def test_text_experiments_run_and_repeat(tmp_path: Path, case: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    chosen = made(case, data)
    assert chosen.model.stand_in  # type: ignore[attr-defined]
    prepared = prepare(chosen)
    assert prepared.config.training.method == "vmap"
    rows = list(run(prepared, tmp_path / "run"))
    measured = [row.values for row in rows if isinstance(row, Measurement)]
    assert sum(not isinstance(row, Measurement) for row in rows) == 6
    for values in measured:
        assert math.isfinite(values["loss"]) and 0 <= values["accuracy"] <= 1
        assert ("perplexity" in values) == ("causal" in case)
    change = measured[-1]["loss"] - measured[0]["loss"]
    assert change < 0 if "causal" in case else change != 0  # a few pairs teach a classifier nothing
    # what is written is the server's model, under the module's names
    written = load_file(tmp_path / "run" / "model.safetensors")
    layout = Layout.of(prepared.module)
    assert torch.equal(
        torch.cat([written[name].flatten() for name in layout.names]), prepared.simulator.server.model()
    )
    assert ("lora" in case) == all("lora_" in name or "classifier" in name for name in written)
    # config.toml says it all
    assert config(chosen.table()) == chosen
    again = [asdict(row) | {"wall": 0} for row in prepare(chosen).simulator.rows()]
    assert again == [asdict(row) | {"wall": 0} for row in rows]


@pytest.mark.parametrize("case", ["mrpc bert fedecho", "mathinstruct causal fedecho"])
def test_blocks_and_loop_tell_the_same_story(tmp_path: Path, case: str) -> None:
    found = []
    for method in ("loop", "vmap"):
        rows = prepare(made(case, tmp_path, training={"method": method})).simulator.rows()
        found.append([row.values["loss"] for row in rows if isinstance(row, Measurement)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_distillation_moves_the_model(tmp_path: Path) -> None:
    """FedEcho with rate 0 is FedBuff; with a rate it is not."""
    last = {}
    for name, rule in (
        ("fedbuff", {"name": "fedbuff", "size": 2}),
        ("still", {**ECHO, "rate": 0.0}),
        ("echo", ECHO),
    ):
        chosen = made("mathinstruct causal fedecho", tmp_path)
        table = {**chosen.table(), "strategy": rule}
        simulator = prepare(config(table)).simulator
        list(simulator.rows())
        last[name] = simulator.server.model()
    assert torch.equal(last["fedbuff"], last["still"])
    assert not torch.equal(last["fedbuff"], last["echo"])


def test_answers_are_dealt_by_source(tmp_path: Path) -> None:
    name = "mathinstruct causal fedecho"
    chosen = made(name, tmp_path, scenario={"partition": {"name": "shards", "per_client": 1}})
    parts = prepare(chosen).simulator.trainer.data.parts  # type: ignore[attr-defined]
    sources = chosen.scenario.data.load(chosen.seed).targets
    assert len(sources) == 18 and len(sources.unique()) == 3
    expected, _ = chosen.scenario.partition.split(sources, 3, chosen.seed)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    with pytest.raises(InputError, match="partition LabelSwap changes labels, and these texts have none"):
        prepare(made(name, tmp_path, scenario={"partition": {"name": "label-swap"}}))


def test_a_command_runs_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFIELD_DATA", str(write_mrpc(tmp_path / "data")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.toml").write_text(
        'stop.updates = 4\nlocal = {optimiser = "adamw", batch = 4, rate = 0.001}\n'
        'strategy = "fedasync"\n[model]\nname = "distilbert"\nwidth = 16\nlayers = 1\n'
        '[scenario]\nclients = 3\ndata = "mrpc"\n'
    )
    monkeypatch.setattr("sys.argv", ["afield", "run", "text.toml", "--out", "out"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr()
    assert list(tmp_path.glob("out/**/model.safetensors"))


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ({"name": "mlp"}, "mrpc", "the data is texts, which this model cannot read: choose bert"),
        ({"name": "bert"}, "digits", "Bert reads texts, but examples have shape"),
        ({"name": "bert"}, "gsm8k", "come with answers, which Bert cannot give: choose causal-lm"),
        (SPEAKER, "mrpc", "come with labels, which CausalLm cannot give: choose bert or distilbert"),
    ],
)
def test_what_does_not_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, data: str, message: str
) -> None:
    monkeypatch.setenv("AFIELD_DATA", str(write_gsm8k(write_mrpc(tmp_path))))
    with pytest.raises(InputError, match=message):
        prepare(config(merge(BASE, {"model": model, "scenario": {"data": {"name": data}}})))


@pytest.mark.parametrize(
    ("data", "folder"), [("mrpc", "MRPC"), ("newsgroups", "20news-bydate")], ids=["mrpc", "newsgroups"]
)
def test_the_real_texts(data: str, folder: str) -> None:
    if not (Path(REAL) / folder).is_dir():
        pytest.skip(f"AFIELD_DATA has no {folder}")
    chosen = {"name": data, "limit": 120, "tests": 50, "unlabelled": "test"}
    model = {"name": "distilbert", "layers": 1, "width": 32, "length": 64}
    table = merge(BASE, {"model": model, "scenario": {"data": chosen}, "stop": {"updates": 4}})
    rows = list(prepare(config(table)).simulator.rows())
    assert math.isfinite(rows[-1].values["loss"])  # type: ignore[union-attr]
