"""The network of DINO's student and of its teacher: a backbone that takes crops of two sizes, and a projection head.

Shapes: N images, V views of each, D width of the backbone, K outputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F


class UnitLinear(nn.Module):
    """A linear map without bias whose rows have fixed lengths, 1 at first: its outputs are cosines times these.

    `weight_g` (K, 1) and `weight_v` (K, D) are the names of a weight-normalized layer in DINO's own checkpoints. Always
    computed in float32: what the teacher says of two images may differ by less than half precision can tell.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(nn.init.trunc_normal_(torch.empty(out_features, in_features), std=0.02))
        self.weight_g: Tensor
        self.register_buffer("weight_g", torch.ones(out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight_g * F.normalize(self.weight_v.float(), dim=1))


class Head(nn.Module):
    """Three layers down to a bottleneck, its length set to 1, and K unit directions."""

    def __init__(self, in_features: int, hidden: int, bottleneck: int, out_features: int) -> None:
        super().__init__()
        widths = [in_features, hidden, hidden, bottleneck]
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
        self.last_layer = UnitLinear(bottleneck, out_features)

    def forward(self, features: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(features).float(), dim=-1))


class Network(nn.Module):
    """A timm ViT without classifier, made with dynamic_img_size, and a head on it."""

    def __init__(self, backbone: nn.Module, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self._resamples = isinstance(backbone, VisionTransformer) and backbone.pos_embed is not None
        if self._resamples:
            _take_any_size(backbone, False)

    def forward(self, *views_NVCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (N, V, K) and features (N, V, D) of all views, given as one batch per size of crop."""
        features = [self.features(views.flatten(0, 1)).unflatten(0, views.shape[:2]) for views in views_NVCHW]
        features_NVD = torch.cat(features, 1)
        return self.head(features_NVD), features_NVD

    def features(self, images_BCHW: Tensor) -> Tensor:
        """What the backbone makes of images whose sides are whole numbers of patches, (B, D)."""
        backbone: Any = self.backbone
        if not self._resamples:
            return backbone(images_BCHW)
        height, width = images_BCHW.shape[-2:]
        rows, columns = backbone.patch_embed.patch_size
        grid = (height // rows, width // columns)
        if grid == tuple(backbone.patch_embed.grid_size):
            return backbone(images_BCHW)
        resample = getattr(self, self._matrix(grid))
        with torch.autocast(images_BCHW.device.type, enabled=False):  # as exact as the positions of a global crop
            positions_1ND = resample.to(backbone.pos_embed.dtype) @ backbone.pos_embed
        return functional_call(backbone, {"pos_embed": positions_1ND}, (images_BCHW,))

    def expect(self, height: int, width: int) -> None:
        """Make ready for images of this size; for ViTs with learned positions it must be called before `features`.

        Resampling positions is linear, so it is done by a matrix: timm's bicubic interpolation has no repeatable
        gradient on a GPU.
        """
        backbone: Any = self.backbone
        if not self._resamples:
            return
        patch = backbone.patch_embed
        grid = (height // patch.patch_size[0], width // patch.patch_size[1])
        prefix = 0 if backbone.no_embed_class else backbone.num_prefix_tokens
        identity = torch.eye(backbone.pos_embed.shape[1])[None]
        matrix = resample_abs_pos_embed(identity, list(grid), list(patch.grid_size), prefix)[0]
        self.register_buffer(self._matrix(grid), matrix.to(backbone.pos_embed.device), persistent=False)

    @contextmanager
    def backbone_of_any_size(self) -> Iterator[nn.Module]:
        """The backbone as timm made it, which called by itself takes images of any size; only within the context."""
        if self._resamples:
            _take_any_size(self.backbone, True)
        try:
            yield self.backbone
        finally:
            if self._resamples:
                _take_any_size(self.backbone, False)

    @staticmethod
    def _matrix(grid: tuple[int, int]) -> str:
        return f"positions_{grid[0]}_{grid[1]}"

    def no_weight_decay(self) -> set[str]:
        """What the backbone exempts, such as its position embedding."""
        exempt: set[str] = getattr(self.backbone, "no_weight_decay", set)()
        return {f"backbone.{name}" for name in exempt}


def _take_any_size(backbone: Any, on: bool) -> None:
    """Have a dynamic ViT resample its position embedding to the size of the images, or use it as it is."""
    backbone.dynamic_img_size = on
    backbone.patch_embed.flatten = not on
