"""Products that break what is promised of saves, collections and signals; see `sabotage`."""

from __future__ import annotations

from ckptstore.errors import AccessDeniedError, UnavailableError
from ckptstore.format.records import Pin
from ckptstore.maintenance import collect_plan
from ckptstore.objectstore.patience import Patience
from ckptstore.protocol import commit, fold, once
from ckptstore.training.signals import Signals
from storage_writers import uploading


def no_fence(*_):
    """A job that lost its reign does not notice, and takes it back."""
    fold.Fold.fences = lambda *_: False


def no_read_back(*_):
    """Nobody looks what became of a request."""
    once.read_back = lambda *_, **__: (True, None)


def refusals_are_weather(*_):
    """Credentials that were refused are tried again some day."""
    upload = uploading.upload_shard

    def weather(*args, **options):
        try:
            return upload(*args, **options)
        except AccessDeniedError as error:
            raise UnavailableError(error.message) from error

    uploading.upload_shard = weather


def commits_unseen(*_):
    """What was sent is taken for stored."""
    commit.verify_stored = lambda *_: None


def no_limit_of_tries(*_):
    """Whatever is refused is tried again."""
    Patience.pause_after = lambda *_: 0.05


def no_pins(*_):
    """A collection knows of no pins."""
    marked = fold._marked
    fold._marked = lambda committed, record: committed if isinstance(record, Pin) else marked(committed, record)


def deaf(*_):
    """No signal is handled."""
    Signals.install = lambda _: False


def own_clock(*_):
    """A collector looks at its own clock."""
    collect_plan.time_of = lambda _, clock, __: clock.now().timestamp()
