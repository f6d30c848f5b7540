"""Supervised training: it learns, resumes to the same bits, and stops with a reason."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import wellposed as wp
from small_runs import assert_same_run, metrics, small_config, small_flags, weights
from wellposed.cli import main
from wellposed.errors import DivergedError, InvalidArgumentError, RunError
from wellposed.runs import Checkpoints, read_journal, step_of
from wellposed.training.accelerators import _check_compiler
from wellposed.training.classification import Classification

VARIANTS = {
    "adamw": {"optimizer": "adamw"},
    "soap": {"optimizer": "soap", "skips": False, "init": "conditioned"},
    "muon": {"optimizer": "muon"},
    "ema and mixing": {"ema": 0.9, "mixup": 0.8, "cutmix": 1.0, "crop": "pad", "geometry": 0.3, "colour": 0.2},
    "dropout": {"model_args": {"depth": 2, "embed_dim": 16, "num_heads": 2, "proj_drop_rate": 0.1}},
}


@contextmanager
def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Any) -> Iterator[None]:
    """Do `action(task)` just before each time that step `step` is taken."""
    original = Classification.train_step

    def train_step(self: Classification, images: Any, targets: Any, number: int) -> Any:
        if number == step:
            action(self)
        return original(self, images, targets, number)

    with monkeypatch.context() as patch:
        patch.setattr(Classification, "train_step", train_step)
        yield


class CrashError(Exception):
    pass


def crash(task: Any) -> None:
    raise CrashError


def test_it_learns_and_leaves_a_model_behind(tmp_path: Path) -> None:
    model = {"depth": 2, "embed_dim": 48, "num_heads": 4}
    result = wp.train(small_config(tmp_path / "run", optimizer="soap", epochs=6, model_args=model), quiet=True)
    assert result.accuracy > 0.6
    assert result.accuracy == read_journal(result.out, "test")[-1]["accuracy"]
    loaded = wp.load(result.out)
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(loaded(images), result.model(images))
    losses = [event["loss"] for event in read_journal(result.out, "train")]
    assert losses[-1] < 0.7 * losses[0]
    rates = [event["lr"] for event in read_journal(result.out, "train")]
    assert max(rates) == pytest.approx(3e-3)
    assert rates[-1] < 1e-5


def test_a_skipless_model_is_trained_skipless(tmp_path: Path) -> None:
    result = wp.train(small_config(tmp_path / "run", skips=False, init="conditioned", epochs=1, beta=0.7), quiet=True)
    changes = {entry["change"]: entry for entry in wp.recipe(wp.load(result.out))}
    assert changes["cut_skips"] == {"change": "cut_skips", "attention": True, "mlp": True}
    assert changes["condition_"]["beta"] == 0.7


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_crashed_resumes_to_the_same_bits(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = VARIANTS[variant]
    wp.train(small_config(tmp_path / "whole", **settings), quiet=True)
    config = small_config(tmp_path / "broken", **settings, checkpoint_minutes=0.0)  # after every step
    with at_step(monkeypatch, 28, crash), pytest.raises(CrashError):
        wp.train(config, quiet=True)
    wp.train(wp.TrainConfig(out=config.out, resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
def test_a_run_on_a_gpu_resumes_to_the_same_bits(
    compiled: bool, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, with more tokens than one block of the attention kernel holds."""
    settings = {"data": "shapes", "image_size": 64, "patch_size": 4, "device": "cuda", "compile": compiled}
    settings |= {"batch_size": 1000, "epochs": 3, "optimizer": optimizer, "mixup": 0.5, "colour": 0.3, "ema": 0.9}
    wp.train(small_config(tmp_path / "whole", **settings), quiet=True)
    config = small_config(tmp_path / "broken", **settings, checkpoint_minutes=0.0)
    with at_step(monkeypatch, 13, crash), pytest.raises(CrashError):
        wp.train(config, quiet=True)
    wp.train(wp.TrainConfig(out=config.out, resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_resuming_from_the_checkpoint_of_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written after the checkpoint is taken back, in the metrics and in TensorBoard's curves."""
    wp.train(small_config(tmp_path / "whole"), quiet=True)
    with at_step(monkeypatch, 39, crash), pytest.raises(CrashError):
        wp.train(small_config(tmp_path / "broken"), quiet=True)
    assert metrics(tmp_path / "broken")[-1]["step"] == 35
    wp.train(wp.TrainConfig(out=tmp_path / "broken", resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    curves = EventAccumulator(str(tmp_path / "broken" / "tensorboard")).Reload()
    steps = [point.step for point in curves.Scalars("train/loss")]
    assert steps == [event["step"] for event in read_journal(tmp_path / "broken", "train")]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL in a process of its own, as soon as the first epoch's checkpoint is there."""
    wp.train(small_config(tmp_path / "whole", epochs=3), quiet=True)
    flags = small_flags(tmp_path / "killed", "--epochs", "3", "--checkpoint-minutes", "0")
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen([sys.executable, "-m", "wellposed", *flags], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while (
        not Checkpoints(tmp_path / "killed" / "checkpoints").all()
        or step_of(Checkpoints(tmp_path / "killed" / "checkpoints").all()[0]) < 25
    ):
        assert time.monotonic() < deadline
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wp.train(wp.TrainConfig(out=tmp_path / "killed", resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    wp.train(small_config(tmp_path / "whole"), quiet=True)
    with at_step(monkeypatch, 13, lambda task: signal.raise_signal(signal.SIGINT)):
        assert main(small_flags(tmp_path / "stopped")) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped after step 14" in capsys.readouterr().err
    assert step_of(Checkpoints(tmp_path / "stopped" / "checkpoints").all()[0]) == 14
    assert main(["train", "--resume", "--out", str(tmp_path / "stopped")]) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(task: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with at_step(monkeypatch, 13, twice), pytest.raises(KeyboardInterrupt):
        wp.train(small_config(tmp_path / "run"), quiet=True)
    assert [step_of(path) for path in Checkpoints(tmp_path / "run" / "checkpoints").all()] == [0]


def test_a_loss_that_is_not_finite_names_step_and_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(task: Any) -> None:
        with torch.no_grad():
            task.model.blocks[1].mlp.fc1.weight[0, 0] = torch.inf

    with (
        at_step(monkeypatch, 31, spoil),
        pytest.raises(DivergedError, match=r"at step 32 .*a weight of blocks\.1\.mlp\.fc1.*step-00000022"),
    ):
        wp.train(small_config(tmp_path / "run"), quiet=True)
    path, complaints = Checkpoints(tmp_path / "run" / "checkpoints").newest()
    assert (step_of(path), complaints) == (22, [])
    assert all(tensor.isfinite().all() for tensor in weights(path).values())
    wp.train(wp.TrainConfig(out=tmp_path / "run", resume=True), quiet=True)  # without the spoiler it goes on well


def test_a_learning_rate_far_too_high(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", lr=1e15, clip=0.0, warmup_epochs=0.0, weight_decay=0.0, optimizer="muon")
    with pytest.raises(DivergedError, match=r"not finite at step \d+ .*it begins with .*lower --lr"):
        wp.train(config, quiet=True)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wp.train(small_config(tmp_path / "whole"), quiet=True)
    with at_step(monkeypatch, 30, crash), pytest.raises(CrashError):
        wp.train(small_config(tmp_path / "broken"), quiet=True)
    newest, older = Checkpoints(tmp_path / "broken" / "checkpoints").all()
    state = newest / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    wp.train(wp.TrainConfig(out=tmp_path / "broken", resume=True))
    said = capsys.readouterr().err
    assert "step-00000022 is damaged: state.pt" in said
    assert "using step-00000000 instead" in said
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    for path in Checkpoints(tmp_path / "broken" / "checkpoints").all():
        (path / "wellposed.safetensors").unlink()
    with pytest.raises(RunError, match="no whole checkpoint"):
        wp.train(wp.TrainConfig(out=tmp_path / "broken", resume=True), quiet=True)
    assert older.name == "step-00000000"


@pytest.mark.parametrize("largest_file", [10_000, 60_000])
def test_a_full_disk_is_said_and_the_last_checkpoint_kept(
    largest_file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands in for the disk: first the weights do not fit, then the optimizer's state."""
    wp.train(small_config(tmp_path / "whole"), quiet=True)
    assert 10_000 < (tmp_path / "whole" / "wellposed.safetensors").stat().st_size < 60_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(task: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))

    try:
        with at_step(monkeypatch, 30, fill), pytest.raises(RunError, match=r"cannot write to .*Make room.*--resume"):
            wp.train(small_config(tmp_path / "full"), quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in (tmp_path / "full" / "checkpoints").iterdir()) == [
        "step-00000000",
        "step-00000022",
    ]
    wp.train(wp.TrainConfig(out=tmp_path / "full", resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "full")


def test_the_average_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    original = Classification.train_step

    def train_step(self: Classification, *arguments: Any) -> Any:
        reported = original(self, *arguments)
        seen.append(self.model.head.weight.detach().clone())
        return reported

    monkeypatch.setattr(Classification, "train_step", train_step)
    result = wp.train(small_config(tmp_path / "run", ema=0.8, epochs=1), quiet=True)
    average = seen[0]
    for weight in seen[1:]:
        average = 0.8 * average + 0.2 * weight
    torch.testing.assert_close(result.model.get_parameter("head.weight").detach(), average)
    assert not torch.allclose(average, seen[-1])


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_weights_of_some_epochs_stay(ema: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"epochs": 3, "keep_every": 2, "ema": ema}
    wp.train(small_config(tmp_path / "whole", **settings), quiet=True)
    with at_step(monkeypatch, 50, crash), pytest.raises(CrashError):
        wp.train(small_config(tmp_path / "broken", **settings), quiet=True)
    wp.train(wp.TrainConfig(out=tmp_path / "broken", resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    for run in (tmp_path / "whole", tmp_path / "broken"):
        kept = sorted((run / "kept").iterdir())
        assert [step_of(path) for path in kept] == [0, 44, 66]
        assert all(torch.equal(value, weights(run)[name]) for name, value in weights(kept[-1]).items())


def test_seeds(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        wp.train(small_config(tmp_path / name, seed=seed, epochs=1), quiet=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_run(tmp_path / "one", tmp_path / "again")
    assert metrics(tmp_path / "one") != metrics(tmp_path / "two")


def test_a_finished_run_is_resumed_without_further_work(tmp_path: Path) -> None:
    first = wp.train(small_config(tmp_path / "run", epochs=1), quiet=True)
    kept = metrics(first.out)
    again = wp.train(wp.TrainConfig(out=first.out, resume=True), quiet=True)
    assert again.accuracy == first.accuracy
    assert metrics(first.out) == kept


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    # AdamW: where a first gradient's factors are of low rank, SOAP's bases follow the rounding.
    learning = {"model_args": {"depth": 2, "embed_dim": 48, "num_heads": 4}, "lr": 3e-3, "epochs": 4}
    wp.train(small_config(tmp_path / "one", mixup=0.8, crop="pad", **learning), quiet=True)
    settings = small_config(tmp_path / "two", mixup=0.8, crop="pad", **learning).to_dict()
    (tmp_path / "two.json").write_text(json.dumps(settings))
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    more = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "wellposed"]
    command = [sys.executable, "-m", *launch, *more, "train", "--config", str(tmp_path / "two.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 x cpu" in done.stderr
    assert done.stderr.count("the model is in") == 1
    ours, theirs = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [event["step"] for event in ours] == [event["step"] for event in theirs]
    assert ours[-1]["loss"] < 0.98 * ours[0]["loss"]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-5)


def test_killed_before_the_first_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wp.train(small_config(tmp_path / "whole"), quiet=True)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.json").write_text(json.dumps(config))
    assert main(["train", "--resume", "--out", str(tmp_path / "killed")]) == 0
    assert "beginning with the first step" in capsys.readouterr().err
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_killed_in_the_first_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is written twice, neither an observation at the start nor a point of a curve."""
    look = {"observe": lambda model: {"bias": model.head.bias.detach().sum().item()}, "quiet": True}
    wp.train(small_config(tmp_path / "whole"), **look)
    with at_step(monkeypatch, 13, crash), pytest.raises(CrashError):
        wp.train(small_config(tmp_path / "broken"), **look)
    wp.train(wp.TrainConfig(out=tmp_path / "broken", resume=True), **look)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    assert [event["step"] for event in read_journal(tmp_path / "broken", "observe")] == [0, 22, 44]
    curves = EventAccumulator(str(tmp_path / "broken" / "tensorboard")).Reload()
    assert [point.step for point in curves.Scalars("train/loss")] == [5, 10, 15, 20, 22, 25, 30, 35, 40, 44]


def photographs(folder: Path, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for kind in ("cat", "dog"):
            (folder / split / kind).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8, generator=generator)
                Image.fromarray(pixels.numpy()).save(folder / split / kind / f"{i}.png")


def test_a_folder_of_photographs_read_by_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photographs(tmp_path / "photos", 20)
    settings = {"data": f"folder:{tmp_path / 'photos'}", "image_size": 16, "batch_size": 8, "workers": 1}
    wp.train(small_config(tmp_path / "whole", **settings), quiet=True)
    with at_step(monkeypatch, 7, crash), pytest.raises(CrashError):
        wp.train(small_config(tmp_path / "broken", **settings, checkpoint_minutes=0.0), quiet=True)
    moved = (tmp_path / "photos").rename(tmp_path / "moved")
    data = {"data": f"folder:{moved}"}
    wp.train(wp.TrainConfig(out=tmp_path / "broken", resume=True, workers=0, **data), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    for path in (moved / "train" / "cat").glob("1*.png"):
        path.unlink()
    with pytest.raises(RunError, match="images=40, not 29"):
        wp.train(wp.TrainConfig(out=tmp_path / "broken", resume=True, **data), quiet=True)


def test_weights_that_are_not_finite_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Classification.train_step

    def train_step(self: Classification, images: Any, targets: Any, number: int) -> Any:
        reported = original(self, images, targets, number)
        if number == 30:
            with torch.no_grad():
                self.model.get_parameter("blocks.0.attn.proj.weight")[0, 0] = torch.inf
        return reported

    monkeypatch.setattr(Classification, "train_step", train_step)
    config = small_config(tmp_path / "run", checkpoint_minutes=0.0)
    with pytest.raises(DivergedError, match=r"a weight of blocks\.0\.attn\.proj.*step-00000030"):
        wp.train(config, quiet=True)
    assert step_of(Checkpoints(tmp_path / "run" / "checkpoints").newest()[0]) == 30


def test_a_disk_that_is_full_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wp.train(small_config(tmp_path / "whole", epochs=1), quiet=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = Classification.tested_model

    def tested_model(self: Classification) -> Any:
        if (tmp_path / "full" / "checkpoints" / "step-00000022").exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        return original(self)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Classification, "tested_model", tested_model)
            with pytest.raises(RunError, match="cannot write to"):
                wp.train(small_config(tmp_path / "full", epochs=1), quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    wp.train(wp.TrainConfig(out=tmp_path / "full", resume=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "full")


def test_one_process_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints = []

    def intrude(task: Any) -> None:
        with pytest.raises(RunError) as refused:
            wp.train(wp.TrainConfig(out=tmp_path / "run", resume=True), quiet=True)
        complaints.append(str(refused.value))

    with at_step(monkeypatch, 25, intrude):
        wp.train(small_config(tmp_path / "run"), quiet=True)
    assert len(complaints) == 1
    assert "another process is at work" in complaints[0]
    wp.train(small_config(tmp_path / "alone"), quiet=True)
    assert_same_run(tmp_path / "run", tmp_path / "alone")


def test_models_that_are_no_vit(tmp_path: Path) -> None:
    result = wp.train(
        small_config(tmp_path / "run", model="resnet10t", data="digits", model_args={}, epochs=1), quiet=True
    )
    assert result.accuracy > 0.1


def test_no_compiler_is_said_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(InvalidArgumentError, match=r"found no gcc or clang or cl: install one, set CC"):
        _check_compiler(torch.device("cuda"))
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(InvalidArgumentError, match=r"found no g\+\+: install one, set CXX .*--no-compile"):
        wp.train(small_config(tmp_path / "run", compile=True))
    assert not (tmp_path / "run").exists()
    _check_compiler(torch.device("mps"))  # which needs none
    monkeypatch.setenv("CXX", "/some/where/g++")
    _check_compiler(torch.device("cpu"))
