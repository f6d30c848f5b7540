"""Fine-tuning of models that are already there, whole or by adapters."""
