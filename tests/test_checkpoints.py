"""Checkpoints are whole or not there."""

from pathlib import Path

import pytest

from wellposed.errors import RunError
from wellposed.runs import Checkpoints, Journal, read_journal, step_of


def written(checkpoints: Checkpoints, step: int) -> Path:
    with checkpoints.writing(step) as folder:
        (folder / "weights").write_bytes(b"w" * 1000)
        (folder / "state").write_bytes(bytes([step % 256]) * 10)
    return checkpoints.all()[0]


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (0, 5, 100_000_000):
        written(checkpoints, step)
    assert [step_of(path) for path in checkpoints.all()] == [100_000_000, 5]
    path, complaints = checkpoints.newest()
    assert (step_of(path), complaints) == (100_000_000, [])


def test_one_that_is_spared_stays_too(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    written(checkpoints, 0)
    written(checkpoints, 5)
    checkpoints.spared = 7
    for step in (10, 15, 20):
        written(checkpoints, step)
    assert [step_of(path) for path in checkpoints.all()] == [20, 15, 5]
    assert checkpoints.before(4) is None
    checkpoints.spared = None
    written(checkpoints, 25)
    assert [step_of(path) for path in checkpoints.all()] == [25, 20]


def test_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    written(checkpoints, 1)
    with pytest.raises(FileNotFoundError), checkpoints.writing(2) as folder:
        (folder / "weights").write_bytes((folder / "nothing").read_bytes())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "no manifest"])
def test_damage_is_noticed(damage: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    written(checkpoints, 1)
    newest = written(checkpoints, 2)
    match damage:
        case "cut":
            (newest / "weights").write_bytes(b"w" * 999)
        case "changed":
            (newest / "weights").write_bytes(b"w" * 999 + b"v")
        case "missing":
            (newest / "weights").unlink()
        case "no manifest":
            (newest / "manifest.json").unlink()
    path, complaints = checkpoints.newest()
    assert step_of(path) == 1
    assert len(complaints) == 1
    assert "step-00000002" in complaints[0]
    (path / "state").unlink()
    with pytest.raises(RunError, match="no whole checkpoint"):
        checkpoints.newest()


def test_strangers_are_left_alone_and_leftovers_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "step-00000044.bak").mkdir()
    (tmp_path / ".step-00000001.abcd.tmp").mkdir()
    newest = written(checkpoints, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000044.bak"]
    for text in ("[]", "{}", '{"state": 3}'):
        (newest / "manifest.json").write_text(text)
        with pytest.raises(RunError, match="no whole checkpoint"):
            checkpoints.newest()


def test_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (written(checkpoints, 3) / "state").write_bytes(b"broken")
    written(checkpoints, 3)
    assert checkpoints.newest()[1] == []


def test_a_journal_goes_on_where_its_checkpoint_stood(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.write("train", 1, loss=2.0)
        length = journal.length()
        journal.write("train", 2, loss=float("1e-3"))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tra')  # killed while writing
    with Journal(tmp_path, length=length, step=1) as journal:
        assert journal.length() == length
        journal.write("test", 2, accuracy=0.5)
    assert read_journal(tmp_path) == [
        {"event": "train", "step": 1, "loss": 2.0},
        {"event": "test", "step": 2, "accuracy": 0.5},
    ]
    assert read_journal(tmp_path, "test") == [{"event": "test", "step": 2, "accuracy": 0.5}]


def test_curves_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    """TensorBoard's files are named by the second and then a count, by which .10 comes before .9."""
    for step in (None, 1):
        with Journal(tmp_path, step=step) as journal:
            journal.write("train", 2, loss=0.5)
    seconds = [path.name.split(".")[3] for path in (tmp_path / "tensorboard").iterdir()]
    assert len(set(seconds)) == 2
