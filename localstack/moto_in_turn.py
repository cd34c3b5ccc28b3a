"""moto's server, in which one object is written at a time.

It looks whether a key is there and stores an object in two steps, in several threads: of two conditional creates at one
moment both could win, which Amazon's own never do.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

WRITES = ("put_object", "_key_response_post")  # the second one completes uploads
_turn = threading.Lock()


def _in_turn(act: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(act)
    def acts(*given: Any, **named: Any) -> Any:
        with _turn:  # the request's body was read before
            return act(*given, **named)

    return acts


if __name__ == "__main__":
    for _name in WRITES:
        setattr(S3Response, _name, _in_turn(getattr(S3Response, _name)))
    main()
