"""The comparison of packed adapters with PEFT's, at sizes a CPU can do."""

import pytest

from wellposed.bench.compress import CompressBench
from wellposed.cli import main
from wellposed.errors import InvalidArgumentError

pytest.importorskip("peft", reason="PEFT is not installed")


@pytest.mark.parametrize("kind", ["--sine", "--no-sine"])
def test_prints_a_table(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"bench compress --device cpu --layers 64 96 96 64 --blocks 2 --rank 8 --bits 2 8 --adapters 2 {kind}"
    assert main([*command.split(), "--repeats", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    _, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert [row[0] for row in rows] == ["PEFT, float16", "packed, 2 bits", "packed, 8 bits"]
    numbers = 4 * 8 * (64 + 96)
    for row, held in zip(rows, (2 * numbers, numbers / 4 + 8 * 4 * 2, numbers + 8 * 256 * 2), strict=True):
        assert float(row[1]) == pytest.approx(held / 1e6, abs=0.006)
        assert float(row[2]) == pytest.approx(2 * numbers / held, rel=0.06)
        assert float(row[3]) > 0
        assert float(row[4]) > 0
    assert (rows[0][5], rows[0][6]) == ("", "")
    assert all(float(row[5]) >= 0 for row in rows[1:])
    assert float(rows[1][6]) > float(rows[2][6]) > 0


@pytest.mark.parametrize("change", [{"bits": ()}, {"layers": ((32, 0),)}, {"blocks": 0}, {"repeats": 0}])
def test_bad_input(change: dict[str, object]) -> None:
    (name,) = change
    with pytest.raises(InvalidArgumentError, match=f"{name}=.*expected at least one"):
        CompressBench(device="cpu", **change).run()  # type: ignore[arg-type]


@pytest.mark.gpu
def test_memory_is_counted_on_a_gpu() -> None:
    table = CompressBench(layers=((1024, 1024),), blocks=4, rank=16, bits=(4,), adapters=3, repeats=2).run()
    peft, packed = table.rows
    assert float(packed[2]) == pytest.approx(4, rel=0.1)
    assert float(peft[1]) == pytest.approx(4 * 2 * 1024 * 16 * 2 / 1e6, rel=0.1)
