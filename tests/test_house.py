"""The rules of the house: imports point one way, and stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import wellposed

PACKAGE = Path(wellposed.__file__).parent
ROOMS = [
    *("errors", "runs", "reporting", "spectrum", "families"),
    *("skipless", "graying", "attention", "lowrank", "adapters", "compression"),
    *("recipes", "models", "optim", "data", "diagnosis", "evaluation", "training", "fields"),
    *("studies", "bench", "cli"),
]
"""A room may import from those that stand before it, never from those after."""
OUTSIDE = {"__init__", "__main__"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; the house uses absolute ones"
            modules |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    names = {module.split(".")[1] for module in modules if module.startswith("wellposed.")}
    return names & set(ROOMS)


def test_every_file_is_in_a_known_room() -> None:
    assert {room(path) for path in PACKAGE.rglob("*.py")} <= {*ROOMS, *OUTSIDE}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upwards(path: Path) -> None:
    if room(path) in OUTSIDE:
        return
    below = set(ROOMS[ROOMS.index(room(path)) + 1 :])
    assert not imported_rooms(path) & below


def test_the_order_is_checked_at_all(tmp_path: Path) -> None:
    offender = tmp_path / "offender.py"
    offender.write_text(
        "from wellposed import cli\nimport wellposed.bench.table\nfrom wellposed.skipless import skips\n"
    )
    assert imported_rooms(offender) == {"cli", "bench", "skipless"}


def loaded_after(statements: str) -> set[str]:
    code = f"{statements}\nimport sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_imports_stay_light() -> None:
    assert not loaded_after("import wellposed") & {"torch", "timm", "transformers", "peft", "matplotlib", "numpy"}
    using = loaded_after("import wellposed as wp; wp.cut_skips, wp.condition_, wp.save, wp.load, wp.recipe")
    assert "torch" in using
    assert not using & {"timm", "transformers", "peft", "matplotlib", "triton"}
    assert not loaded_after("import wellposed.cli") & {"torch", "timm", "transformers"}


def test_public_names() -> None:
    assert set(wellposed.__all__) <= set(dir(wellposed))
    for name in wellposed.__all__:
        assert getattr(wellposed, name).__doc__
    assert issubclass(wellposed.errors.UnknownFamilyError, wellposed.WellposedError)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        wellposed.nothing  # noqa: B018
