"""The Google server that goes by the manual, as a server of a test's place."""

from __future__ import annotations

from types import SimpleNamespace

from gcs_by_the_book import Gcs


class BookServer:
    """What `places` and `scenes` ask of a server."""

    name, scheme, bucket = "by the book", "gs", "bucket"

    def __init__(self, gcs: Gcs):
        self.gcs, self.endpoint = gcs, gcs.endpoint

    def url(self, prefix):
        return f"gs://{self.bucket}/{prefix}"

    def options(self, endpoint=None):
        return {"token": "anon", "endpoint_url": endpoint or self.endpoint}

    def client(self):
        def list_blobs(_bucket, prefix):
            return [SimpleNamespace(name=name) for name in sorted(self.gcs.objects) if name.startswith(prefix)]

        return SimpleNamespace(list_blobs=list_blobs, close=lambda: None)
