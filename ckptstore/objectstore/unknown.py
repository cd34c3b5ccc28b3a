"""Options that a scheme does not know, told with what is near and what is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ckptstore.errors import InvalidInputError
from ckptstore.nearest import meant


def refuse_unknown(
    scheme: str,
    given: Iterable[str],
    known: Sequence[str],
    *,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that every name is known.

    Args:
        scheme: Of the URL: `s3`.
        given: The names.
        known: All that there are.
        elsewhere: What to do in place of a name that others know.

    Raises:
        InvalidInputError: Some are not; all of these are named.
    """
    unknown = sorted({str(name) for name in given if name not in known})
    if unknown:
        hints = [elsewhere[name] for name in unknown if name in elsewhere]
        raise InvalidInputError(
            f"storage_options has names that {scheme}:// does not know: {', '.join(unknown)}.{meant(unknown, known)}",
            hint=" ".join(hints) or f"Known are: {', '.join(known)}.",
        )
