"""The part of the desk that lets checkpoints go: what is retired, planned and collected. It only forwards."""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore.checkpoint import Checkpoint
from ckptstore.maintenance import collect
from ckptstore.maintenance.collect import Audit, Report, unaudited
from ckptstore.maintenance.collect_plan import GRACE_SECONDS, Plan, plan_collection
from ckptstore.maintenance.retention import Keep, retirable
from ckptstore.options import TransferOptions
from ckptstore.protocol.log import RunLog


class Retiring:
    """What a `CheckpointStore` does to let checkpoints go."""

    _log: RunLog
    _transfer: TransferOptions

    def _named(self, checkpoint: Checkpoint | str) -> Checkpoint:
        raise NotImplementedError

    def retire(self, *checkpoints: Checkpoint | str, reason: str = "") -> list[int]:
        """Let checkpoints go for ever, all of them or none; return which were not retired before. Nothing is deleted.

        `plan_collection` and `collect` delete what is retired.

        Args:
            checkpoints: Which, or what `get` finds them by: a name, or `name@seq`.
            reason: Why; it is recorded.

        Raises:
            InvalidInputError: They may not be retired: one is pinned, the newest, or the newest that was verified at
                level full; or fewer than two would be left; or they are more than 1000.
            NotFoundError: There is none, or it is retired already. UncommittedError: it was never committed.
            CommitUnknownError: Whether they are retired is not known; ask again.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: It was not done within the deadline. AccessDeniedError: the store refused.
            IntegrityError: The log is damaged; nothing was written.

        If killed: all of them are retired or none.
        """
        return collect.retire(self._log, [self._named(each).seq for each in checkpoints], reason=reason)

    def check_retirement(self, *checkpoints: Checkpoint | str) -> None:
        """Check that checkpoints may be retired now. Nothing is changed.

        Args:
            checkpoints: As for `retire`.

        Raises:
            InvalidInputError: They may not be retired: see `retire`.
            NotFoundError: There is none, or it is retired already. UncommittedError: it was never committed.
            IntegrityError: The log is damaged.
            UnsupportedError: A newer version wrote to the log.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        collect.check_retirable(self._log, [self._named(each).seq for each in checkpoints])

    def plan_retirement(self, keep: Keep) -> list[int]:
        """Return what a policy lets go of now, by seq. Nothing is changed.

        Args:
            keep: What is to be kept.

        Raises:
            IntegrityError: The log is damaged.
            UnsupportedError: A newer version wrote to the log.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        return retirable(self._log.read().whole(), keep)

    def retire_by(self, keep: Keep, *, shown: Sequence[int] | None = None, reason: str = "") -> list[int]:
        """Let go of what a policy does not keep; return which were retired. Nothing is deleted.

        Args:
            keep: What is to be kept.
            shown: Let go of nothing but these, of `plan_retirement`; None: of all that the policy does not keep.
            reason: Why; it is recorded. By default the policy itself.

        Raises:
            ConflictError: The policy keeps some of what was shown by now.
            CommitUnknownError: Whether they are retired is not known; ask again.
            NotFoundError: There is no run.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: It was not done within the deadline. AccessDeniedError: the store refused.
            IntegrityError: The log is damaged; nothing was written.

        If killed: all of them are retired or none, of each thousand.
        """
        return collect.retire_by(self._log, keep, shown=shown, reason=reason)

    def plan_collection(self, *, keep: Keep | None = None, grace_seconds: float = GRACE_SECONDS) -> Plan:
        """Return what a collection would do now: what it retires, deletes and aborts. Nothing is changed.

        Args:
            keep: What is to be kept; None: nothing is retired, and what is retired already is deleted.
            grace_seconds: How long ago, by the store's clock, a checkpoint was retired before its bytes go, and an
                orphan's newest object was stored. 0: at once, and no clock is asked.

        Raises:
            InvalidInputError: An argument is outside of what is allowed.
            IntegrityError: The log is damaged, or lost its tail: nothing may be deleted.
            UnsupportedError: A newer version wrote to the log.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.

        If killed: perhaps a small object under `probe/`, which nobody reads.
        """
        return plan_collection(self._log, keep=keep, grace_seconds=grace_seconds)

    def collect(
        self,
        *,
        digest: str,
        keep: Keep | None = None,
        grace_seconds: float = GRACE_SECONDS,
        reason: str = "",
        audit: Audit = unaudited,
    ) -> Report:
        """Plan again, and apply the plan if it is the one that was shown: retire, delete, record what is gone.

        Args:
            digest: Of the plan that was shown.
            keep: As it was when it was shown.
            grace_seconds: The same.
            reason: Why; it is recorded. By default the policy itself.
            audit: Told of deletions before they are sent. What it raises ends the collection.

        Raises:
            InvalidInputError: The digest or the grace is none; or the run is signed, and there is no key to sign with.
                Nothing was changed.
            ConflictError: The plan is another one now. Nothing was deleted.
            IntegrityError: The log is damaged, or lost its tail. Nothing was deleted.
            CommitUnknownError: Whether what was to be retired is retired is not known. Nothing was deleted.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: The store could not be read. AccessDeniedError: it refused. What cannot be deleted raises
                nothing: see the report.

        If killed: some of it is done, in this order: retired, deleted, recorded as gone. The next collection goes on.
        """
        return collect.collect(
            self._log,
            digest=digest,
            keep=keep,
            grace_seconds=grace_seconds,
            reason=reason,
            audit=audit,
            options=self._transfer,
        )
