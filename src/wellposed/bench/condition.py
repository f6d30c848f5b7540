"""How long the conditioned initialization takes, against writing the paper's formulas down directly."""

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from wellposed.bench.table import Table
from wellposed.bench.timing import seconds
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class ConditionBench:
    """Time wellposed.condition_ on a timm model against one full SVD per head and per W_V, W_O pair."""

    model: str = "vit_base_patch16_224"
    """Name of a timm VisionTransformer."""
    device: str = "cpu"
    """Where the weights live: cpu, cuda, ..."""
    repeats: int = 3
    """Timed runs after one warm-up; the median is reported."""
    seed: int = 0

    def run(self) -> Table:
        """Measure both ways in turn and return the table."""
        import timm
        import torch

        from wellposed.runs import device_named, provenance
        from wellposed.skipless import condition_

        if self.model not in timm.list_models("vit_*"):
            raise InvalidArgumentError(f"model={self.model!r}: expected one of timm.list_models('vit_*')")
        if self.repeats < 1:
            raise InvalidArgumentError(f"repeats={self.repeats}: expected at least 1")
        device = device_named(self.device)
        torch.manual_seed(self.seed)
        model = timm.create_model(self.model).to(device)
        ours = median(seconds(lambda: condition_(model), device, repeats=self.repeats))
        direct = median(seconds(lambda: condition_by_full_svd(model), device, repeats=self.repeats))
        width, heads, depth = model.embed_dim, model.blocks[0].attn.num_heads, len(model.blocks)
        return Table(
            title=f"Conditioning {self.model}: width {width}, {heads} heads, {depth} blocks",
            columns=("way", "seconds", "times faster"),
            rows=(
                ("full SVDs, float32", f"{direct:.2f}", "1.0"),
                ("wellposed.condition_", f"{ours:.2f}", f"{direct / ours:.1f}"),
            ),
            facts=provenance(device, seed=self.seed),
        )


def condition_by_full_svd(model: Any, alpha: float = 2.0, beta: float = 0.6, c: float = 3.0) -> None:
    """The initialization of arXiv 2510.00345 for a timm ViT, written down from the paper without further thought."""
    import torch

    with torch.no_grad():
        for block in model.blocks:
            weight, h = block.attn.qkv.weight, block.attn.head_dim
            d = weight.shape[1]
            q, k, v = weight.chunk(3)
            for head in range(block.attn.num_heads):
                z = torch.randn(d, d, device=weight.device) / d**0.5
                u, s, vt = torch.linalg.svd(alpha * z + beta * torch.eye(d, device=weight.device))
                rows = slice(head * h, (head + 1) * h)
                q[rows] = (u[:, :h] * s[:h].sqrt()).T
                k[rows] = vt[:h] * s[:h, None].sqrt()
            u, _, vt = torch.linalg.svd(torch.randn(d, d, device=weight.device))
            v.copy_(c * u.T)
            block.attn.proj.weight.copy_(c * vt.T)
            torch.nn.init.orthogonal_(block.mlp.fc1.weight, gain=(block.mlp.fc1.out_features / d) ** 0.5)
            torch.nn.init.orthogonal_(block.mlp.fc2.weight)
