"""A store whose deletions hang, and a job that trains in one."""

import threading

from stoppable import Tiny

from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.training import Checkpointer, Keep, asked, keeping


class HangsInDelete(ForwardingStore):
    """Deletes when an event is set, and waits for it without end."""

    def __init__(self, inner, until):
        super().__init__(inner)
        self._until = until

    def delete(self, key):
        self._until.wait()
        return super().delete(key)


def train_where_deletions_hang(root):
    """Train a little, where nothing that is deleted is ever gone."""
    keeping.LAST_SECONDS = 0.5
    asked.open_root = lambda url, **_: HangsInDelete(open_store(url), threading.Event())
    tiny = Tiny()
    options = {"keep": Keep(last=2), "keep_grace_seconds": 0, "background": False, "proof_steps": 0}
    with Checkpointer(root, tiny.state, **options) as checkpointer:
        for _ in range(4):
            tiny.step()
            checkpointer.save()
