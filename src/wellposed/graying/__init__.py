"""Token Graying: raise the small singular values of a model's input tokens (arXiv 2505.01996)."""

from wellposed.graying.tensors import Graying as Graying
from wellposed.graying.tensors import gray as gray
from wellposed.graying.tokens import gray_tokens as gray_tokens
from wellposed.graying.tokens import ungray_tokens as ungray_tokens
