"""Low-rank MLPs in supervised training, and the study that compares them with and without the sine."""

import html
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wellposed as wp
from small_runs import assert_same_run, small_config
from wellposed.cli import main
from wellposed.errors import InvalidArgumentError
from wellposed.lowrank import LowRankLinear, SineLinear
from wellposed.runs import Checkpoints
from wellposed.studies import StudyConfig
from wellposed.studies.comparison import StudyResult
from wellposed.studies.config import Cell
from wellposed.studies.low_rank import mean_stable_rank
from wellposed.studies.running import Outcome
from wellposed.studies.words import lead
from zoo import vit

SMALL = ["--model-args", "embed_dim", "16", "depth", "2", "num_heads", "2", "--epochs", "1", "--device", "cpu"]
STUDY = ["study", "--ablation", "low-rank", *SMALL, "--optimizers", "adamw", "--ranks", "2"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks") / "study"
    assert main([*STUDY, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("activation", ["sine", "none"])
def test_mlps_alone_are_of_low_rank(activation: Any, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", low_rank=3, low_rank_activation=activation, epochs=1)
    result = wp.train(config, quiet=True)
    layers = {name: each for name, each in result.model.named_modules() if isinstance(each, LowRankLinear)}
    assert set(layers) == {f"blocks.{block}.mlp.{layer}" for block in (0, 1) for layer in ("fc1", "fc2")}
    assert {each.rank for each in layers.values()} == {3}
    assert {isinstance(each, SineLinear) for each in layers.values()} == {activation == "sine"}
    loaded: Any = wp.load(config.folder)
    assert wp.recipe(loaded) == wp.recipe(result.model) != []
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded(images), result.model(images))


def test_a_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = small_config(tmp_path / "whole", low_rank=2, low_rank_omega=40.0)
    wp.train(whole, quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(Checkpoints(tmp_path / "killed" / "checkpoints").all()[0])
    for name in ("result.json", "wellposed.safetensors"):
        (tmp_path / "killed" / name).unlink()
    left = Checkpoints(tmp_path / "killed" / "checkpoints").all()
    assert left
    wp.train(replace(whole, out=tmp_path / "killed", resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    with pytest.raises(InvalidArgumentError, match="low_rank=3: the run in"):
        wp.train(replace(whole, low_rank=3, resume=True))


def test_the_name_of_a_run_tells_its_rank() -> None:
    assert small_config(None, low_rank=4).folder.name.endswith("-rank-4-sine-adamw-0")
    assert small_config(None, low_rank=4, low_rank_omega=50.0).folder.name.endswith("-rank-4-sine-omega-50-adamw-0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low_rank": 0}, "low_rank=0: expected at least 1"),
        ({"low_rank_activation": "none"}, "expected them with --low-rank"),
        ({"low_rank_omega": 3.0}, "expected them with --low-rank"),
        ({"low_rank": 2, "low_rank_omega": -1.0}, "a number above 0"),
        ({"low_rank": 2, "low_rank_activation": "none", "low_rank_omega": 3.0}, "--low-rank-activation sine"),
        ({"low_rank": 2, "skips": False, "init": "conditioned"}, "expected one of the two"),
        ({"low_rank": 17}, "rank=17 for blocks.0.mlp.fc1: expected a whole number from 1 to 16"),
        ({"low_rank": 2, "model": "convmixer_tiny", "model_args": {"dim": 8, "depth": 1}}, "have no MLPs"),
    ],
)
def test_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(wp.WellposedError, match=message):
        wp.train(small_config(tmp_path / "run", **settings))
    assert list(tmp_path.iterdir()) == []


def test_the_stable_rank_is_that_of_the_matrix_as_it_acts() -> None:
    model = wp.factorize(vit(embed_dim=16, num_heads=2), rank=2, targets=["mlp.fc1", "mlp.fc2"])
    expected = []
    for layer in model.modules():
        if isinstance(layer, SineLinear):
            product = layer.U.detach().double().numpy() @ layer.Vt.detach().double().numpy()
            values = np.linalg.svd(np.sin(layer.omega * product) / layer.gain, compute_uv=False)
            expected.append((values**2).sum() / values[0] ** 2)
    assert mean_stable_rank(model) == pytest.approx(np.mean(expected), rel=1e-5)


def test_the_study_trains_full_plain_and_sine(study: Path) -> None:
    runs = {path.name: json.loads((path / "result.json").read_text()) for path in (study / "runs").iterdir()}
    assert set(runs) == {"full-adamw-0", "plain-2-adamw-0", "sine-2-adamw-0"}
    asked = {name: (run["config"]["low_rank"], run["config"]["low_rank_activation"]) for name, run in runs.items()}
    assert asked == {"full-adamw-0": (None, "sine"), "plain-2-adamw-0": (2, "none"), "sine-2-adamw-0": (2, "sine")}
    table = (study / "table.md").read_text(encoding="utf-8")
    page = html.unescape((study / "report.html").read_text(encoding="utf-8"))
    for name, run in runs.items():
        model: Any = wp.load(study / "runs" / name)
        parameters = sum(each.numel() for each in model.parameters())
        numbers = f"{100 * run['accuracy']:.1f} | {run['loss']:.3f} | {mean_stable_rank(model):.1f} |"
        assert numbers in table
        assert f"| {parameters:,} |" in table
        assert f"<td>{parameters:,}</td>" in page
    assert "* settings: ablation low-rank" in table
    assert "One seed each" in page
    assert (study / "parameters.png").stat().st_size > 10_000


def test_other_ranks_may_be_asked_of_it(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "copy"
    shutil.copytree(study, out)
    assert main([*STUDY, "4", "--kinds", "full", "sine-2", "--out", str(out)]) == 0
    assert "2 of 2 runs are done already" in capsys.readouterr().err
    assert "ranks [2, 4]" in (out / "table.md").read_text(encoding="utf-8")
    assert main([*STUDY, "--omega", "9", "--out", str(out)]) == 2
    assert "omega=auto, now it is 9.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "2", "2"], "ranks=(2, 2): expected whole numbers from 1, each once"),
        (["--ranks", "17"], "rank=17 for blocks.0.mlp.fc1"),
        (["--kinds", "sine-8"], "kinds='sine-8': expected some of full, plain-2, sine-2"),
        (["--ablation", "skips"], "ranks=(2,): --ablation skips makes no use of it"),
    ],
)
def test_bad_input_writes_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*STUDY, *flags, "--out", str(tmp_path / "study")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_words_follow_the_numbers() -> None:
    def words(**accuracies: list[float]) -> str:
        reached = {kind.replace("_", "-"): values for kind, values in accuracies.items()}
        outcomes = [Outcome(Cell(k, "adamw", s), v, 1.0) for k, values in reached.items() for s, v in enumerate(values)]
        config = StudyConfig(
            ablation="low-rank", ranks=(1,), kinds=tuple(reached), optimizers=("adamw",), seeds=len(values_of(reached))
        )
        return lead(StudyResult(config, tuple(outcomes), Path("report.html"), {}))

    def values_of(reached: dict[str, list[float]]) -> list[float]:
        return next(iter(reached.values()))

    sure = words(full=[0.8, 0.81], plain_1=[0.5, 0.51], sine_1=[0.6, 0.61])
    assert "full rank it reaches 80.5 %, under AdamW: at rank 1, 50.5 % without the sine and 60.5 with it" in sure
    assert "(+10.0, more than seeds make)" in sure
    assert "(-1.0, which seeds alone could make)" in words(full=[0.8, 0.81], plain_1=[0.5, 0.6], sine_1=[0.5, 0.58])
    assert "One seed each" in words(full=[0.8], plain_1=[0.5], sine_1=[0.6])
    assert words(full=[0.8], sine_1=[0.6]).endswith("full rank: 80.0; sine of rank 1: 60.0.")


def test_sine_layers_are_one_graph_for_the_compiler() -> None:
    model = wp.factorize(vit(embed_dim=16, num_heads=2), rank=2, targets=["mlp.fc1", "mlp.fc2"])
    images = torch.randn(2, 3, 32, 32)
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(images).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.slow
def test_a_compiled_run_learns_what_an_eager_one_does(tmp_path: Path) -> None:
    losses = []
    for compiled in (False, True):
        config = small_config(tmp_path / str(compiled), low_rank=2, epochs=1, compile=compiled)
        losses.append(wp.train(config, quiet=True).loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
