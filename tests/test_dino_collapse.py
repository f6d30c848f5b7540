"""Runs that collapse are seen, spoken of and stopped; runs that learn are left alone."""

from pathlib import Path
from typing import Any

import pytest

import wellposed as wp
from small_dino import small_dino
from wellposed.errors import DivergedError
from wellposed.runs import Checkpoints, read_journal, step_of
from wellposed.training import dino_watch
from wellposed.training.dino_watch import Watch, sign_of_collapse

HEALTHY = {"entropy": 0.8, "information": 1.2, "kl": 0.5, "std": 0.6}
EVEN = {"entropy": 0.9999, "information": 1e-4, "kl": 1e-4, "std": 0.1}
PEAKED = {"entropy": 0.01, "information": 1e-4, "kl": 1e-4, "std": 0.1}
FLAT = {"entropy": 0.5, "information": 0.3, "kl": 0.1, "std": 1e-4}


def test_signs_and_what_to_try() -> None:
    assert sign_of_collapse(HEALTHY) is None
    for values, cause, advice in (
        (EVEN, "outputs are all alike", "lower --teacher-temp or"),
        (PEAKED, "says the same of every image", "lower --center-momentum"),
        (FLAT, "all images have the same features", "lower --lr"),
    ):
        said = sign_of_collapse(values)
        assert said is not None
        assert cause in said
        assert advice in said


@pytest.mark.parametrize("bad", [EVEN, PEAKED, FLAT])
def test_a_sign_that_lasts_is_warned_of_then_ends_the_run(bad: dict[str, float]) -> None:
    watch = Watch(steps=2000)
    for step in range(10, 110, 10):
        assert watch.judge(step, HEALTHY) is None
    remarks = {step: watch.judge(step, bad) for step in range(110, 310, 10)}
    spoken = {step: remark for step, remark in remarks.items() if remark}
    assert watch.since == 100
    assert list(spoken) == [140, 300]  # 2 and 10 % of the run after the last good report
    assert not spoken[140].lost
    assert spoken[300].lost
    assert "for 200 steps" in spoken[300].text


def test_a_slow_teacher_is_given_time() -> None:
    watch = Watch(steps=2000, momentum=0.99)
    said = {step: watch.judge(step, EVEN) for step in range(10, 700, 10)}
    assert next(step for step, remark in said.items() if remark and remark.lost) == 600  # six times 1 / (1 - 0.99)


def test_information_that_grows_is_waited_for() -> None:
    """It doubles every 50 steps, and takes 300 to be called enough, three times the patience; noise does not count."""
    watch = Watch(steps=1000)
    for step in range(10, 300, 10):
        remark = watch.judge(step, EVEN | {"information": 1.5e-4 * 2 ** (step / 50)})
        assert remark is None or not remark.lost
    assert watch.judge(310, EVEN | {"information": 0.02}) is None
    assert watch.since is None
    noisy = Watch(steps=1000)
    said = [noisy.judge(step, EVEN | {"information": 1e-6 * (1 + step % 3)}) for step in range(10, 200, 10)]
    assert any(remark.lost for remark in said if remark)


def test_a_sign_that_passes_is_forgotten() -> None:
    watch = Watch(steps=2000)
    for start in range(0, 1000, 100):
        said = [watch.judge(start + step, EVEN if step < 90 else HEALTHY) for step in range(10, 110, 10)]
        assert sum(remark is not None for remark in said) == 1
        assert not any(remark.lost for remark in said if remark)
        assert watch.since is None


def test_the_watch_goes_on_where_it_was() -> None:
    whole, first, second = (Watch(steps=1500) for _ in range(3))
    expected = [whole.judge(step, PEAKED) for step in range(10, 400, 10)]
    found = [first.judge(step, PEAKED) for step in range(10, 60, 10)]
    second.load_state_dict(first.state_dict())
    found += [second.judge(step, PEAKED) for step in range(60, 400, 10)]
    assert found == expected
    assert any(remark.lost for remark in found if remark)


def test_who_only_wants_to_be_warned_is_not_stopped() -> None:
    watch = Watch(steps=500, stops=False)
    said = [watch.judge(step, EVEN) for step in range(10, 500, 10)]
    assert [remark.lost for remark in said if remark] == [False]


PURPOSES: dict[str, dict[str, Any]] = {
    # Without centering and with a sharp teacher, one output takes all.
    "no centering": {"center_momentum": 1.0, "teacher_temp_start": 0.02, "teacher_temp": 0.02, "lr": 0.02},
    # A teacher less sure than its student makes everything even.
    "no sharpening": {"teacher_temp_start": 0.3, "teacher_temp": 0.3, "lr": 0.02},
    "a huge learning rate": {"lr": 4.0, "clip": 0.0},
}
HASTY: dict[str, Any] = {
    "epochs": 20,
    "local_crops": 0,
    "momentum": 0.8,
    "freeze_last_epochs": 0.0,
    "knn_images": 0,
    "warmup_epochs": 0.5,
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that waits for fewer steps, as short as these runs are."""
    monkeypatch.setattr(dino_watch, "FEWEST_STEPS", (8, 32))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_run_that_collapses_on_purpose_is_caught(
    purpose: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_dino(tmp_path / "run", **(HASTY | PURPOSES[purpose]))
    with pytest.raises(DivergedError, match=r"the run has collapsed: for \d+ steps, .*Try .*checkpoint from before"):
        wp.pretrain(config)
    said = capsys.readouterr().err
    assert said.count("the run may be collapsing") == 1
    remarks = read_journal(tmp_path / "run", "remark")
    assert [remark["lost"] for remark in remarks] == [False, True]
    assert remarks[0]["step"] < remarks[1]["step"] - 20
    steps = [step_of(path) for path in Checkpoints(tmp_path / "run" / "checkpoints").all()]
    reports = read_journal(tmp_path / "run", "train")
    last_good = max((event["step"] for event in reports if sign_of_collapse(event) is None), default=0)
    assert min(steps) <= last_good  # a checkpoint from before it collapsed is still there


@pytest.mark.usefixtures("impatient")
def test_who_knows_better_goes_on(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="--resume --collapse warn goes on with it"):
        wp.pretrain(small_dino(tmp_path / "run", **(HASTY | PURPOSES["no sharpening"])), quiet=True)
    wp.pretrain(wp.DinoConfig(out=tmp_path / "run", resume=True, collapse="warn"), quiet=True)
    assert read_journal(tmp_path / "run", "train")[-1]["step"] == 220


@pytest.mark.usefixtures("impatient")
def test_a_healthy_run_is_left_alone(tmp_path: Path) -> None:
    """For longer than a sign may last: its outputs tell images apart at every report."""
    config = small_dino(tmp_path / "run", **HEALTHY_RUN)
    wp.pretrain(config, quiet=True)
    assert read_journal(tmp_path / "run", "remark") == []
    told = [event["information"] for event in read_journal(tmp_path / "run", "train")]
    assert min(told) > 0.1
    assert len(Checkpoints(tmp_path / "run" / "checkpoints").all()) == 2


HEALTHY_RUN: dict[str, Any] = {
    "epochs": 5,
    "optimizer": "soap",
    "skips": False,
    "init": "conditioned",
    "lr": 1e-3,
    "warmup_epochs": 2.0,
    "teacher_temp": 0.04,
    "knn_images": 0,
    "jitter": 0.5,
    "solarize": 0.0,
    "blur": 0.0,
    "global_scale": (0.5, 1.0),
    "local_scale": (0.2, 0.5),
}
