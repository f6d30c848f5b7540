"""The comparison of adapters, at sizes a CPU can do."""

import pytest
import torch

from wellposed.bench.adapters import _WAYS, AdaptersBench
from wellposed.cli import main
from wellposed.errors import InvalidArgumentError

pytest.importorskip("peft", reason="PEFT is not installed")


def test_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench adapters --device cpu --layers 32 48 48 16 --ranks 2 4 --tokens 8 --windows 1"
    assert main(command.split()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert header[:5] == ["layer", "tokens", "r", "one product", "floor"]
    assert header[5:-3] == list(_WAYS)
    assert [row[:3] for row in rows] == [
        ["32 -> 48", "8", "2"],
        ["32 -> 48", "8", "4"],
        ["48 -> 16", "8", "2"],
        ["48 -> 16", "8", "4"],
    ]
    for row in rows:
        assert all(float(cell) > 0 for cell in row[3:-1])
        lora, *ours = (
            float(row[header.index(name)]) for name in ("PEFT LoRA", "sine_linear", "SineLoraConfig in PEFT")
        )
        assert [float(cell) for cell in row[-3:-1]] == pytest.approx([each / lora for each in ours], rel=0.05, abs=0.01)
        assert row[-1] == ""  # nobody counts memory on a CPU


def test_every_way_of_the_sine_computes_the_same() -> None:
    weight0 = torch.randn(48, 32).bfloat16() / 6
    x = torch.randn(5, 32).bfloat16()
    outputs = {}
    for name, way in _WAYS.items():
        torch.manual_seed(0)
        forward, within = way(weight0, 4)
        with within:
            y = forward(x)
        assert y.shape == (5, 48), name
        assert y.dtype == torch.bfloat16, name
        assert y.requires_grad, name
        outputs[name] = y.detach().float()
    ours = outputs["sine_linear"]
    plain = (x @ weight0.T).float()
    assert (ours - plain).abs().max() > 0.1
    for name in ("sine, torch's autograd", "sine_linear, no kernels"):
        torch.testing.assert_close(outputs[name], ours, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "change",
    [{"ranks": ()}, {"tokens": (8, 0)}, {"layers": ((32, -1),)}, {"windows": 0}],
    ids=lambda each: next(iter(each)),
)
def test_bad_input(change: dict[str, object]) -> None:
    (name,) = change
    with pytest.raises(InvalidArgumentError, match=f"{name}=.*expected at least one"):
        AdaptersBench(device="cpu", **change).run()  # type: ignore[arg-type]


@pytest.mark.gpu
def test_memory_is_counted_on_a_gpu() -> None:
    config = AdaptersBench(layers=((1024, 1024),), ranks=(8,), tokens=(256,), windows=1)
    table = config.run()
    (row,) = table.rows
    assert all(" (" in cell and "), " in cell for cell in row[5:-3])
    assert all(" (" in cell for cell in row[-3:-1])
    assert float(row[-1]) <= 1
