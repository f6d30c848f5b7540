"""The one family of exceptions: every message says what was given, what was expected and what to do."""


class WellposedError(Exception):
    """Base of every error this library raises on purpose."""


class UnknownFamilyError(WellposedError, TypeError):
    """The model, or one of its blocks, is not laid out in a way `wellposed.families` knows."""


class InvalidArgumentError(WellposedError, ValueError):
    """An argument lies outside what the method is defined for."""


class UnsuitableModelError(WellposedError, ValueError):
    """The model is of a known family, but in a state this operation cannot work on."""


class RecipeMismatchError(WellposedError, ValueError):
    """Weights were trained under other changes than the model they were to be loaded into has."""


class ModelFileError(WellposedError, ValueError):
    """A saved model is missing, damaged, foreign or not to be trusted."""


class DataError(WellposedError, ValueError):
    """Data on disk is missing, damaged or laid out in another way than expected."""


class RunError(WellposedError, RuntimeError):
    """A run cannot start, go on or be written; what it has written so far is still there."""


class DivergedError(RunError):
    """The loss or a gradient is no longer a finite number."""
