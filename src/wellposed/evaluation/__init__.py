"""What the features of a model know: neighbours, probes, segmentation, object discovery, pictures.

Each as a function on features, and as a command with a configuration of its own, in a `command` module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellposed.evaluation.backbones import Backbone as Backbone
    from wellposed.evaluation.backbones import open_backbone as open_backbone
    from wellposed.evaluation.classification.linear import linear_probe as linear_probe
    from wellposed.evaluation.classification.neighbours import knn as knn
    from wellposed.evaluation.discovery.corloc import corloc as corloc
    from wellposed.evaluation.discovery.tokencut import discover as discover
    from wellposed.evaluation.features import layer_features as layer_features
    from wellposed.evaluation.pictures.pca import pca_maps as pca_maps
    from wellposed.evaluation.segmentation.heads import dense_probe as dense_probe
    from wellposed.evaluation.through import through_checkpoints as through_checkpoints

_HOMES = {
    "Backbone": "backbones",
    "corloc": "discovery.corloc",
    "dense_probe": "segmentation.heads",
    "discover": "discovery.tokencut",
    "knn": "classification.neighbours",
    "layer_features": "features",
    "linear_probe": "classification.linear",
    "open_backbone": "backbones",
    "pca_maps": "pictures.pca",
    "through_checkpoints": "through",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wellposed.evaluation' has no attribute {name!r}")
    # Now, and not before: the command line asks for the fields of the commands alone.
    return getattr(import_module(f"wellposed.evaluation.{_HOMES[name]}"), name)
