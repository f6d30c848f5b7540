"""Where a measured number came from: command, commit, hardware, versions, date."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def provenance(device: "torch.device", *, seed: int) -> dict[str, str]:
    """What a reader needs to repeat a measurement on `device`."""
    import torch

    return {
        "command": shlex.join(["wellposed", *sys.argv[1:]]),
        "commit": _commit(),
        "hardware": _hardware(device),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
        "seed": str(seed),
    }


def _commit() -> str:
    """The commit of the source tree this package runs from, `+` when it has uncommitted changes.

    WELLPOSED_COMMIT says it where the source was copied without its history.
    """
    if "WELLPOSED_COMMIT" in os.environ:
        return os.environ["WELLPOSED_COMMIT"]
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", ":/src")
        return git("rev-parse", "--short", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _hardware(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
