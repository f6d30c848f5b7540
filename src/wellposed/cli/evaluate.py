"""wellposed evaluate: what the features of a model know."""

from tyro.extras import SubcommandApp

from wellposed.evaluation.classification.command import KnnConfig, LinearConfig
from wellposed.evaluation.discovery.command import DiscoverConfig
from wellposed.evaluation.pictures.command import PcaConfig
from wellposed.evaluation.segmentation.command import SegmentConfig

app = SubcommandApp()


@app.command
def knn(config: KnnConfig) -> None:
    """Classify images by their nearest neighbours among frozen features.

    Args:
        config: what to evaluate.
    """
    print(config.run())


@app.command
def linear(config: LinearConfig) -> None:
    """Classify images by a linear probe on frozen features.

    Args:
        config: what to evaluate.
    """
    print(config.run())


@app.command
def segment(config: SegmentConfig) -> None:
    """Segment images by a linear probe on frozen patch features, under a named protocol.

    Args:
        config: what to evaluate.
    """
    print(config.run())


@app.command
def discover(config: DiscoverConfig) -> None:
    """Find the object of each image by TokenCut, and count how many of the boxes are right (CorLoc).

    Args:
        config: what to evaluate.
    """
    print(config.run())


@app.command
def pca(config: PcaConfig) -> None:
    """Show patch features as colours, layer by layer, of one model or of two side by side.

    Args:
        config: what to show.
    """
    print(config.run())
