"""The wheel a user installs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_wheel_holds_the_package_its_types_and_its_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in {".py", ".typed"}}
    assert "wellposed/py.typed" in expected
    assert expected <= names
    assert not any(name.startswith("tests") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    assert {line.removeprefix("Provides-Extra: ") for line in text.splitlines() if "Provides-Extra" in line} == {
        "peft",
        "diffusion",
        "fields",
        "dev",
    }


def test_wheel_installs_and_runs(wheel: Path, tmp_path: Path) -> None:
    """Into a folder of its own, with the dependencies of this environment, as a clean one would have installed them."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "bin" / "wellposed"), "--version"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert output.startswith("wellposed ")
    where = [sys.executable, "-c", "import wellposed; wellposed.cut_skips; print(wellposed.__file__)"]
    output = subprocess.run(where, env=environment, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert Path(output.strip()).is_relative_to(tmp_path)
