"""The base of all errors of these packages that a user can mend."""


class UserError(ValueError):
    """An error that the user can mend: value, reason, remedy.

    Commands print it and exit with status 2. Any other exception is a fault of the program.
    """
