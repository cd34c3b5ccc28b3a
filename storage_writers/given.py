"""What a caller gives to save or load, checked where DCP would end in an error that names nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckptstore.errors import CkptStoreError, InvalidInputError, UnsupportedError

_WHOLE = "__ckptstore_whole__"


def whole(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state, whose elements have been asked for theirs already, as one element of another.

    DCP logs and asks each element of what it is given, 0.1 ms a time. Only our planners know what to make of this.
    """
    return {_WHOLE: state_dict}


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what `whole` was given; any other state as it is."""
    return state_dict[_WHOLE] if [*state_dict] == [_WHOLE] else state_dict


def check_given(state_dict: object, side: object, kind: type) -> None:
    """Check a state and what saves or loads it.

    Raises:
        InvalidInputError: The state is no dict, or the writer or reader is none of ours.
    """
    if not isinstance(state_dict, MutableMapping):
        raise InvalidInputError(
            f"A state must be a dict, not {state_dict!r:.80}.", hint="Pass {'model': model.state_dict(), ...}."
        )
    if not isinstance(side, kind):
        raise InvalidInputError(
            f"This needs a {kind.__name__}, not {side!r:.80}.", hint=f"Pass storage_writers.{kind.__name__}(URL)."
        )


@contextlib.contextmanager
def naming_what_cannot_be_copied(state_dict: dict[str, Any]) -> Iterator[None]:
    """Let out as ours, with the key, what the copy of a state into host memory raises because of a value.

    Raises:
        UnsupportedError: A value cannot be copied.
    """
    try:
        yield
    except (CkptStoreError, MemoryError):  # that there is no room says nothing of the value
        raise
    except Exception as error:
        values = flatten_state_dict(state_dict)[0]
        key = next((key for key, value in values.items() if not _can_be_copied(value)), None)
        if key is None:
            raise
        raise UnsupportedError(
            f"The value of {key} cannot be copied for a background save: {type(error).__name__}: {error!s:.300}",
            hint="Leave it out of the state, or store plain values instead.",
            key=key,
        ) from error


def _can_be_copied(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    try:
        copy.deepcopy(value)
    except Exception:  # noqa: BLE001  (whatever a value of the user's raises)
        return False
    return True
