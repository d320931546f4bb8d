"""The base of all errors of these packages that a user can mend, and how texts are shown."""

import re

_SECRET = re.compile(
    r"(:/+)[^/\s]+(?=@)"  # the user name and the password of an address
    r"|([?&#][\w-]*(?:token|key|secret|password)=|Bearer |\bhf_(?=[a-z0-9]{30}))[^&\s'\"]+",
    re.IGNORECASE,
)
# What a `pypi:` spec of a file in several pieces has after the first piece. It ends with a letter
# or a digit, because a full stop there is the sentence's.
_PIECES = re.compile(r"\+pypi:[^\s'\"#,;:)`]*(:[^\s'\"#,;:)`]+)*(?<=\w)(#\w+=\w+)?")


def masked(text: str) -> str:
    """The text with *** in place of passwords, keys in addresses, and tokens of the Hub."""
    return _SECRET.sub(lambda secret: f"{secret[1] or secret[2]}***", text)


def abridged(text: str) -> str:
    """The text with only the first piece of a file in several pieces, and the number of others."""
    return _PIECES.sub(lambda rest: f" and {rest[0].count('+pypi:')} more pieces", text)


class UserError(ValueError):
    """An error that the user can mend: value, reason, remedy; as text abridged, without secrets.

    Commands print it and exit with status 2. Any other exception is a fault of the program.
    """

    def __str__(self) -> str:
        return abridged(masked(super().__str__()))
