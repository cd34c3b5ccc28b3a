"""What the tests of gs:// share."""

from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.via_gcsfs import GcsfsStore
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.units import MIB

HUSH = "hush-hush"
BUCKET = "/storage/v1/b/bucket"
QUICK = RetryOptions(attempts=3, first_pause_seconds=0.01, longest_pause_seconds=0.02, stall_timeout_seconds=5)
PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2, retry=QUICK)

CALLS = {
    "get": lambda store: store.get("a", max_bytes=10),
    "get_range": lambda store: store.get_range("a", start=0, length=5),
    "head": lambda store: store.head("a"),
    "list": lambda store: list(store.list("")),
    "create": lambda store: store.put("a", b"x", mode=PutMode.CREATE),
    "put": lambda store: store.put("a", b"x"),
    "delete": lambda store: store.delete("a"),
}


def opened(url, *, transfer=PARTS, **options):
    bucket, _, prefix = url.removeprefix("gs://").partition("/")
    return GcsfsStore(bucket, prefix, options=options, transfer=transfer)
