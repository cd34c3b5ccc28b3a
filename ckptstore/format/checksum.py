"""BLAKE3, and how the leaves of an item are hashed while its bytes pass."""

from __future__ import annotations

from blake3 import blake3

DIGEST_BYTES = 32

_Bytes = bytes | bytearray | memoryview


def digest(data: _Bytes) -> bytes:
    """Return the 32 bytes of BLAKE3 of `data`."""
    return blake3(data).digest()


def hexdigest(data: _Bytes) -> str:
    """Return BLAKE3 of `data` in hexadecimal."""
    return blake3(data).hexdigest()


class LeafHasher:
    """Hashes items leaf by leaf while their bytes pass, in pieces of any size. No byte is copied.

    `table` grows by 32 bytes with every leaf.
    """

    def __init__(self) -> None:
        self.table = bytearray()
        self._leaf_bytes = 1
        self._room = 0
        self._open: blake3 | None = None

    def begin(self, leaf_bytes: int) -> None:
        """Start an item whose leaves have `leaf_bytes`."""
        self._leaf_bytes = self._room = leaf_bytes

    def update(self, data: memoryview) -> None:
        """Take the item's next bytes."""
        start, end = 0, data.nbytes
        while start < end:
            piece = data if not start and end <= self._room else data[start : start + self._room]
            start += piece.nbytes
            if piece.nbytes == self._leaf_bytes:
                self.table += digest(piece)
                continue
            if self._open is None:
                self._open = blake3(piece)
            else:
                self._open.update(piece)
            self._room -= piece.nbytes
            if not self._room:
                self.finish()

    def finish(self) -> None:
        """End the item: its last leaf may be short, and an empty item has none."""
        if self._open is not None:
            self.table += self._open.digest()
            self._open = None
        self._room = self._leaf_bytes
