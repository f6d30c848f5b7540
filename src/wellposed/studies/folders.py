"""The folder of a study: whose it is, what its runs have left in it, and where their numbers come from."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from wellposed.errors import RunError
from wellposed.runs import is_free, write_json
from wellposed.training.settings import RUN_CONFIG, Settings

STUDY, REPORT = "study.json", "report.html"


def check_out(out: Path) -> None:
    """RunError if there is a file in the place of the folder."""
    if out.exists() and not out.is_dir():
        raise RunError(f"out={out} is a file; expected a folder, or a name that is free")


def claim(out: Path, ours: dict[str, Any], usual: dict[str, Any], extent: Collection[str]) -> None:
    """Make the folder `out` that of a study with the settings `ours`, or see that it already is.

    Args:
        out: the folder.
        ours: the settings that the numbers depend on, as JSON holds them.
        usual: what a setting was before there was one.
        extent: the settings that say how many runs there are; with more or less of them, the others are the same.
    """
    path = out / STUDY
    if not path.exists():
        if not is_free(out):
            raise RunError(f"out={out} is not empty and holds no study; choose another --out")
        write_json(path, ours)
        return
    try:
        theirs = usual | json.loads(path.read_text(encoding="utf-8"))
        different = [name for name in ours if name not in extent and ours[name] != theirs.get(name)]
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}); choose another --out") from error
    if different:
        name = different[0]
        raise RunError(
            f"the study in {out} was made with {name}={theirs.get(name)}, now it is {ours[name]}: "
            "choose another --out, or give the same settings to go on with it"
        )


def read_result(run: Settings, *needed: str) -> dict[str, Any] | None:
    """What a run wrote at its end, with what is `needed` in it; None if it has not come to that."""
    path = run.folder / "result.json"
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if missing := [name for name in needed if name not in result]:
            raise KeyError(missing[0])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}); remove it to go on") from error
    return result


def facts_of(runs: Iterable[Settings], settings: dict[str, Any]) -> dict[str, str]:
    """Where the numbers come from, as the runs noted it; what differs between them is listed."""
    found = {run.folder: run.seed for run in runs}
    noted = [json.loads((folder / RUN_CONFIG).read_text("utf-8")) for folder in found]
    facts = {
        name: "; ".join(dict.fromkeys(run[name] for run in noted))
        for name in ("command", "commit", "hardware", "versions", "date")
    }
    facts["seeds"] = ", ".join(str(seed) for seed in sorted(set(found.values())))
    facts["settings"] = ", ".join(f"{name} {value}" for name, value in settings.items())
    return facts
