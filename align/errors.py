"""The base of all errors of these packages that a user can mend."""

import re

_SECRET = re.compile(
    r"(:/+)[^/\s]+(?=@)"  # the user name and the password of an address
    r"|([?&#][\w-]*(?:token|key|secret|password)=|Bearer |\bhf_(?=[a-z0-9]{30}))[^&\s'\"]+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """The text with *** in place of passwords, keys in addresses, and tokens of the Hub."""
    return _SECRET.sub(lambda secret: f"{secret[1] or secret[2]}***", text)


class UserError(ValueError):
    """An error that the user can mend: value, reason, remedy; as text without secrets.

    Commands print it and exit with status 2. Any other exception is a fault of the program.
    """

    def __str__(self) -> str:
        return masked(super().__str__())
