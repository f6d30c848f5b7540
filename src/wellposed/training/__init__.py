"""Training: explicit loops on accelerate that can be interrupted, resumed and spread over processes."""

from typing import TYPE_CHECKING, Any

from wellposed.training.config import TrainConfig as TrainConfig

if TYPE_CHECKING:
    from wellposed.training.supervised import TrainResult as TrainResult
    from wellposed.training.supervised import train as train


def __getattr__(name: str) -> Any:
    if name not in {"TrainResult", "train"}:
        raise AttributeError(f"module 'wellposed.training' has no attribute {name!r}")
    from wellposed.training import supervised  # now, and not before: the command line asks for the fields alone

    return getattr(supervised, name)
