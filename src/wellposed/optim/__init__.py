"""Optimizers."""

from wellposed.optim.soap import SOAP as SOAP
