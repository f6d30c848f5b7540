"""Files that are written whole or not at all, devices, and where numbers come from."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from wellposed.errors import InvalidArgumentError
from wellposed.runs import atomic_path, device_named, provenance, write_json


def test_atomic_path_replaces_the_file_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.txt"
    with atomic_path(target) as temporary:
        temporary.write_text("one")
        assert not target.exists()
    with atomic_path(target) as temporary:
        temporary.write_text("two")
        assert target.read_text() == "one"
    assert target.read_text() == "two"
    assert os.listdir(target.parent) == ["file.txt"]


def test_atomic_path_keeps_the_old_file_on_any_error(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")

    def interrupted() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_json(tmp_path / "file.json", {"a": [1, 2]})
    assert json.loads((tmp_path / "file.json").read_text()) == {"a": [1, 2]}
    ours, ordinary = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file.json", "plain"))
    assert ours == ordinary


def test_devices() -> None:
    assert device_named("cpu") == torch.device("cpu")
    for name in ("gpu", "cuda:99", ""):
        with pytest.raises(InvalidArgumentError, match=f"device '{name}'"):
            device_named(name)


def test_provenance_says_how_to_measure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["somewhere/wellposed", "bench", "condition"])
    facts = provenance(torch.device("cpu"), seed=3)
    assert facts["command"] == "wellposed bench condition"
    assert facts["seed"] == "3"
    assert "threads" in facts["hardware"]
    assert torch.__version__ in facts["versions"]
    assert set(facts) == {"command", "commit", "hardware", "versions", "date", "seed"}
