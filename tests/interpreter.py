"""Kernels in Triton's interpreter, which has to be asked for before Triton is imported: in a process of its own."""

import os
import subprocess
import sys

import pytest

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the process that test_in_the_interpreter starts")
compiled = pytest.mark.skipif(INSIDE, reason="the interpreter is on")


def assert_passes_in_the_interpreter(file: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", file, "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    inside = subprocess.run(
        command, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert inside.returncode == 0, inside.stdout[-5000:] + inside.stderr[-2000:]
    assert "passed" in inside.stdout
