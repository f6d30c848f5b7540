"""Pretraining by DINO: it resumes to the same bits, spreads over processes, and leaves a backbone behind."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

import wellposed as wp
from small_dino import small_dino, small_dino_flags
from small_runs import assert_same_run, metrics, weights
from wellposed.cli import main
from wellposed.data import ImageSet, open_data, open_loader
from wellposed.errors import DivergedError
from wellposed.evaluation import open_backbone
from wellposed.runs import Checkpoints, read_journal, step_of
from wellposed.training.dino_models import resolved
from wellposed.training.dino_neighbours import Neighbours
from wellposed.training.dino_task import REST, Dino

VARIANTS = {
    "adamw": {"optimizer": "adamw"},
    "soap, no skips": {"optimizer": "soap", "skips": False, "init": "conditioned"},
    "muon, bf16": {"optimizer": "muon", "local_crops": 0, "precision": "bf16", "pool": "avg"},
}


class CrashError(Exception):
    pass


@contextmanager
def crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Iterator[None]:
    original = Dino.train_step

    def train_step(self: Dino, images: Any, targets: Any, number: int) -> Any:
        if number == step:
            raise CrashError
        return original(self, images, targets, number)

    with monkeypatch.context() as patch:
        patch.setattr(Dino, "train_step", train_step)
        yield


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_crashed_resumes_to_the_same_bits(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an epoch, after steps with and without a frozen last layer, with all that the next step depends on."""
    settings = VARIANTS[variant] | {"freeze_last_epochs": 0.5}
    wp.pretrain(small_dino(tmp_path / "whole", **settings), quiet=True)
    config = small_dino(tmp_path / "broken", **settings, checkpoint_minutes=0.0)  # after every step
    with crash_at(monkeypatch, 14), pytest.raises(CrashError):
        wp.pretrain(config, quiet=True)
    wp.pretrain(wp.DinoConfig(out=config.out, resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    ours, theirs = (load_file(tmp_path / run / "checkpoints" / "step-00000022" / REST) for run in ("whole", "broken"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
def test_a_run_on_a_gpu_resumes_to_the_same_bits(
    compiled: bool, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"data": "shapes", "image_size": 64, "patch_size": 4, "device": "cuda", "compile": compiled}
    settings |= {"batch_size": 1000, "epochs": 2, "optimizer": optimizer, "freeze_last_epochs": 0.5}
    wp.pretrain(small_dino(tmp_path / "whole", **settings), quiet=True)
    config = small_dino(tmp_path / "broken", **settings, checkpoint_minutes=0.0)
    with crash_at(monkeypatch, 13), pytest.raises(CrashError):
        wp.pretrain(config, quiet=True)
    wp.pretrain(wp.DinoConfig(out=config.out, resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> wp.PretrainResult:
    """A run without skips whose weights of every epoch are kept, looked at by the caller too."""
    config = small_dino(
        tmp_path_factory.mktemp("dino") / "run",
        **{"skips": False, "init": "conditioned", "keep_every": 1, "freeze_last_epochs": 1.0},
    )
    return wp.pretrain(config, quiet=True, observe=lambda model: {"blocks": len(model.blocks)})


def test_what_a_run_leaves_behind(run: wp.PretrainResult) -> None:
    changes = {entry["change"]: entry for entry in wp.recipe(wp.load(run.out))}
    assert changes["cut_skips"] == {"change": "cut_skips", "attention": True, "mlp": True}
    assert (changes["condition_"]["alpha"], changes["condition_"]["beta"]) == (1.8, 1.0)
    assert run.model(torch.randn(3, 1, 8, 8)).shape == (3, 16)
    assert run.model(torch.randn(3, 1, 12, 12)).shape == (3, 16)  # any size that is a number of patches
    assert json.loads((run.out / "result.json").read_text())["knn"] == run.knn
    assert run.knn == read_journal(run.out, "test")[-1]["knn"]
    assert [event["blocks"] for event in read_journal(run.out, "observe")] == [2, 2, 2]
    event = read_journal(run.out, "train")[-1]
    assert {"loss", "kl", "entropy", "information", "std", "rank", "grad_norm", "lr"} <= event.keys()
    assert event["kl"] == pytest.approx(event["loss"] - event["entropy"] * torch.tensor(48.0).log().item(), abs=1e-4)


def test_evaluation_reads_the_run_and_its_checkpoints(run: wp.PretrainResult) -> None:
    """The numbers of the run are those of the evaluation of what it saved."""
    kept = [step_of(path) for path in Checkpoints(run.out / "kept", keep=None).all()]
    assert kept == [22, 11, 0]
    sources = [run.out, *(run.out / place / "step-00000022" for place in ("checkpoints", "kept"))]
    images = open_data("digits", "test").images[:8]
    found = [open_backbone(str(source), device="cpu").features(images)[0].summary_BD for source in sources]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    before = open_backbone(str(run.out / "kept" / "step-00000000"), device="cpu").features(images)[0].summary_BD
    assert not torch.allclose(before, found[0])


def test_the_last_layer_waits_and_the_teacher_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step: the student's last layer, and the teacher as the average of the students there have been."""
    students: list[dict[str, torch.Tensor]] = []
    teachers: list[dict[str, torch.Tensor]] = []
    original = Dino.train_step

    def copy(network: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in network.named_parameters()}

    def train_step(self: Dino, *arguments: Any) -> Any:
        if not teachers:
            teachers.append(copy(self.networks()[1]))
            students.append(copy(self.networks()[0]))
        reported = original(self, *arguments)
        students.append(copy(self.networks()[0]))
        teachers.append(copy(self.networks()[1]))
        return reported

    monkeypatch.setattr(Dino, "train_step", train_step)
    wp.pretrain(small_dino(tmp_path / "run", momentum=0.9, drop_path=0.0, knn_images=0), quiet=True)
    last = "head.last_layer.weight_v"
    assert all(torch.equal(student[last], students[0][last]) for student in students[:12])
    assert not torch.equal(students[12][last], students[0][last])
    name = "backbone.blocks.1.mlp.fc1.weight"
    average = students[0][name]
    for step, student in enumerate(students[1:]):
        momentum = 1 - 0.1 * (1 + torch.cos(torch.tensor(torch.pi * step / 21)).item()) / 2
        average = momentum * average + (1 - momentum) * student[name]
        torch.testing.assert_close(teachers[step + 1][name], average, rtol=1e-4, atol=1e-7)
    assert torch.equal(teachers[-1][name], teachers[-2][name])  # the momentum of the last step is 1


def test_weights_decay_along_a_cosine_and_biases_do_not(tmp_path: Path) -> None:
    from wellposed.training.accelerators import make_accelerator

    data = open_data("digits")
    config = resolved(small_dino(tmp_path, weight_decay=0.0, weight_decay_end=0.6, lr=0.002), data)
    task = Dino(config, data, None, make_accelerator("cpu"))
    decays = []
    for step in (0, 21):
        task._schedule(step)
        groups = task._optimizer.param_groups
        decays.append([group["weight_decay"] for group in groups])
        names = {id(param): name for name, param in task.model.named_parameters()}
        bare = [names[id(param)] for param in groups[1]["params"]]
        assert "backbone.pos_embed" in bare
        assert "backbone.blocks.0.norm1.weight" in bare
        assert "head.mlp.0.bias" in bare
        assert not {"head.mlp.0.weight", "head.last_layer.weight_v"} & set(bare)
    assert decays == [[0.0, 0.0], [pytest.approx(0.6), 0.0]]
    assert task.learning_rate(10) == pytest.approx(0.002 * 128 / 256)


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    settings = {"drop_path": 0.0, "lr": 4e-3, "epochs": 3}
    wp.pretrain(small_dino(tmp_path / "one", **settings), quiet=True)
    (tmp_path / "two.json").write_text(json.dumps(small_dino(tmp_path / "two", **settings).to_dict()))
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    more = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "wellposed"]
    command = [sys.executable, "-m", *launch, *more, "pretrain", "--config", str(tmp_path / "two.json")]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 x cpu" in done.stderr
    ours, theirs = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [event["step"] for event in ours] == [event["step"] for event in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for name in {"loss", "entropy", "kl", "information"} & mine.keys():
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
        if "knn" in mine:
            assert mine["knn"] == pytest.approx(other["knn"], abs=0.02)
    for name, weight in weights(tmp_path / "one").items():
        torch.testing.assert_close(weight, weights(tmp_path / "two")[name], atol=1e-3, rtol=1e-2)


def test_neighbours_are_found_in_single_precision() -> None:
    """Features of a young model lie close together: similarities in bfloat16 would all be the same number."""
    torch.manual_seed(0)
    directions, labels = torch.randn(5, 16), torch.arange(5).repeat(40)
    images = (128 + 4 * directions[labels] + torch.randn(200, 16)).clamp(0, 255).to(torch.uint8).view(200, 1, 4, 4)
    train, test = (ImageSet("made up", tuple("abcde"), images[half::2], labels[half::2]) for half in (0, 1))
    like = open_loader(train, 100, mean=torch.zeros(1, 1, 1), std=torch.ones(1, 1, 1))
    neighbours = Neighbours(train, test, 100, 50, Accelerator(cpu=True), like, workers=0)
    network: Any = SimpleNamespace(features=lambda pixels: pixels.flatten(1))
    expected = neighbours.evaluate(network, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert neighbours.evaluate(network, 4) == expected
    assert expected["knn"] > 0.9
    assert expected["std"] < 0.05


def test_images_of_a_class_without_neighbours_count_as_wrong(tmp_path: Path) -> None:
    run = wp.pretrain(small_dino(tmp_path / "run", epochs=1, knn_images=3), quiet=True)
    assert run.knn is not None
    assert 0 <= run.knn < 0.4  # of the three test images, one has a class of the three that vote


def test_a_teacher_that_diverges_in_the_last_step_of_an_epoch(tmp_path: Path) -> None:
    settings = {"epochs": 3, "batch_size": 1400, "lr": 1e30, "warmup_epochs": 0.0, "clip": 0.0}
    with pytest.raises(DivergedError, match=r"it begins with .* is the last good checkpoint, after step 0"):
        wp.pretrain(small_dino(tmp_path / "run", **settings), quiet=True)


def test_who_observes_may_show_the_backbone_images_of_any_size(tmp_path: Path) -> None:
    def look(backbone: nn.Module) -> dict[str, Any]:
        with torch.no_grad():
            return {"norms": [backbone(torch.ones(1, 1, size, size)).norm().item() for size in (8, 12)]}

    run = wp.pretrain(small_dino(tmp_path / "run", epochs=1, knn_images=0), quiet=True, observe=look)
    events = read_journal(run.out, "observe")
    assert [event["step"] for event in events] == [0, 11]
    assert events[-1]["norms"] == pytest.approx(look(run.model)["norms"], rel=1e-4)


def test_the_command_and_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = small_dino_flags(tmp_path / "run", "--no-skips", "--init", "conditioned", "--optimizer", "soap")
    assert main(flags) == 0
    said = capsys.readouterr().err
    assert "vit_tiny_patch16_224 without skips, conditioned init" in said
    assert "1437 images as 2 x 8 px + 2 x 4 px; 48 outputs; soap" in said
    assert said.count("k-NN") == 3
    assert "the teacher's backbone is in" in said
    config = wp.DinoConfig.of_run(tmp_path / "run")
    assert (config.drop_path, config.flip, config.patch_size, config.local_size) == (0.0, False, 2, 4)
    assert main(["pretrain", "--resume", "--out", str(tmp_path / "run")]) == 0
    assert main(["pretrain", "--resume", "--out", str(tmp_path / "run"), "--momentum", "0.5"]) == 2
    assert "momentum=0.5: the run in" in capsys.readouterr().err
