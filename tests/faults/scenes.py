"""A run behind a proxy: it is saved to through the proxy, and looked at past it."""

from __future__ import annotations

import contextlib
import json
import re
import threading

import torch

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import UnsupportedError
from ckptstore.events import Committed
from ckptstore.format.layout import parse_data_key
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions, RetryOptions, TransferOptions
from ckptstore.protocol.capable import PROBED, place_of
from ckptstore.testing.tapped import TappedStore
from ckptstore.units import MIB
from localstack.faults import Answer, s3_error

QUICK = RetryOptions(first_pause_seconds=0.02, longest_pause_seconds=0.5, deadline_seconds=30, stall_timeout_seconds=10)
"""Pauses as short as a test can have them."""
LOG = LogOptions(deadline_seconds=30)

OTHERS = re.compile(r"run\.json|latest\.json|log/\d{12}\.json|state/\d{12}\.json|probe/[0-9a-f]{32}/\w+")


def transfer(retry=QUICK, **options):
    """Return how bytes are moved: in parts as small as they may be."""
    return TransferOptions(**{"part_bytes": 5 * MIB, "retry": retry} | options)


class Scene:
    """A place, the proxy before its server, and what was saved there.

    Args:
        place: Where the run is.
        proxy: Before its server.
        client: Of the server, and not ours.
    """

    def __init__(self, place, proxy, client):
        self.place, self.proxy, self.client = place, proxy, client
        self.through = place.through(proxy.endpoint)
        self.told, self.states, self.rules = [], {}, contextlib.ExitStack()
        PROBED.add(place_of(self.through.store()))  # has its own tests; racing creates take a server seconds

    @property
    def prefix(self):
        """What the server's own keys begin with."""
        return self.place.url.removeprefix(f"{self.place.server.scheme}://{self.place.server.bucket}/") + "/"

    def writer(self, tap=None, *, moves=None, log=LOG, **options):
        """Return a writer through the proxy. `tap` sees every call of its store."""
        moves = moves or transfer()
        if tap is None:
            root, access = self.through.url, self.through.access
        else:
            root, access = TappedStore(open_store(self.through.url, **self.through.access, transfer=moves), tap), {}
        return sw.CkptStoreWriter(root, **access, transfer=moves, log=log, observer=self.told.append, **options)

    def open(self, *, moves=None):
        """Return the run as a reader finds it through the proxy."""
        return CheckpointStore.open(self.through.url, **self.through.access, transfer=moves or transfer())

    def save(self, step, writer=None, *, megabytes=0):
        """Save `step-STEP`, whose shard has so many MiB and a little more."""
        generator = torch.Generator().manual_seed(step)
        state = {"small": torch.randn(1000, generator=generator), "step": torch.tensor([step])}
        if megabytes:
            state["large"] = torch.randint(2**31, (megabytes * MIB // 4,), generator=generator, dtype=torch.int32)
        self.states[f"step-{step}"] = state
        sw.save(state, checkpoint_id=f"step-{step}", storage_writer=writer or self.writer())

    def upon(self, operation, key, action, **where):
        """Return a tap that puts a rule in force when such a call first comes for a key; and the rules, by key.

        A rule stays in force until the scene ends. So requests are met by what they are about, also where the proxy
        does not see it: Google's multipart uploads name the object in the body.
        """
        rules = {}

        def tap(call, act):
            if call.operation == operation and re.search(key, call.key) and call.key not in rules:
                rules[call.key] = self.rules.enter_context(self.proxy.rule(action, **where))
            return act()

        return tap, rules

    @property
    def committed(self):
        """What the observer was told of commits: names and slots."""
        return [(event.checkpoint_id, event.seq) for event in self.told if isinstance(event, Committed)]

    def log(self):
        """Return the log, past the proxy: kinds and terms."""
        found = CheckpointStore.open(self.place.url, **self.place.access).records()
        return [f"{entry.record.KIND} {entry.record.term}" for entry in found]

    def refusal(self, status, code):
        """Return an error as this scene's server words it."""
        if self.place.server.scheme == "s3":
            return s3_error(status, code)
        said = {"error": {"code": status, "message": code, "errors": [{"reason": code, "message": code}]}}
        return Answer(status, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def check(self, *names):
        """Check, past the proxy, that exactly these are committed, with the right bytes; and that all has its owner."""
        store = CheckpointStore.open(self.place.url, **self.place.access)
        found = {each.checkpoint_id: each for each in store.checkpoints()}
        assert sorted(found) == sorted(names)
        assert len(store.checkpoints()) == len(names)
        for name, checkpoint in found.items():
            state = self.states[name]
            assert sorted(checkpoint.keys) == sorted(state)
            for key, tensor in state.items():
                assert checkpoint.read(key).tobytes() == tensor.numpy().tobytes(), f"{name}, {key}"
        self.check_owners(store)

    def check_owners(self, store=None):
        """Check that the server holds nothing of this run that nobody owns and nobody lists."""
        store = store or CheckpointStore.open(self.place.url, **self.place.access)
        owners = {str(each.committed.commit.prefix) for each in store.checkpoints(include_set_aside=True)}
        owners |= {str(each.stem) for each in store.uncommitted()}
        for key in self.objects():
            data = parse_data_key(key)
            assert OTHERS.fullmatch(key) if data is None else str(data.stem) in owners, key
        with contextlib.suppress(UnsupportedError):  # Google's server does not tell, and forgets by itself
            listed = [(each.key, each.upload_id) for each in self.place.store().list_uploads("")]
            assert sorted(listed) == self.uploads()

    def objects(self):
        """Return the keys that the server has of this run, asked by a client that is not ours."""
        bucket = self.place.server.bucket
        if self.place.server.scheme == "gs":
            names = [blob.name for blob in self.client.list_blobs(bucket, prefix=self.prefix)]
        else:
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=self.prefix)
            names = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return [name.removeprefix(self.prefix) for name in names]

    def uploads(self):
        """Return the uploads that the server holds open for this run: keys and ids."""
        if self.place.server.scheme == "gs":
            return []
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.place.server.bucket)
        found = [(each["Key"], each["UploadId"]) for page in pages for each in page.get("Uploads", [])]
        return sorted((key.removeprefix(self.prefix), name) for key, name in found if key.startswith(self.prefix))

    def asked(self, method=None, path="", query=""):
        """Return the requests of this run that the proxy saw."""
        return [
            seen
            for seen in self.proxy.seen
            if method in (None, seen.method) and re.search(path, seen.path) and re.search(query, seen.query)
        ]


def at_once(*acts):
    """Do all this at the same time, and raise what any of them raises."""
    failures = []

    def kept(act):
        try:
            act()
        except BaseException as error:  # noqa: BLE001  (it is raised by whoever waits)
            failures.append(error)

    threads = [threading.Thread(target=kept, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
