"""The base of all errors of these packages that a user can mend, and how texts are shown."""

import re
from collections.abc import Sequence

_SECRET = re.compile(
    r"(:/+)[^/\s]+(?=@)"  # the user name and the password of an address
    r"|([?&#][\w-]*(?:token|key|secret|password)=|Bearer |\bhf_(?=[a-z0-9]{30}))[^&\s'\"]+",
    re.IGNORECASE,
)
# The last word of its name says that an option, or a key of JSON, has a secret or an address.
_NAME = r"(?:[\w.-]+[-_.])?(?:(?:api)?keys?|token|secrets?|passwords?|urls?|json|endpoint)"
_OPTION = re.compile(rf"--?{_NAME}", re.IGNORECASE)
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|\[[^\]]*\]|[^\s\"'\[{,}-][^\s,}]*)"
_PRIVATE = re.compile(
    rf"((?<![\w-]){_OPTION.pattern}(?:=|\s+)|[\"']{_NAME}[\"']\s*:\s*){_VALUE}(?:\s+{_VALUE})*",
    re.IGNORECASE,
)
# What a `pypi:` spec of a file in several pieces has after the first piece. It ends with a letter
# or a digit, because a full stop there is the sentence's.
_PIECES = re.compile(r"\+pypi:[^\s'\"#,;:)`]*(:[^\s'\"#,;:)`]+)*(?<=\w)(#\w+=\w+)?")


def masked(text: str) -> str:
    """The text with *** in place of passwords, keys in addresses, and tokens of the Hub."""
    return _SECRET.sub(lambda secret: f"{secret[1] or secret[2]}***", text)


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command's arguments as in `masked`, with *** in place of secrets and addresses in options.

    An argument may have options of its own, like --server_args, or JSON.
    """
    shown, private = [], False
    for argument in arguments:
        if argument.startswith("-"):
            private = _OPTION.fullmatch(argument) is not None
        elif private:  # --api-key takes several
            argument = "***"
        shown.append(_PRIVATE.sub(r"\1***", masked(argument)))
    return shown


def abridged(text: str) -> str:
    """The text with only the first piece of a file in several pieces, and the number of others."""
    return _PIECES.sub(lambda rest: f" and {rest[0].count('+pypi:')} more pieces", text)


class UserError(ValueError):
    """An error that the user can mend: value, reason, remedy; as text abridged, without secrets.

    Commands print it and exit with status 2. Any other exception is a fault of the program.
    """

    def __str__(self) -> str:
        return abridged(masked(super().__str__()))


class SourceError(UserError):
    """A spec that cannot be resolved: value, reason, remedy."""


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and the number of others."""
    shown = ", ".join(names[:5]) or "nothing"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def one_line(error: BaseException) -> str:
    """The beginning of an error's text, without line breaks and secrets."""
    return masked(" ".join(str(error).split()))[:300] or type(error).__name__
