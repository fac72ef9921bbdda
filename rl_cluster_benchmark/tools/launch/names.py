"""Names that users give: what may stand in a job script, in a file name, behind ssh. Others are refused."""

from __future__ import annotations

import argparse
import re

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ODD_IN_A_HOST = frozenset("'\"`$\\;&<>|(){}*?!#=,")  # what shells act on; ssh lets ProxyCommand and the like have it
LONGEST_FILE_NAME = 60


def line(text: str) -> str:
    """Return the text if it can stand in a line of its own (a type for argparse)."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty text is not allowed; leave the option out for its default")
    if not is_line(text):
        raise argparse.ArgumentTypeError(
            f"{text!a} is not allowed; it must be one line of text without control characters"
        )
    return text


def is_line(text: str) -> bool:
    try:
        text.encode()  # bytes on the command line that are not UTF-8 come as surrogates
    except UnicodeEncodeError:
        return False
    return not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", text)


def variable(text: str) -> str:
    """Return NAME or NAME=VALUE of an environment variable (a type for argparse)."""
    name, equals, value = text.partition("=")
    if not VARIABLE.fullmatch(name) or "\0" in value:
        shown = f"{name}=..." if equals else name  # a value may be a secret
        raise argparse.ArgumentTypeError(f"{shown!a} is not allowed; it must be NAME, or NAME=VALUE where that is said")
    return text


def is_host(name: str) -> bool:
    """Return whether a name can only be a machine's: never an option of ssh, never a command of a shell."""
    parts = name.split("@")
    return (
        is_line(name)
        and not ODD_IN_A_HOST & set(name)
        and not any(c.isspace() for c in name)
        and all(part and not part.startswith("-") for part in parts)
    )


def file_name(text: str) -> str:
    """Return a name for a file that begins like this text."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-")[:LONGEST_FILE_NAME] or "job"
