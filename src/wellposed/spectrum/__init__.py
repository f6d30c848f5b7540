"""Measures of matrices: pure functions on batches of them."""

from wellposed.spectrum.attention import AttentionJacobian as AttentionJacobian
from wellposed.spectrum.attention import attention_jacobian as attention_jacobian
from wellposed.spectrum.attention import weyl_condition_bound as weyl_condition_bound
from wellposed.spectrum.convolution import depthwise_singular_values as depthwise_singular_values
from wellposed.spectrum.extremes import extreme_singular_values as extreme_singular_values
from wellposed.spectrum.extremes import extreme_singular_values_of_product as extreme_singular_values_of_product
from wellposed.spectrum.jacobian import JacobianSpectrum as JacobianSpectrum
from wellposed.spectrum.jacobian import jacobian_spectrum as jacobian_spectrum
from wellposed.spectrum.measures import condition_number as condition_number
from wellposed.spectrum.measures import effective_rank as effective_rank
from wellposed.spectrum.measures import frobenius_norm as frobenius_norm
from wellposed.spectrum.measures import product_singular_values as product_singular_values
from wellposed.spectrum.measures import singular_values as singular_values
from wellposed.spectrum.measures import spectral_norm as spectral_norm
from wellposed.spectrum.measures import stable_rank as stable_rank
from wellposed.spectrum.modes import in_eval_mode as in_eval_mode
from wellposed.spectrum.ntk import NTK as NTK
from wellposed.spectrum.ntk import ntk as ntk
