"""Training: explicit loops on accelerate that can be interrupted, resumed and spread over processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wellposed.training.config import TrainConfig as TrainConfig
from wellposed.training.dino_config import DinoConfig as DinoConfig
from wellposed.training.finetuning.config import LanguageConfig as LanguageConfig
from wellposed.training.finetuning.image_config import ImageConfig as ImageConfig
from wellposed.training.finetuning.vision_config import VisionConfig as VisionConfig

if TYPE_CHECKING:
    from wellposed.training.dino import PretrainResult as PretrainResult
    from wellposed.training.dino import pretrain as pretrain
    from wellposed.training.dino_checkpoints import load_dino as load_dino
    from wellposed.training.dino_checkpoints import open_networks as open_networks
    from wellposed.training.dino_checkpoints import save_dino as save_dino
    from wellposed.training.finetuning.dreambooth import ImageResult as ImageResult
    from wellposed.training.finetuning.dreambooth import finetune_image as finetune_image
    from wellposed.training.finetuning.language import LanguageResult as LanguageResult
    from wellposed.training.finetuning.language import finetune_language as finetune_language
    from wellposed.training.finetuning.vision import VisionResult as VisionResult
    from wellposed.training.finetuning.vision import finetune_vision as finetune_vision
    from wellposed.training.supervised import TrainResult as TrainResult
    from wellposed.training.supervised import train as train

_HOMES = {
    **dict.fromkeys(("TrainResult", "train"), "supervised"),
    **dict.fromkeys(("PretrainResult", "pretrain"), "dino"),
    **dict.fromkeys(("load_dino", "open_networks", "save_dino"), "dino_checkpoints"),
    **dict.fromkeys(("LanguageResult", "finetune_language"), "finetuning.language"),
    **dict.fromkeys(("VisionResult", "finetune_vision"), "finetuning.vision"),
    **dict.fromkeys(("ImageResult", "finetune_image"), "finetuning.dreambooth"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wellposed.training' has no attribute {name!r}")
    # Now, and not before: the command line asks for the fields alone.
    return getattr(import_module(f"wellposed.training.{_HOMES[name]}"), name)
