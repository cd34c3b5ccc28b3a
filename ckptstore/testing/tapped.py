"""A store that shows every call to a function before it happens: see the other wrappers, where it lives."""

from ckptstore.objectstore.wrappers.tapped import WRITES, Act, Call, Tap, TappedStore, TappedUpload

__all__ = ["WRITES", "Act", "Call", "Tap", "TappedStore", "TappedUpload"]
