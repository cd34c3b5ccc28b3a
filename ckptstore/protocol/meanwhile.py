"""What was retired while somebody read it: that its bytes are gone is no damage, and no absent checkpoint."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from ckptstore.errors import CkptStoreError, ConflictError, IntegrityError
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import RunLog


@contextlib.contextmanager
def reading(log: RunLog, committed: Committed) -> Iterator[None]:
    """Let damage out as what it is: none, if the checkpoint was retired meanwhile.

    Raises:
        ConflictError: It was retired, see `check_kept`.
        CkptStoreError: The block failed.
    """
    try:
        yield
    except IntegrityError as error:
        check_kept(log, committed, error, done="read")
        raise


def check_kept(log: RunLog, committed: Committed, error: IntegrityError, *, done: str) -> None:
    """Check that what looks damaged was not retired while it was read. Reads the log once more.

    Where the log cannot be read nobody knows, and what was found stands.

    Args:
        log: Of the run.
        committed: What was read.
        error: What was found.
        done: What was done with it: `loaded`, say.

    Raises:
        ConflictError: It was retired. A job that takes this for an absent checkpoint would begin anew.
    """
    try:
        commits = log.refresh().commits
    except CkptStoreError:
        return
    if committed.seq not in commits:
        url = shlex.quote(log.store.url)
        raise ConflictError(
            f"{committed.exact_name} was retired while it was {done}, so its bytes may be gone: {error.message}",
            hint=f"Take another one: `ckptstore ls {url}` lists them. A pin keeps one for as long as it is read.",
            **error.facts,
        ) from error
