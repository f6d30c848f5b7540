"""The dense linear probe of features that are on disk."""

from dataclasses import replace

import torch

from wellposed.errors import DataError, InvalidArgumentError
from wellposed.evaluation.pictures.chosen_images import spread
from wellposed.evaluation.segmentation.heads import check_labels, dense_probe, patch_labels, predicted_mask
from wellposed.evaluation.segmentation.iou import IGNORED, agreement, confusion, most_frequent
from wellposed.evaluation.segmentation.probe import Example, Segmentation
from wellposed.evaluation.segmentation.protocols import DenseProtocol
from wellposed.evaluation.stored import StoredPatches


def segment_stored(
    train: StoredPatches,
    test: StoredPatches,
    protocol: DenseProtocol,
    *,
    device: torch.device,
    seed: int = 0,
    batch_size: int = 64,
    examples: int = 0,
) -> dict[str, Segmentation]:
    """`segment` for each layer of two files, both with masks. The classes are those that the training masks hold."""
    if protocol.augmented or protocol.test_view != "whole" or protocol.blocks > 1:
        raise InvalidArgumentError(
            f"protocol {protocol.name} sees pictures anew, or several blocks: expected one that sees whole pictures "
            "once, such as linear-last, quick or patch-grid, with features on disk"
        )
    if train.layers.keys() != test.layers.keys():
        only = ", ".join(sorted(train.layers.keys() ^ test.layers.keys()))
        raise DataError(f"the two files have different layers; only one of them has {only}")
    labels_NHW, truths_MHW = (part.beside["masks"].to(device).long() for part in (train, test))
    known = labels_NHW[labels_NHW != IGNORED]
    if not len(known):
        raise DataError("no pixel of the training masks has a class")
    classes = int(known.max()) + 1
    check_labels(truths_MHW, classes)
    protocol = replace(protocol, size=None)
    shown = set(spread(range(len(test)), examples))
    size = (truths_MHW.shape[1], truths_MHW.shape[2])
    images = test.beside.get("images")
    found = {}
    for name, layer_NhwD in train.layers.items():
        head = dense_probe(layer_NhwD.movedim(-1, 1).to(device), labels_NHW, classes, protocol, seed)
        counts_KK, kept = torch.zeros(classes, classes, dtype=torch.long, device=device), []
        for start in range(0, len(test), batch_size):
            maps = test.layers[name][start : start + batch_size].movedim(-1, 1).to(device).float()
            if maps.shape[1] != layer_NhwD.shape[-1]:
                raise DataError(f"{name} is {layer_NhwD.shape[-1]} wide in train and {maps.shape[1]} in test")
            with torch.no_grad():
                logits_BKhw = head(maps)
            for i, logits_Khw in enumerate(logits_BKhw, start):
                truth = truths_MHW[i]
                if protocol.test_labels == "grid":
                    grid = (logits_Khw.shape[1], logits_Khw.shape[2])
                    counts_KK += confusion(logits_Khw.argmax(0), patch_labels(truth[None], grid, classes)[0], classes)
                else:
                    counts_KK += confusion(predicted_mask(logits_Khw, size), truth, classes)
                if i in shown and images is not None and (images.shape[2], images.shape[3]) == size:
                    predicted = predicted_mask(logits_Khw, size).cpu()
                    kept.append(Example(str(i), images[i], truth.cpu(), predicted))
        found[name] = Segmentation(
            protocol=protocol,
            data="its images",
            classes=tuple(f"class {i}" for i in range(classes)),
            agreement=agreement(counts_KK),
            baseline=agreement(most_frequent(counts_KK)),
            train_images=len(train),
            test_images=len(test),
            head=head,
            examples=tuple(kept),
        )
    return found
