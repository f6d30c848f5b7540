"""Transformers that are well conditioned by construction.

A method is a function on a model, applied in place and returning it; together they read as a recipe:

    import timm, wellposed as wp

    model = timm.create_model("vit_base_patch16_224", num_classes=10)
    wp.cut_skips(model)
    wp.condition_(model, alpha=2.0, beta=0.6, c=3.0)
    wp.save(model, "folder/")

Names are imported when they are first used: `import wellposed` imports neither torch nor any model library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wellposed import errors as errors

if TYPE_CHECKING:
    from wellposed import fields as fields
    from wellposed.adapters import SineLoraConfig as SineLoraConfig
    from wellposed.adapters import to_lora as to_lora
    from wellposed.attention import Polynomial as Polynomial
    from wellposed.attention import Relu as Relu
    from wellposed.attention import Sigmoid as Sigmoid
    from wellposed.attention import Softmax as Softmax
    from wellposed.attention import polynomial_attention as polynomial_attention
    from wellposed.attention import relu_attention as relu_attention
    from wellposed.attention import sigmoid_attention as sigmoid_attention
    from wellposed.attention import softmax_attention as softmax_attention
    from wellposed.attention import use_attention as use_attention
    from wellposed.compression import bd_rate as bd_rate
    from wellposed.compression import compress as compress
    from wellposed.compression import load_adapter as load_adapter
    from wellposed.diagnosis import Diagnosis as Diagnosis
    from wellposed.diagnosis import diagnose as diagnose
    from wellposed.errors import WellposedError as WellposedError
    from wellposed.evaluation import corloc as corloc
    from wellposed.evaluation import dense_probe as dense_probe
    from wellposed.evaluation import discover as discover
    from wellposed.evaluation import knn as knn
    from wellposed.evaluation import layer_features as layer_features
    from wellposed.evaluation import linear_probe as linear_probe
    from wellposed.evaluation import pca_maps as pca_maps
    from wellposed.graying import gray as gray
    from wellposed.graying import gray_tokens as gray_tokens
    from wellposed.graying import ungray_tokens as ungray_tokens
    from wellposed.lowrank import SineLinear as SineLinear
    from wellposed.lowrank import factorize as factorize
    from wellposed.optim import SOAP as SOAP
    from wellposed.recipes import load as load
    from wellposed.recipes import recipe as recipe
    from wellposed.recipes import save as save
    from wellposed.skipless import condition_ as condition_
    from wellposed.skipless import cut_skips as cut_skips
    from wellposed.skipless import restore_skips as restore_skips
    from wellposed.skipless import skips as skips
    from wellposed.spectrum import jacobian_spectrum as jacobian_spectrum
    from wellposed.spectrum import ntk as ntk
    from wellposed.studies import AdapterResult as AdapterResult
    from wellposed.studies import AdapterStudy as AdapterStudy
    from wellposed.studies import StudyConfig as StudyConfig
    from wellposed.studies import StudyResult as StudyResult
    from wellposed.studies import study as study
    from wellposed.studies import study_adapters as study_adapters
    from wellposed.training import DinoConfig as DinoConfig
    from wellposed.training import ImageConfig as ImageConfig
    from wellposed.training import ImageResult as ImageResult
    from wellposed.training import LanguageConfig as LanguageConfig
    from wellposed.training import LanguageResult as LanguageResult
    from wellposed.training import PretrainResult as PretrainResult
    from wellposed.training import TrainConfig as TrainConfig
    from wellposed.training import TrainResult as TrainResult
    from wellposed.training import VisionConfig as VisionConfig
    from wellposed.training import VisionResult as VisionResult
    from wellposed.training import finetune_image as finetune_image
    from wellposed.training import finetune_language as finetune_language
    from wellposed.training import finetune_vision as finetune_vision
    from wellposed.training import pretrain as pretrain
    from wellposed.training import train as train

_HOMES = {
    "AdapterResult": "studies",
    "AdapterStudy": "studies",
    "Diagnosis": "diagnosis",
    "DinoConfig": "training",
    "ImageConfig": "training",
    "ImageResult": "training",
    "LanguageConfig": "training",
    "LanguageResult": "training",
    "Polynomial": "attention",
    "PretrainResult": "training",
    "Relu": "attention",
    "SOAP": "optim",
    "Sigmoid": "attention",
    "SineLinear": "lowrank",
    "SineLoraConfig": "adapters",
    "Softmax": "attention",
    "StudyConfig": "studies",
    "StudyResult": "studies",
    "TrainConfig": "training",
    "TrainResult": "training",
    "VisionConfig": "training",
    "VisionResult": "training",
    "WellposedError": "errors",
    "bd_rate": "compression",
    "compress": "compression",
    "condition_": "skipless",
    "corloc": "evaluation",
    "cut_skips": "skipless",
    "dense_probe": "evaluation",
    "diagnose": "diagnosis",
    "discover": "evaluation",
    "factorize": "lowrank",
    "finetune_image": "training",
    "finetune_language": "training",
    "finetune_vision": "training",
    "gray": "graying",
    "gray_tokens": "graying",
    "jacobian_spectrum": "spectrum",
    "knn": "evaluation",
    "layer_features": "evaluation",
    "linear_probe": "evaluation",
    "load": "recipes",
    "load_adapter": "compression",
    "ntk": "spectrum",
    "pca_maps": "evaluation",
    "polynomial_attention": "attention",
    "pretrain": "training",
    "recipe": "recipes",
    "relu_attention": "attention",
    "restore_skips": "skipless",
    "save": "recipes",
    "sigmoid_attention": "attention",
    "skips": "skipless",
    "softmax_attention": "attention",
    "study": "studies",
    "study_adapters": "studies",
    "to_lora": "adapters",
    "train": "training",
    "ungray_tokens": "graying",
    "use_attention": "attention",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("wellposed")
    if name == "fields":
        return import_module("wellposed.fields")
    if name not in _HOMES:
        raise AttributeError(f"module 'wellposed' has no attribute {name!r}")
    value = getattr(import_module(f"wellposed.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
