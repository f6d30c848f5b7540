"""Normalised cuts of many small graphs at once (Shi and Malik, 2000).

A graph on N tokens has an affinity A = 1 between tokens that are joined and `EPS` between all others, and degrees
D = diag(A 1). The relaxed cut is the second smallest solution of (D - A) y = lambda D y. With y = D^-1/2 x this is the
second largest eigenvector x of M = D^-1/2 A D^-1/2, whose largest is known, sqrt(D 1) with eigenvalue 1, and is taken
out beforehand. What is left has a largest eigenvalue of at least 0, since its trace is sum(1/d) - 1 and d <= N.

Shapes: B graphs, N tokens, K vectors iterated together.
"""

import torch
from torch import Tensor

EPS = 1e-5
_SMALL = 64  # tokens up to which a full decomposition is as fast
_BLOCK = 6
_STEPS = 6  # of a round, after which what has converged leaves the batch
_GAIN = 0.03  # what a round must at least make of the residual for another to be worth its while
_TOLERANCE = 1e-10


def graphs_at_once(tokens: int, device: torch.device) -> int:
    """How many graphs to solve together: M takes 1 GB on a GPU, 128 MB elsewhere, or one graph if that takes more."""
    return max(1, 2 ** (27 if device.type == "cuda" else 24) // tokens**2)


def second_eigenvectors(joined_BNN: Tensor) -> Tensor:
    """The y of every graph, (B, N), float64, of largest entry 1 and arbitrary sign; on the CPU for a device without it.

    Products with M alone, for the whole batch, find most of them (LOBPCG; Knyazev, 2001). Those whose residual
    |M x - mu x| stays above 1e-10, because the next eigenvalue is very near, get a full decomposition. Where all tokens
    are alike, every vector is a solution and the answer is 0.

    Args:
        joined_BNN: bool and symmetric.
    """
    if joined_BNN.device.type == "mps":
        joined_BNN = joined_BNN.cpu()
    if joined_BNN.shape[1] == 1:
        return torch.zeros(joined_BNN.shape[:2], dtype=torch.float64, device=joined_BNN.device)
    return _solve(joined_BNN)


def are_alike(joined_BNN: Tensor) -> Tensor:
    """Which graphs, (B,), have nothing to cut: all tokens are joined with one another, or none is with another."""
    diagonal_BN = joined_BNN.diagonal(dim1=1, dim2=2)
    within_B, all_B = diagonal_BN.sum(1), joined_BNN.sum((1, 2))
    tokens = joined_BNN.shape[1]
    return (all_B == tokens**2) | ((all_B == within_B) & ((within_B == 0) | (within_B == tokens)))


def _solve(joined_BNN: Tensor) -> Tensor:
    M_BNN = joined_BNN.double().mul_(1 - EPS).add_(EPS)
    scale_BN = M_BNN.sum(2).rsqrt()
    M_BNN.mul_(scale_BN[:, :, None]).mul_(scale_BN[:, None, :])
    first_BN1 = (1 / scale_BN / (1 / scale_BN).norm(dim=1, keepdim=True))[:, :, None]
    if M_BNN.shape[1] <= _SMALL:
        x_BN = _decomposed(M_BNN, first_BN1)
    else:
        x_BN, converged_B = _iterated(M_BNN, first_BN1)
        if not converged_B.all():
            x_BN[~converged_B] = _decomposed(M_BNN[~converged_B], first_BN1[~converged_B])
    y_BN = scale_BN * x_BN
    y_BN = y_BN / y_BN.abs().amax(1, keepdim=True)
    return y_BN.masked_fill(are_alike(joined_BNN)[:, None], 0)


def _decomposed(M_BNN: Tensor, first_BN1: Tensor) -> Tensor:
    return torch.linalg.eigh(M_BNN - first_BN1 @ first_BN1.mT).eigenvectors[..., -1]


def _iterated(M_BNN: Tensor, first_BN1: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors found, (B, N), and which of them have converged, (B,)."""
    graphs, tokens, _ = M_BNN.shape
    start_NK = torch.randn(tokens, _BLOCK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X_BNK = _orthonormal(start_NK.to(M_BNN).expand(graphs, -1, -1), first_BN1)
    MX_BNK, P_BNK = M_BNN @ X_BNK, torch.zeros_like(X_BNK)
    found_BN, converged_B = torch.zeros_like(X_BNK[..., 0]), torch.zeros(graphs, dtype=torch.bool, device=M_BNN.device)
    left_B, before_B = torch.arange(graphs, device=M_BNN.device), None
    while len(left_B):
        for _ in range(_STEPS):
            X_BNK, MX_BNK, P_BNK, residual_B = _step(M_BNN, first_BN1, X_BNK, MX_BNK, P_BNK)
        near_B = residual_B <= _TOLERANCE
        found_BN[left_B], converged_B[left_B] = X_BNK[..., -1], near_B
        again_B = ~near_B if before_B is None else ~near_B & (residual_B < _GAIN * before_B)
        before_B = residual_B
        if not again_B.all():
            M_BNN, first_BN1, X_BNK, MX_BNK, P_BNK, left_B, before_B = (
                value[again_B] for value in (M_BNN, first_BN1, X_BNK, MX_BNK, P_BNK, left_B, before_B)
            )
    return found_BN, converged_B


def _step(
    M_BNN: Tensor, first_BN1: Tensor, X_BNK: Tensor, MX_BNK: Tensor, P_BNK: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best vectors in the span of the last ones, their residuals and the direction they came from.

    Returns them, their images under M, the direction they came from, and the residual of the best, (B,).
    """
    R_BNK = MX_BNK - X_BNK @ (X_BNK.mT @ MX_BNK)
    S_BNS = _orthonormal(torch.cat([X_BNK, R_BNK, P_BNK], dim=2), first_BN1)
    MS_BNS = M_BNN @ S_BNS
    values_BS, C_BSS = torch.linalg.eigh(S_BNS.mT @ MS_BNS)
    C_BSK = C_BSS[..., -_BLOCK:]
    next_BNK, image_BNK = S_BNS @ C_BSK, MS_BNS @ C_BSK
    residual_B = (image_BNK[..., -1] - values_BS[:, -1:] * next_BNK[..., -1]).norm(dim=1)
    return next_BNK, image_BNK, next_BNK - X_BNK @ (X_BNK.mT @ next_BNK), residual_B


def _orthonormal(S_BNS: Tensor, first_BN1: Tensor) -> Tensor:
    """A basis of the columns' span without `first`, by products alone; columns that add nothing become noise or 0."""
    tiny = torch.finfo(S_BNS.dtype).eps
    for _ in range(2):
        S_BNS = S_BNS - first_BN1 @ (first_BN1.mT @ S_BNS)
        S_BNS = S_BNS / S_BNS.norm(dim=1, keepdim=True).clamp(min=1e-30)
        values_BS, vectors_BSS = torch.linalg.eigh(S_BNS.mT @ S_BNS)
        S_BNS = S_BNS @ (vectors_BSS * values_BS.clamp(min=10 * tiny).rsqrt()[:, None])
    return S_BNS - first_BN1 @ (first_BN1.mT @ S_BNS)
