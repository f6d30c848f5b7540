"""Attention without softmax: polynomial and other element-wise functions of the logits (arXiv 2410.18613)."""

from wellposed.attention.functional import polynomial_attention as polynomial_attention
from wellposed.attention.functional import relu_attention as relu_attention
from wellposed.attention.functional import sigmoid_attention as sigmoid_attention
from wellposed.attention.functional import softmax_attention as softmax_attention
from wellposed.attention.replacing import use_attention as use_attention
from wellposed.attention.specs import Polynomial as Polynomial
from wellposed.attention.specs import Relu as Relu
from wellposed.attention.specs import Sigmoid as Sigmoid
from wellposed.attention.specs import Softmax as Softmax
