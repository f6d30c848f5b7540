import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Some virtual machines announce AMX and refuse its instructions, which kills the process at the first bf16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="slow: run with --slow")
    gpu = pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(gpu)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, which is all that DDP's and FSDP's checks need."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
