"""Optimizers and learning rates."""

from wellposed.optim.choosing import BETAS as BETAS
from wellposed.optim.choosing import LEARNING_RATES as LEARNING_RATES
from wellposed.optim.choosing import make_optimizer as make_optimizer
from wellposed.optim.schedules import cosine_with_warmup as cosine_with_warmup
from wellposed.optim.soap import SOAP as SOAP
