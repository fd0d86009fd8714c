"""What fedual raises: every error is a `FedualError` whose message names the value, the cause and the remedy."""


class FedualError(Exception):
    """Base of all errors that fedual raises on purpose; the command line prints it without a traceback."""


class InputError(FedualError, ValueError):
    """An argument, a setting or a shape that cannot be used, refused before any work starts."""


class DataError(FedualError):
    """A data file that is missing, damaged, truncated or not what its name says."""


class DomainError(FedualError, ArithmeticError):
    """Parameters outside the domain of their family, e.g. a precision that is not positive."""


class NotConvergedError(FedualError, ArithmeticError):
    """A solver that used up its iterations before its stopping rule was met."""
