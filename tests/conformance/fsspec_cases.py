"""What the tests of fsspec share."""

import secrets

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ckptstore.objectstore.via_fsspec import FsspecStore
from ckptstore.options import TransferOptions
from ckptstore.units import MIB

PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2)
HUSH = "hush-hush"


def opened(url, **options):
    protocol, _, root = url.partition("://")
    return FsspecStore(protocol, root, options=options, transfer=PARTS)


def registered(kind):
    """Return a protocol by which fsspec knows `kind` from now on."""
    protocol = f"odd-{secrets.token_hex(4)}"
    fsspec.register_implementation(protocol, type(kind.__name__, (kind,), {"protocol": protocol}))
    return protocol


class OpensAtOnce(LocalFileSystem):
    """Knows no commit: what is opened for writing is there."""

    def _open(self, path, mode="rb", **_):
        if "w" in mode:
            self.makedirs(self._parent(path), exist_ok=True)
        return open(path, mode)  # noqa: PTH123  (as a file system does)
