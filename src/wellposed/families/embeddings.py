"""The patch embeddings that models begin with, and the two sites around them: pixel patches and tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import UnknownFamilyError
from wellposed.families.family import class_path
from wellposed.families.finding import readable_name, unwrapped
from wellposed.families.surgery import SitedModule, library_class


class PatchEmbedding(SitedModule):
    """A library's patch embedding, unchanged, with its sites before and after it."""

    wp_projection: ClassVar[str]
    """The name of the convolution that embeds a patch."""

    def forward(self, pixels: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return self.wp_after(super().forward(self.wp_before(pixels), *arguments, **options))

    def wp_before(self, pixels_BCHW: Tensor) -> Tensor:
        """The site of the pixel patches."""
        change = self.wp_sites.patches
        if change is None:
            return pixels_BCHW
        projection: Any = self.get_submodule(self.wp_projection)
        p, q = projection.kernel_size
        b, c, height, width = pixels_BCHW.shape
        rows, columns = height // p, width // q
        if not rows * columns:  # the library says what is wrong with such an image
            return pixels_BCHW
        whole_BCHW = pixels_BCHW[..., : rows * p, : columns * q]
        by_patch = whole_BCHW.reshape(b, c, rows, p, columns, q).permute(0, 2, 4, 1, 3, 5)
        changed_BNP = change(by_patch.reshape(b, rows * columns, c * p * q))
        changed = changed_BNP.reshape(by_patch.shape).permute(0, 3, 1, 4, 2, 5)
        changed_BCHW = changed.reshape(whole_BCHW.shape)
        if whole_BCHW.shape == pixels_BCHW.shape:
            return changed_BCHW
        # What the last whole patch leaves over, the convolution does not see.
        return F.pad(changed_BCHW, (0, width - columns * q, 0, height - rows * p))

    def wp_after(self, embedded: Tensor) -> Tensor:
        """The site of the tokens, whichever way the library lays them out."""
        change = self.wp_sites.tokens
        if change is None:
            return embedded
        if embedded.ndim == 3:
            return change(embedded)
        maps_BHWD = embedded.movedim(1, -1) if self.wp_channels_first() else embedded
        changed = change(maps_BHWD.flatten(1, 2)).reshape(maps_BHWD.shape)
        return changed.movedim(-1, 1) if self.wp_channels_first() else changed

    def wp_channels_first(self) -> bool:
        """Whether the maps it returns are (B, D, H, W) rather than (B, H, W, D)."""
        return False

    @classmethod
    def wp_objection(cls, embedding: nn.Module) -> str | None:
        """Why `embedding` has no pixel patches to change, or None."""
        projection: Any = embedding.get_submodule(cls.wp_projection)
        if projection.kernel_size != projection.stride or set(projection.padding) != {0}:
            return f"its patches of {projection.kernel_size} pixels overlap, with a stride of {projection.stride}"
        if getattr(embedding, "dynamic_img_pad", False):
            return "it pads the images itself (dynamic_img_pad)"
        return None


class TimmPatchEmbed(PatchEmbedding):
    """The embedding of timm's ViT, DeiT, Swin and CaiT."""

    wp_forward_of = "timm.layers.patch_embed.PatchEmbed"
    wp_projection = "proj"
    flatten: bool
    output_fmt: str

    def wp_channels_first(self) -> bool:
        return not self.flatten and self.output_fmt == "NCHW"


class TimmOverlapPatchEmbed(PatchEmbedding):
    """The first embedding of timm's PVTv2."""

    wp_forward_of = "timm.models.pvt_v2.OverlapPatchEmbed"
    wp_projection = "proj"


class HuggingFacePatchEmbeddings(PatchEmbedding):
    """The embedding of HuggingFace's ViT."""

    wp_forward_of = "transformers.models.vit.modeling_vit.ViTPatchEmbeddings"
    wp_projection = "projection"


@dataclass(frozen=True)
class Embedding:
    """The patch embedding of one or more architectures in one library."""

    models: str
    forward: type[PatchEmbedding]
    attribute: str
    """What its model calls it; the later stages of a pyramid use the same class under another name."""
    homes: tuple[str, ...]
    """The modules whose classes may hold it; in others of the same library it may mean something else."""


EMBEDDINGS = (
    Embedding(
        models="timm VisionTransformer, timm Swin, timm CaiT",
        forward=TimmPatchEmbed,
        attribute="patch_embed",
        homes=tuple(
            f"timm.models.{home}" for home in ("vision_transformer", "deit", "swin_transformer", "cait", "_features")
        ),
    ),
    Embedding("timm PVTv2", TimmOverlapPatchEmbed, "patch_embed", ("timm.models.pvt_v2", "timm.models._features")),
    Embedding(
        "HuggingFace ViT", HuggingFacePatchEmbeddings, "patch_embeddings", ("transformers.models.vit.modeling_vit",)
    ),
)

_BY_CLASS = {embedding.forward.wp_forward_of: embedding for embedding in EMBEDDINGS}
_LIBRARIES = ("timm.models.", "transformers.models.")


def embeddings(model: nn.Module) -> list[tuple[str, nn.Module, Embedding]]:
    """The patch embedding `model` begins with, by name; of several models inside it, the one of each.

    Raises UnknownFamilyError where it has none that wellposed knows.
    """
    model = unwrapped(model)
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        embedding = _BY_CLASS.get(class_path(module))
        if embedding is None or readable_name(name).rpartition(".")[2] != embedding.attribute:
            continue
        home = library_class(modules[name.rpartition(".")[0]]).__module__
        if home.startswith(_LIBRARIES) and home not in embedding.homes:
            raise UnknownFamilyError(f"the patch embedding {name!r} is that of {home}, which is not known. {_known()}")
        found.append((readable_name(name), module, embedding))
    if not found:
        cls, own = library_class(model), getattr(model, "patch_embed", None)
        seen = f" (it has a {type(own).__name__})" if own is not None else ""
        raise UnknownFamilyError(f"{cls.__module__}.{cls.__qualname__} has no known patch embedding{seen}. {_known()}")
    return found


def _known() -> str:
    return "Known are those of " + ", ".join(embedding.models for embedding in EMBEDDINGS) + "."
