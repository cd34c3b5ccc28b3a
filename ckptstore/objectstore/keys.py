"""What a key, a prefix and a range must look like, on every engine alike.

Nothing here expands, decodes or normalises: what is not in its plain form is refused, so that one key means one object
everywhere.
"""

from __future__ import annotations

from ckptstore.errors import InvalidInputError

LARGEST_END = 2**62


def fault_of_segments(text: str) -> str | None:
    """Return why `text` (segments joined by `/`) is no path in plain form, or None if it is one."""
    segments = text.split("/")
    if "" in segments:
        return "it has an empty segment"
    if "." in segments or ".." in segments:
        return "it has a segment `.` or `..`"
    if any(ord(character) < 32 or ord(character) == 127 for character in text):  # noqa: PLR2004  (ASCII control codes)
        return "it has a control character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it cannot be written as UTF-8"
    return None


def checked_key(key: str) -> str:
    """Return `key`.

    Raises:
        InvalidInputError: It is empty, starts or ends with `/`, has an empty, `.` or `..` segment, a control
            character, or is not UTF-8.
    """
    fault = fault_of_segments(key)
    if fault is not None:
        raise InvalidInputError(f"The key {key!r} cannot be used: {fault}.", key=key)
    return key


def checked_prefix(prefix: str) -> str:
    """Return `prefix`.

    Raises:
        InvalidInputError: It is neither empty nor a key with one `/` at its end.
    """
    if prefix:
        fault = "it does not end in `/`" if prefix[-1] != "/" else fault_of_segments(prefix[:-1])
        if fault is not None:
            raise InvalidInputError(f"The prefix {prefix!r} cannot be listed: {fault}.", prefix=prefix)
    return prefix


def checked_range(key: str, start: int, length: int) -> int:
    """Return where a range ends, the byte after its last one.

    No object is as long as `LARGEST_END`: more is asked of no server, because some compute with what they are asked.

    Raises:
        InvalidInputError: The range is negative or empty.
    """
    if start < 0 or length < 1:
        raise InvalidInputError(f"{key} cannot be read from {start} for {length} bytes.", key=key)
    return max(start + 1, min(start + length, LARGEST_END))
