"""`wellposed bench attention` as a user meets it, and that it counts right."""

import pytest
import torch

from wellposed.bench import AttentionBench
from wellposed.bench.attention import _cells, _forward_flops, _fused, _tensors
from wellposed.cli import main

SMALL = ["bench", "attention", "--shapes", "2", "2", "20", "8", "1", "2", "33", "16", "--device", "cpu"]


def rows_of(printed: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return lines[2:]


def test_a_dry_run_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    first = ["softmax, torch math", "degree 3", "degree 2", "ReLU / N", "sigmoid"]
    assert [row[2] for row in rows] == first * 2 + ["softmax, torch math", "degree 3"] * 2
    assert [row[1] for row in rows] == ["no"] * 5 + ["yes"] * 5 + ["no"] * 2 + ["yes"] * 2
    for row in rows:
        assert float(row[3]) > 0
        assert float(row[7]) > 0
        if row[2].startswith("softmax"):
            assert row[4] == row[8] == "1.00"
    assert "* matmul: " in printed
    assert "* commit: " in printed


def test_one_of_causal_and_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--repeats", "1", "--causal", "True"]) == 0
    assert {row[1] for row in rows_of(capsys.readouterr().out)} == {"yes"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--repeats", "0"], "repeats=0"),
        (["--shapes", "1", "1", "0", "8"], "of sizes above 0"),
        (["--tune"], "expected 'cuda'"),
        (["--device", "warp"], "device 'warp'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_peer_is_softmax_attention() -> None:
    device = torch.device("cpu")
    q, k, v, _ = _tensors((1, 2, 6, 4), device)
    for causal in (False, True):
        (way,) = _fused(causal, device).values()
        logits = q @ k.mT / 2
        if causal:
            logits = logits.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
        torch.testing.assert_close(way(q, k, v), logits.softmax(-1) @ v)


def test_rates() -> None:
    """Two products of 1024 x 1024 x 64 for each of 256 heads are 68.7 GFLOP."""
    flops = _forward_flops((16, 16, 1024, 64), causal=False)
    assert flops == pytest.approx(68.7e9, rel=1e-3)
    assert _forward_flops((16, 16, 1024, 64), causal=True) == flops / 2
    assert _cells(0.2e-3, 0.3e-3, flops, 687.2e12) == ("0.200", "1.50", "344", "50%")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    shape = (2, 4, 1024, 64)
    table = AttentionBench(shapes=(shape,), repeats=3).run()
    names = [row[2] for row in table.rows]
    assert any("cuDNN" in name or "flash" in name for name in names)
    assert "degree 3" in names
    tuned = AttentionBench(shapes=(shape,), causal=(False,), tune=True, repeats=2).run()
    assert {row[2] for row in tuned.rows} == {"forward", "queries", "keys"}
