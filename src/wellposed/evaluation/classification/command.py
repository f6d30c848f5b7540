"""What `wellposed evaluate knn` and `wellposed evaluate linear` do: the classes of images from frozen features."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.classification.linear_protocols import PROTOCOLS, DinoSgd, Lbfgs, Name, Protocol
from wellposed.evaluation.command import Evaluation

if TYPE_CHECKING:
    import torch

    from wellposed.evaluation.backbones import Backbone
    from wellposed.evaluation.labelled import Accuracy, Labelled

_COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83", "#e08214", "#666666")
_RESULTS, _CURVE = "results.json", "layers.png"
Layers = Mapping[str, tuple["Labelled", "Labelled"]]


@dataclass(frozen=True)
class Score:
    """The accuracy of one layer under one setting."""

    layer: str
    setting: str
    """What was varied: the number of neighbours, or the penalty that was chosen."""
    accuracy: "Accuracy"


@dataclass(frozen=True)
class Classification:
    """How well classes can be told from the features of a model."""

    model: str
    data: str
    protocol: str
    """All that the numbers depend on besides the features, in words."""
    setting: str
    """What the settings of the scores are settings of."""
    scores: tuple[Score, ...]
    facts: dict[str, str]

    @property
    def best(self) -> Score:
        """The score with the highest top-1."""
        return max(self.scores, key=lambda score: score.accuracy.top1)

    @property
    def values(self) -> dict[str, float]:
        """Top-1 by what was varied, for a curve over checkpoints."""
        shared = len({score.setting for score in self.scores}) * len({score.layer for score in self.scores})
        several = shared == len(self.scores) and len({score.setting for score in self.scores}) > 1
        return {
            f"top-1, block {score.layer}"
            + (f", {self.setting} {score.setting}" if several else ""): score.accuracy.top1
            for score in self.scores
        }

    def to_dict(self) -> dict[str, Any]:
        """Every number, as JSON holds it."""
        return asdict(self)

    def written(self, out: Path) -> "Classification":
        """Write all numbers, and the curve over the layers if there are several, into the folder `out`."""
        from wellposed.runs import write_json, writing_to

        with writing_to(out):
            write_json(out / _RESULTS, self.to_dict())
            if len({score.layer for score in self.scores}) > 1:
                self.plot(out / _CURVE)
        return self

    def __str__(self) -> str:
        from wellposed.reporting import text_table

        columns = ("layer", self.setting, "top-1 %", "top-5 %")
        rows = [
            (score.layer, score.setting, f"{100 * score.accuracy.top1:.2f}", f"{100 * score.accuracy.top5:.2f}")
            for score in self.scores
        ]
        return f"{self.model} on {self.data}\n{self.protocol}\n\n{text_table(columns, rows)}"

    def plot(self, path: Path) -> None:
        """Write top-1 over the layers to a picture file, a curve for each setting that all of them have."""
        from wellposed.reporting import Curves, Line, curves_figure

        layers = list(dict.fromkeys(score.layer for score in self.scores))
        settings = list(dict.fromkeys(score.setting for score in self.scores))
        shared = len(settings) * len(layers) == len(self.scores)
        lines = [
            Line(
                f"{self.setting} {setting}" if shared else "top-1",
                [layers.index(score.layer) for score in self.scores if not shared or score.setting == setting],
                [100 * score.accuracy.top1 for score in self.scores if not shared or score.setting == setting],
                _COLOURS[number % len(_COLOURS)],
            )
            for number, setting in enumerate(settings if shared else settings[:1])
        ]
        numbers = all(layer.isdigit() for layer in layers)
        if numbers:
            lines = [Line(line.name, [int(layers[int(x)]) for x in line.x], line.y, line.colour) for line in lines]
        where = "block" if numbers else f"layer: {', '.join(layers)}"
        curves_figure([Curves(f"{self.model} on {self.data}", lines, where, "top-1, %")], across=1, path=path)


@dataclass(frozen=True, kw_only=True)
class _Classify(Evaluation[Classification]):
    """What both commands take."""

    data: str = ""
    """shapes, digits, cifar10:PATH, cifar100:PATH, pet:PATH or folder:PATH; none with features:FOLDER."""
    out: Path | None = None
    """Write results.json, and a curve over the layers if there are several, into this folder."""
    kind: Literal["tokens", "keys"] = "tokens"
    """Outputs of the blocks, or the keys of their attention."""
    pool: Literal["summary", "mean"] = "summary"
    """What stands for an image: what the model's head reads (class token, mean, ...); or the patches' mean."""
    workers: int = 4
    """Processes that read images of sets which do not fit in memory."""
    on_error: Literal["raise", "skip"] = "raise"
    """End at an image that cannot be read, or name, count and leave it out."""

    def evaluate(self, backbone: "Backbone") -> Classification:
        """Classify the test set by the features of `backbone`."""
        from wellposed.evaluation.cache import set_features

        options: dict[str, Any] = {"kind": self.kind, "pool": self.pool, "cache": self.cache}
        options |= {"batch_size": self.batch_size, "workers": self.workers, "on_error": self.on_error}
        train, test = (
            set_features(backbone, self.data, split, self.layers or None, **options) for split in ("train", "test")
        )
        layers = {str(layer): (train[layer], test[layer]) for layer in train}
        where = f"{self.kind} of blocks, {self.pool}; "
        return self._classified(layers, backbone.device, self.model or backbone.name, where)

    def evaluate_stored(self, folder: Path) -> Classification:
        """Classify the test set by the features in `folder`."""
        from wellposed.evaluation.labelled import read_features
        from wellposed.runs import device_named

        return self._classified(read_features(folder), device_named(self.device), self.model, "")

    def _classified(self, layers: Layers, device: "torch.device", model: str, where: str) -> Classification:
        from wellposed.runs import provenance

        protocol, setting, scores = self._scores(layers, device)
        data = self.data.partition(":")[0] or "its features"
        return Classification(model, data, where + protocol, setting, tuple(scores), provenance(device, seed=0))

    @abstractmethod
    def _scores(self, layers: Layers, device: "torch.device") -> tuple[str, str, list[Score]]:
        """The protocol, what the scores' settings are settings of, and the scores."""


@dataclass(frozen=True, kw_only=True)
class KnnConfig(_Classify):
    """k-NN: the classes of the nearest training images, by the cosine of their features."""

    k: tuple[int, ...] = (20,)
    """Neighbours that vote; several numbers are tried one by one."""
    temperature: float = 0.07
    """Of the weights exp(cosine / temperature)."""
    weighted: bool = True
    """Weigh votes by similarity, as DINO does, or count them."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        from wellposed.evaluation.classification.neighbours import checked_neighbours

        super().check()
        checked_neighbours(self.k, self.temperature)

    def _scores(self, layers: Layers, device: "torch.device") -> tuple[str, str, list[Score]]:
        from wellposed.evaluation.classification.neighbours import knn

        scores = []
        for layer, (train, test) in layers.items():
            found = knn(
                *(train.features_ND.to(device), train.labels_N, test.features_ND, test.labels_N),
                k=self.k,
                temperature=self.temperature,
                weighted=self.weighted,
            )
            scores += [Score(layer, str(k), accuracy) for k, accuracy in found.items()]
        vote = f"votes weighted with temperature {self.temperature:g}" if self.weighted else "plain votes"
        return f"cosine k-NN, {vote}", "k", scores


@dataclass(frozen=True, kw_only=True)
class LinearConfig(_Classify):
    """Linear probe: a linear classifier, trained on frozen features."""

    protocol: Name = "lbfgs"
    """Logistic regression solved by L-BFGS, or SGD as in DINO for very large sets."""
    together: bool = False
    """Put the features of all layers side by side, instead of one probe for each."""
    l2: tuple[float, ...] = Lbfgs.l2
    """lbfgs: strengths of the penalty, of which the best on a held-out part of train is taken."""
    lr: float = DinoSgd.lr
    """dino: learning rate for a batch of 256."""
    epochs: int = DinoSgd.epochs
    """dino: passes over the features."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        super().check()
        self._chosen()

    def _chosen(self) -> Protocol:
        if self.protocol not in PROTOCOLS:
            raise InvalidArgumentError(f"protocol={self.protocol!r}: expected one of {', '.join(PROTOCOLS)}")
        return Lbfgs(l2=self.l2) if self.protocol == "lbfgs" else DinoSgd(lr=self.lr, epochs=self.epochs)

    def _scores(self, layers: Layers, device: "torch.device") -> tuple[str, str, list[Score]]:
        from wellposed.evaluation.classification.linear import linear_probe

        protocol = self._chosen()
        if self.together:
            layers = _side_by_side(layers)
        scores = []
        for layer, (train, test) in layers.items():
            probe = linear_probe(
                train.features_ND.to(device), train.labels_N, test.features_ND, test.labels_N, protocol
            )
            setting = "-" if probe.l2 is None else f"{probe.l2:g}{'' if probe.converged else ' (not converged)'}"
            scores.append(Score(layer, setting, probe.accuracy))
        return str(protocol), "l2" if self.protocol == "lbfgs" else "setting", scores


def _side_by_side(layers: Layers) -> Layers:
    """One layer, as wide as all of them together."""
    import torch

    from wellposed.evaluation.labelled import Labelled

    both = []
    for number in range(2):
        sets = [pair[number] for pair in layers.values()]
        both.append(Labelled(torch.cat([one.features_ND for one in sets], 1), sets[0].labels_N))
    return {"+".join(layers): (both[0], both[1])}
