"""The Jacobian of self-attention in closed form (arXiv 2510.00345, Section 3).

One layer without normalization: Y = sum over heads of A X W_V W_O with A = softmax(X W_Q W_K^T X^T / tau), row by row.
Matrices are flattened column by column, as the paper's vec does. Shapes: n tokens, d wide, heads h wide.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError


@dataclass(frozen=True)
class AttentionJacobian:
    """K = B + E: how the output follows the values (B), and how it follows the attention weights (E)."""

    through_values: Tensor
    """B = (W_V W_O)^T (x) A, summed over heads, (n d, n d)."""
    through_weights: Tensor
    """E = (X W_V W_O (x) I)^T A', with A' the derivative of the attention matrix, summed over heads."""

    @property
    def whole(self) -> Tensor:
        return self.through_values + self.through_weights


def attention_jacobian(
    x_ND: Tensor, query_HDh: Tensor, key_HDh: Tensor, value_HDh: Tensor, output_HhD: Tensor, tau: float | None = None
) -> AttentionJacobian:
    """The Jacobian of self-attention with respect to its input, from its matrices: y = x W, as the papers write it.

    Args:
        x_ND: the tokens.
        query_HDh: W_Q of each head, likewise key and value.
        key_HDh: W_K.
        value_HDh: W_V.
        output_HhD: W_O, split by heads.
        tau: what the logits are divided by; the root of the heads' width if None.
    """
    heads, d, h = query_HDh.shape
    if x_ND.ndim != 2 or x_ND.shape[1] != d or output_HhD.shape != (heads, h, d):
        raise InvalidArgumentError(
            f"tokens {tuple(x_ND.shape)}, queries {tuple(query_HDh.shape)}, output {tuple(output_HhD.shape)}: expected "
            "(n, d), (heads, d, h) and (heads, h, d)"
        )
    n = len(x_ND)
    tau = h**0.5 if tau is None else tau
    eye_n = torch.eye(n, dtype=x_ND.dtype, device=x_ND.device)
    values = x_ND.new_zeros(n * d, n * d)
    weights = x_ND.new_zeros(n * d, n * d)
    for query, key, value, output in zip(query_HDh, key_HDh, value_HDh, output_HhD, strict=True):
        m_DD, vo_DD = query @ key.T, value @ output
        a_NN = (x_ND @ m_DD @ x_ND.T / tau).softmax(-1)
        # d vec(X M X^T) = (X M^T (x) I + (I (x) X M) P) d vec(X); P, which transposes, only permutes columns.
        order = torch.arange(n * d, device=x_ND.device).view(n, d).T.flatten()
        logits = torch.kron((x_ND @ m_DD.T).contiguous(), eye_n) + torch.kron(eye_n, x_ND @ m_DD)[:, order]
        # Row i of A moves by (diag(a_i) - a_i a_i^T) times row i of the logits.
        rows = logits.view(n, n, n * d)  # [column, row, :] of a matrix flattened column by column
        weighted = a_NN.T[:, :, None] * rows
        moved = weighted - a_NN.T[:, :, None] * weighted.sum(0, keepdim=True)
        values += torch.kron(vo_DD.T.contiguous(), a_NN)
        weights += torch.kron((x_ND @ vo_DD).T.contiguous(), eye_n) @ moved.reshape(n * n, n * d) / tau
    return AttentionJacobian(values, weights)


def weyl_condition_bound(largest: Tensor, smallest: Tensor, perturbation: Tensor) -> Tensor:
    """Lemma 1 in Weyl's form: kappa(B + E) <= (s_max(B) + s_max(E)) / (s_min(B) - s_max(E)), inf if E is too large.

    Args:
        largest: singular value of B.
        smallest: singular value of B.
        perturbation: the largest singular value of E.
    """
    room = smallest - perturbation
    return torch.where(room > 0, (largest + perturbation) / room, torch.inf)
