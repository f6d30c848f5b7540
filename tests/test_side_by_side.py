"""Runs in processes of their own: what one that is lost does to the others."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from wellposed.errors import DataError, DivergedError, RunError
from wellposed.studies.side_by_side import run_side_by_side


@dataclass(frozen=True)
class Run:
    folder: Path
    epochs: int = 1


@dataclass(frozen=True)
class Done:
    seconds: float = 0.0


def work(run: Run, key: str) -> Done:
    """Ends as the name of the run says."""
    if key == "diverges":
        raise DivergedError("the loss is not finite")
    if key == "dies":
        os._exit(9)
    if key == "stumbles":
        raise ValueError("over its own feet")
    if key == "misread":
        raise DataError("there is no such file")
    run.folder.mkdir(parents=True)
    return Done()


def waits(run: Run, _: str) -> Done:
    """Counts the wishes to stop that reach it."""
    wishes = []
    signal.signal(signal.SIGTERM, lambda *_: wishes.append(1))
    run.folder.mkdir(parents=True)
    while not wishes:
        time.sleep(0.02)
    time.sleep(3)  # a checkpoint
    (run.folder / "wishes").write_text(str(len(wishes)))
    return Done()


def runs(folder: Path, *names: str) -> dict[str, Run]:
    return {name: Run(folder / "runs" / name) for name in names}


@pytest.mark.parametrize(("lost", "kind"), [("diverges", DivergedError), ("dies", RunError), ("stumbles", RunError)])
def test_the_others_go_on_without_one_that_is_lost(lost: str, kind: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(kind, match=r"not finite|status 9|ValueError: over its own feet; .*logs/stumbles.log"):
        run_side_by_side(runs(tmp_path, lost, "first", "second"), work, lambda *_: None, jobs=1, preload=())
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "second"]
    assert ("over its own feet" in (tmp_path / "logs" / f"{lost}.log").read_text()) == (lost == "stumbles")


def test_a_mistake_ends_them_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        run_side_by_side(runs(tmp_path, "misread", "first"), work, lambda *_: None, jobs=1, preload=())
    assert not (tmp_path / "runs").exists()


def test_a_signal_to_all_processes_reaches_a_run_once(tmp_path: Path) -> None:
    """As `timeout` sends it: to the group, of which the runs are no part."""
    code = "import sys, pathlib, test_side_by_side as t\nasked = t.runs(pathlib.Path(sys.argv[1]), 'one', 'two')\n"
    code += "t.run_side_by_side(asked, t.waits, lambda *_: None, jobs=2, preload=())"
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, env=paths, start_new_session=True, stderr=subprocess.DEVNULL)
    while len(list(tmp_path.glob("runs/*"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)
    assert [path.read_text() for path in tmp_path.glob("runs/*/wishes")] == ["1", "1"]
