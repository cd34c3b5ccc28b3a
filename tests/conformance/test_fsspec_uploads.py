"""Uploads through fsspec: what is published, what is left, and whose they are."""

import errno
import gc
import os

import fsspec
import pytest
from forks import end_after
from fsspec.spec import AbstractBufferedFile
from fsspec_cases import HUSH, OpensAtOnce, opened, registered

from ckptstore.errors import IntegrityError, OutcomeUnknownError, UnsupportedError
from ckptstore.testing.conformance_uploads import UploadConformance
from ckptstore.units import MIB

Uploads = UploadConformance  # by this name it is no engine of the table


class TestWithoutCommit(Uploads):
    tells_uploads = False

    @pytest.fixture
    def open_again(self, tmp_path):
        protocol = registered(OpensAtOnce)
        return lambda: opened(f"{protocol}://{tmp_path}/run")


class Full(OpensAtOnce):
    """There is room for a first piece only."""

    def _open(self, path, mode="rb", **more):
        file = super()._open(path, mode, **more)
        if "w" not in mode:
            return file
        return _Short(file)


class _Short:
    def __init__(self, file):
        self._file = file

    def write(self, data):
        if self._file.tell():
            raise OSError(errno.ENOSPC, HUSH)
        return self._file.write(data)

    def close(self):
        self._file.close()

    __enter__ = lambda self: self  # noqa: E731  (short)
    __exit__ = lambda self, *_: self.close()  # noqa: E731  (short)


class Cuts(OpensAtOnce):
    """Loses the end of what is written, and says nothing."""

    def pipe_file(self, path, value, **_):
        super().pipe_file(path, value[:-1])


@pytest.mark.parametrize(
    ("kind", "size", "expected"), [(Full, 11 * MIB, OutcomeUnknownError), (Cuts, 10, IntegrityError)]
)
def test_of_an_upload_that_fails_nothing_is_left(tmp_path, kind, size, expected):
    store = opened(f"{registered(kind)}://{tmp_path}/run")
    with pytest.raises(expected), store.open_upload("data/0/shard", size=size) as upload:  # noqa: PT012  (either)
        upload.write(bytes(size))
        upload.complete()
    assert list(store.list("")) == []


class SendsAndPublishes(OpensAtOnce):
    """Sends pieces, of which the second fails, and publishes what it has when it is closed."""

    published, discarded = (), 0

    def _open(self, path, mode="rb", **more):
        return _Sent(self, path, mode, block_size=MIB) if "w" in mode else super()._open(path, mode, **more)


class _Sent(AbstractBufferedFile):
    sent = 0

    def _initiate_upload(self):
        pass

    def _upload_chunk(self, final=False):  # noqa: FBT002  (fsspec's)
        kind = type(self.fs)
        if not final and self.sent:
            raise OSError(errno.ENOSPC, HUSH)
        self.sent += 1
        if final:
            kind.published += (self.path,)

    def discard(self):
        type(self.fs).discarded += 1

    commit = AbstractBufferedFile.commit


def test_what_closing_would_publish_is_not_closed_when_a_piece_fails(tmp_path):
    protocol = registered(SendsAndPublishes)
    kind = fsspec.get_filesystem_class(protocol)
    store = opened(f"{protocol}://{tmp_path}/run")
    with pytest.raises(OutcomeUnknownError), store.open_upload("data/0/shard", size=11 * MIB) as upload:  # noqa: PT012  (either)
        upload.write(bytes(11 * MIB))
        upload.complete()
    del upload
    gc.collect()
    assert kind.published == ()
    assert kind.discarded


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_an_upload_leaves_no_temporaries(tmp_path, monkeypatch, protocol):
    temporaries = tmp_path / "temporaries"
    temporaries.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporaries))
    store = opened(f"{protocol}://{tmp_path}/run")
    for completes in (True, False):
        with store.open_upload(f"{completes}", size=11 * MIB) as upload:
            upload.write(bytes(11 * MIB))
            if completes:
                upload.complete()
    assert list(temporaries.iterdir()) == []
    assert [info.key for info in store.list("")] == ["True"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_a_forked_child_leaves_its_parents_upload_alone(tmp_path, protocol):
    store, body = opened(f"{protocol}://{tmp_path}/run"), os.urandom(11 * MIB)
    with store.open_upload("a", size=len(body)) as upload:
        upload.write(body[:MIB])
        pid = os.fork()
        if not pid:
            end_after(20)
            try:
                upload.abort()
                upload.write(body[MIB:])
            except UnsupportedError:
                os._exit(1)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        upload.write(body[MIB:])
        upload.complete()
    assert store.get("a", max_bytes=len(body)) == body
