"""A store that shows every call to a function before it happens. It lives with the other wrappers; drills use it too."""

from ckptstore.objectstore.wrappers.tapped import WRITES, Act, Call, Tap, TappedStore, TappedUpload

__all__ = ["WRITES", "Act", "Call", "Tap", "TappedStore", "TappedUpload"]
