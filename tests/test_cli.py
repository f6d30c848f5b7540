"""The command line as a user meets it."""

import os
import subprocess
import sys

import pytest
import timm
import torch

import wellposed
import wellposed as wp
from wellposed.bench.condition import condition_by_full_svd
from wellposed.cli import main


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"wellposed {wellposed.__version__}"
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    assert "bench" in capsys.readouterr().out
    output = subprocess.run([sys.executable, "-m", "wellposed", "--help"], capture_output=True, text=True, check=True)
    assert "well conditioned" in output.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "wellposed", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_bench_condition_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "condition", "--model", "vit_tiny_patch16_224", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "| wellposed.condition_ |" in printed
    assert "* commit:" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vit_huge_nothing"], "model='vit_huge_nothing'"),
        (["--model", "resnet18"], "list_models('vit_*')"),
        (["--device", "warp"], "device 'warp'"),
        (["--repeats", "0"], "repeats=0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "condition", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_bench_soap_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "soap", "--device", "cpu"]) == 2
    assert "expected 'cuda'" in capsys.readouterr().err


def test_bench_jacobian_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["bench", "jacobian", "--model", "vit_tiny_patch16_224", "--tokens", "12", "--k", "2", "--device", "cpu"]
    assert main([*small, "--repeats", "1"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(("| att", "| blo"))]
    assert [row[1] for row in rows] == ["svds, curvlinops", 'which="largest"', 'which="both"'] * 2
    for start in (0, 3):
        assert len({row[6] for row in rows[start : start + 3]}) == 1  # the largest singular value
    assert main([*small, "--repeats", "0"]) == 2
    assert "repeats=0" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "curvlinops", None)
    assert main(small) == 2
    assert "pip install curvlinops-for-pytorch" in capsys.readouterr().err


def test_unknown_commands_are_status_2() -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["nothing"])
    assert leaving.value.code == 2


def test_the_peer_computes_the_same_initialization() -> None:
    """The baseline of the benchmark does the same job: the spectra are those of the same distribution."""
    ours, theirs = (timm.create_model("vit_tiny_patch16_224", depth=1) for _ in range(2))
    wp.condition_(ours)
    condition_by_full_svd(theirs)
    for name in ("mlp.fc1", "mlp.fc2", "attn.proj"):
        mine, other = (torch.linalg.svdvals(m.blocks[0].get_submodule(name).weight) for m in (ours, theirs))
        torch.testing.assert_close(mine, other)
    for part in range(2):
        mine, other = (torch.linalg.svdvals(m.blocks[0].attn.qkv.weight.chunk(3)[part][:64]) for m in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.0)


def test_bench_diagnose_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--models", "vit_tiny_patch16_224", "--image-size", "32", "--batch-size", "2", "--repeats", "1"]
    assert main(["bench", "diagnose", *small, "--device", "cpu"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| vit_tiny"))
    forward, whole, ratio = (float(cell) for cell in row.split("|")[2:5])
    assert whole > forward > 0
    assert ratio == pytest.approx(whole / forward, rel=0.1)
    assert main(["bench", "diagnose", *small[:-1], "0", "--device", "cpu"]) == 2
