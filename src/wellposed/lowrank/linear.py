"""Dense layers whose matrix is made from two thin ones (arXiv 2403.19243)."""

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.lowrank.eager import sine_delta
from wellposed.lowrank.frequency import Omega, check_gain, check_omega, check_rank, layer_omega
from wellposed.lowrank.functional import sine_linear


class LowRankLinear(nn.Module):
    """y = x (U V^T)^T + bias: a linear layer of rank at most k, with k (in + out) weights instead of in x out.

    Parameters: `U` (out, k); `Vt` (k, in), which is V^T; `bias` (out,) or None. Both factors are Kaiming-uniform with
    a = sqrt 5, so that std(U V^T) = 1 / (3 sqrt(in)) whatever k.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_rank(rank, in_features, out_features)
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.U = nn.Parameter(torch.empty(out_features, rank, device=device, dtype=dtype))
        self.Vt = nn.Parameter(torch.empty(rank, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the factors anew, and the bias as torch.nn.Linear does."""
        nn.init.kaiming_uniform_(self.U, a=sqrt(5))
        nn.init.kaiming_uniform_(self.Vt, a=sqrt(5))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / sqrt(self.in_features), 1 / sqrt(self.in_features))

    @property
    def weight(self) -> Tensor:
        """The matrix (out, in) that the factors make, anew each time."""
        return self.U @ self.Vt

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.Vt), self.U, self.bias)

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """A torch.nn.Linear that computes the same, at the cost of a full matrix."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.weight.detach(), requires_grad=self.U.requires_grad)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=self.bias.requires_grad)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        """What stands between the brackets when the layer is printed."""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, bias={self.bias is not None}"


class SineLinear(LowRankLinear):
    """y = x W^T + bias with W = sin(omega U V^T) / g: as few weights as rank k has, and a matrix of far higher rank.

    No out x in matrix is kept between forward and backward. The sine is computed in float32 at least.

    Args:
        in_features: width of x.
        out_features: width of y.
        rank: k, at most the smaller of the two.
        omega: the frequency, above 0; "auto" for 6 sqrt(in), see `wellposed.lowrank.frequency`.
        gain: g, above 0; sqrt(in_features) if None, the paper's.
        bias: whether there is one.
        device: where the parameters are.
        dtype: of the parameters.

    Example:
        >>> layer = SineLinear(64, 64, rank=4)
        >>> dense = layer.to_linear()
        >>> sum(p.numel() for p in layer.parameters()), sum(p.numel() for p in dense.parameters())
        (576, 4160)
        >>> torch.linalg.matrix_rank(dense.weight)
        tensor(64)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        omega: Omega = "auto",
        gain: float | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_omega(omega)
        check_gain(gain)
        super().__init__(in_features, out_features, rank, bias, device, dtype)
        self.omega = layer_omega(in_features) if isinstance(omega, str) else float(omega)
        self.gain = sqrt(in_features) if gain is None else float(gain)

    @property
    def weight(self) -> Tensor:
        """W = sin(omega U V^T) / g, (out, in), anew each time."""
        return sine_delta(self.Vt, self.U, self.omega, 1 / self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return sine_linear(x, None, self.bias, self.Vt, self.U, self.omega, 1 / self.gain)

    def extra_repr(self) -> str:
        """What stands between the brackets when the layer is printed."""
        return f"{super().extra_repr()}, omega={self.omega:.6g}, gain={self.gain:.6g}"
