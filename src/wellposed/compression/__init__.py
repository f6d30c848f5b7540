"""Adapters in k bits: codebooks, packed files, and curves of quality over size (arXiv 2505.21895)."""

from wellposed.compression.compressing import Compression as Compression
from wellposed.compression.compressing import LayerErrors as LayerErrors
from wellposed.compression.compressing import compress as compress
from wellposed.compression.compressing import expand as expand
from wellposed.compression.files import read_packed as read_packed
from wellposed.compression.loading import load_adapter as load_adapter
from wellposed.compression.merged import MergedShelf as MergedShelf
from wellposed.compression.packed import PackedAdapter as PackedAdapter
from wellposed.compression.packed import PackedTensor as PackedTensor
from wellposed.compression.quantizers import Quantized as Quantized
from wellposed.compression.quantizers import normal_levels as normal_levels
from wellposed.compression.quantizers import quantize as quantize
from wellposed.compression.rates import bd_rate as bd_rate
from wellposed.compression.rates import dominated as dominated
from wellposed.compression.shelf import AdapterShelf as AdapterShelf
from wellposed.compression.stable_ranks import stable_rank_bounds as stable_rank_bounds
from wellposed.compression.weights import packed_weight as packed_weight
