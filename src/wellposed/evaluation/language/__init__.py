"""How well a language model answers: by the likelihood of each answer, by what it writes, and by its classes."""
