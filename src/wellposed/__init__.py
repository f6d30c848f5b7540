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
    from wellposed.studies import StudyConfig as StudyConfig
    from wellposed.studies import StudyResult as StudyResult
    from wellposed.studies import study as study
    from wellposed.training import TrainConfig as TrainConfig
    from wellposed.training import TrainResult as TrainResult
    from wellposed.training import train as train

_HOMES = {
    "Diagnosis": "diagnosis",
    "SOAP": "optim",
    "StudyConfig": "studies",
    "StudyResult": "studies",
    "TrainConfig": "training",
    "TrainResult": "training",
    "WellposedError": "errors",
    "condition_": "skipless",
    "corloc": "evaluation",
    "cut_skips": "skipless",
    "dense_probe": "evaluation",
    "diagnose": "diagnosis",
    "discover": "evaluation",
    "gray": "graying",
    "gray_tokens": "graying",
    "jacobian_spectrum": "spectrum",
    "knn": "evaluation",
    "layer_features": "evaluation",
    "linear_probe": "evaluation",
    "load": "recipes",
    "ntk": "spectrum",
    "pca_maps": "evaluation",
    "recipe": "recipes",
    "restore_skips": "skipless",
    "save": "recipes",
    "skips": "skipless",
    "study": "studies",
    "train": "training",
    "ungray_tokens": "graying",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("wellposed")
    if name not in _HOMES:
        raise AttributeError(f"module 'wellposed' has no attribute {name!r}")
    value = getattr(import_module(f"wellposed.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
