"""DINO's loss, and the numbers that tell whether a run has collapsed.

With student outputs s, teacher outputs t, their centre c and temperatures tau (arXiv 2104.14294, equations 1 to 4):

    p_s = softmax(s / tau_s),   p_t = softmax((t - c) / tau_t),   loss = mean of -sum_k p_t(g) log p_s(v)

over all pairs of a global view g and another view v of the same image.

Shapes: N images, G global views, V views of which the first G are the global ones, K outputs, D width of the backbone.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

TINY = 1e-12


@dataclass(frozen=True)
class Loss:
    """The loss of a batch and what else is seen on the way; all are scalars but the two means."""

    loss: Tensor
    kl: Tensor
    """KL(teacher || student): the loss less the entropy of the teacher."""
    entropy: Tensor
    """Mean entropy of the teacher's outputs, as a part of log K."""
    output_mean_K: Tensor  # noqa: N815
    """Mean of the teacher's outputs, from which the centre follows."""
    probability_mean_K: Tensor  # noqa: N815
    """Mean of p_t."""


def dino_loss(
    student_NVK: Tensor, teacher_NGK: Tensor, center_K: Tensor, *, student_temp: float, teacher_temp: Tensor
) -> Loss:
    """The loss in float32; the gradient goes to the student alone. `teacher_temp` is a scalar on the device."""
    student_NVK, teacher_NGK = student_NVK.float(), teacher_NGK.detach().float()
    views, global_views, outputs = student_NVK.shape[1], teacher_NGK.shape[1], student_NVK.shape[2]
    log_student_NVK = (student_NVK / student_temp).log_softmax(-1)
    log_teacher_NGK = ((teacher_NGK - center_K) / teacher_temp).log_softmax(-1)
    teacher_probabilities_NGK = log_teacher_NGK.exp()
    cross_NGV = -torch.bmm(teacher_probabilities_NGK, log_student_NVK.mT)
    same = torch.eye(global_views, views, dtype=torch.bool, device=cross_NGV.device)
    loss = cross_NGV.masked_fill(same, 0.0).sum() / (len(cross_NGV) * global_views * (views - 1))
    entropy = -(teacher_probabilities_NGK * log_teacher_NGK).sum(-1).mean()
    return Loss(
        loss=loss,
        kl=loss.detach() - entropy,
        entropy=entropy / math.log(outputs),
        output_mean_K=teacher_NGK.mean((0, 1)),
        probability_mean_K=teacher_probabilities_NGK.mean((0, 1)),
    )


def information(probability_mean_K: Tensor, mean_entropy: Tensor) -> Tensor:
    """What an output tells about which image it came from, in nats: the entropy of the mean less the mean entropy.

    0 if and only if all outputs are the same, whether all are even or all name one and the same of the K.
    """
    return torch.special.entr(probability_mean_K).sum() - mean_entropy


def spread(features_BD: Tensor) -> tuple[Tensor, Tensor]:
    """How different the features of a batch are: standard deviation and effective rank.

    The first is that of a feature's coordinates over the batch, features scaled to length sqrt(D): 1 where they point
    in all directions, 0 where they are all the same. The second is (tr C)^2 / tr C^2 of their covariance C, at most its
    rank.
    """
    width = features_BD.shape[-1]
    units_BD = F.normalize(features_BD.float(), dim=-1) * width**0.5
    centred_BD = units_BD - units_BD.mean(0)
    total = centred_BD.square().sum()
    gram = centred_BD.mT @ centred_BD if width < len(centred_BD) else centred_BD @ centred_BD.mT
    std = (total / centred_BD.numel()).sqrt()
    return std, total.square() / gram.square().sum().clamp(min=TINY)
