"""No room, no quota, a place that takes no writes: typed, nothing is committed or left, and the next save goes on."""

import errno
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from places import at
from refusals import checked, command, raised, told
from states import blank, same

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import AccessDeniedError, UnavailableError, UnsupportedError
from ckptstore.options import LogOptions, RetryOptions, TransferOptions
from ckptstore.units import KIB, MIB
from localstack.faults import Answer, s3_error

QUICK = RetryOptions(attempts=3, first_pause_seconds=0.01, longest_pause_seconds=0.05)
PARTS = TransferOptions(part_bytes=5 * MIB, retry=QUICK)
DISK_BYTES = MIB
PAGE_BYTES = 4 * KIB
MOUNT = Path("/bin/mount")


def state(value, size):
    return {"w": torch.full((size // 4,), float(value)), "step": value}


def save(url, value, size, **options):
    sw.save(state(value, size), checkpoint_id=f"step-{value}", storage_writer=sw.CkptStoreWriter(url, **options))


def check_holds(url, values, size, **access):
    """Check that exactly these checkpoints are committed, and that each is whole."""
    store = CheckpointStore.open(url, **access)
    assert [each.checkpoint_id for each in store.checkpoints()] == [f"step-{value}" for value in values]
    for value in values:
        assert store.verify(store.get(f"step-{value}"), level="full").ok
        found = blank(state(0, size))
        sw.load(found, storage_reader=sw.CkptStoreReader(url, checkpoint_id=f"step-{value}", **access))
        assert same(found, state(value, size))


def temporaries(root):
    return [path for path in Path(root).rglob(".*") if path.is_file()]


@pytest.fixture
def mounted(tmp_path):
    """Return a function that mounts a disk of 1 MiB at a path."""
    at = []

    def mounted(path):
        path.mkdir(exist_ok=True)
        words = [MOUNT, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
        if not MOUNT.exists() or subprocess.run(words, check=False, capture_output=True).returncode:
            pytest.skip("Mounting is not allowed here; the limit on a file's size is tested all the same.")
        at.append(path)
        return path

    yield mounted
    for path in at:
        subprocess.run([f"{MOUNT.parent}/umount", str(path)], check=True)


def test_a_full_disk_fails_the_save_and_the_next_one_goes_on_when_there_is_room(mounted, tmp_path):
    root = mounted(tmp_path / "disk") / "run"
    save(root, 1, 100 * KIB)
    error = told(lambda: save(root, 2, 2 * MIB), UnavailableError, "rank-00000.safetensors", "ENOSPC")
    assert error.facts["errno"] == errno.ENOSPC
    assert error.facts["path"].startswith(str(root))
    assert "Make room" in error.hint
    assert temporaries(root) == []
    check_holds(root, [1], 100 * KIB)
    save(root, 3, 100 * KIB)
    check_holds(root, [3, 1], 100 * KIB)


def test_whatever_a_full_disk_has_no_room_for_any_more_the_save_is_whole_or_absent(mounted, tmp_path):
    """I11: the room ends at each page that a save takes, one after the other."""
    disk = mounted(tmp_path / "disk")
    root, filler, committed = disk / "run", disk / "filler", [1]
    save(root, 1, PAGE_BYTES)
    for step in range(2, 30):
        free = os.statvfs(disk).f_bavail * PAGE_BYTES
        filler.write_bytes(bytes(free - (step - 2) // 2 * PAGE_BYTES))
        error = raised(lambda step=step: save(root, step, PAGE_BYTES, log=LogOptions(deadline_seconds=0.2)))
        if error is None:
            committed.insert(0, step)
        else:
            checked(sw.cause(error), UnavailableError)
        filler.unlink()
        assert temporaries(root) == []
        assert [each.checkpoint_id for each in CheckpointStore.open(root).checkpoints()] == [
            f"step-{value}" for value in committed
        ]
    assert 1 < len(committed) < 29
    save(root, 30, PAGE_BYTES)
    check_holds(root, [30, *committed], PAGE_BYTES)


LIMITED = """
    import resource, signal, sys
    import torch
    import storage_writers as sw
    from ckptstore import CheckpointStore
    from ckptstore.errors import UnavailableError

    def save(value, size):
        state = {"w": torch.full((size // 4,), float(value)), "step": value}
        sw.save(state, checkpoint_id=f"step-{value}", storage_writer=sw.CkptStoreWriter(sys.argv[1]))

    save(1, 100 << 10)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        save(2, 2 << 20)
    except UnavailableError as error:
        print(error.facts["errno"], error.facts["path"].startswith(sys.argv[1]), "Make room" in error.hint)
    print([each.checkpoint_id for each in CheckpointStore.open(sys.argv[1]).checkpoints()])
    save(3, 100 << 10)
"""


def in_a_process(code, *arguments):
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_limit_on_the_size_of_files_fails_the_save_and_the_next_one_goes_on(tmp_path):
    root = tmp_path / "run"
    assert in_a_process(LIMITED, root) == [f"{errno.EFBIG} True True", "['step-1']"]
    assert temporaries(root) == []
    check_holds(root, [3, 1], 100 * KIB)


READ_ONLY = """
    import os, sys, tempfile
    import torch
    import storage_writers as sw
    from ckptstore import CheckpointStore
    from ckptstore.errors import AccessDeniedError

    def save(root, value):
        sw.save({"w": torch.full((64,), value), "step": 1}, checkpoint_id="b", storage_writer=sw.CkptStoreWriter(root))

    with tempfile.TemporaryDirectory() as elsewhere:
        save(f"{elsewhere}/run", 1.0)  # all that is imported late is imported then
    if os.geteuid() == 0:
        os.seteuid(65_534)
    try:
        save(sys.argv[1], 2.0)
    except AccessDeniedError as error:
        print(error.facts["errno"], error.facts["path"].startswith(sys.argv[1]))
    found = {"w": torch.zeros(25_600), "step": 0}
    sw.load(found, storage_reader=sw.CkptStoreReader(sys.argv[1]))
    print(found["step"], CheckpointStore.open(sys.argv[1]).latest().checkpoint_id)
"""


def test_a_directory_that_may_not_be_written_to_is_read_and_says_so_when_it_is_saved_to():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be read by nobody else
        root = Path(folder) / "run"
        save(root, 1, 100 * KIB)
        before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        for path in (Path(folder), *before, root):
            path.chmod(0o555 if path.is_dir() else 0o444)
        assert in_a_process(READ_ONLY, root) == [f"{errno.EACCES} True", "1 step-1"]
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
        for path in (Path(folder), root, *before):
            path.chmod(0o755)


def test_a_disk_that_is_mounted_for_reading_is_read_and_says_so_when_it_is_saved_to(mounted, tmp_path):
    disk = mounted(tmp_path / "disk")
    save(disk / "run", 1, 100 * KIB)
    subprocess.run([MOUNT, "-o", "remount,ro", str(disk)], check=True)
    error = told(lambda: save(disk / "run", 2, 100 * KIB), AccessDeniedError, "EROFS")
    assert (error.facts["errno"], error.facts["path"].startswith(str(disk))) == (errno.EROFS, True)
    check_holds(disk / "run", [1], 100 * KIB)
    for name in ("ls", "latest", "verify"):
        assert command(name, disk / "run")[0] == 0


OUT_OF_ROOM = {"storage": s3_error(507, "XMinioStorageFull"), "quota": s3_error(403, "QuotaExceeded")}
FULL = {
    "obstore-seaweedfs": OUT_OF_ROOM,
    "s3fs-seaweedfs": OUT_OF_ROOM,
    "gcsfs-fakegcs": {"storage": Answer(507)},
    "obstore-azurite": {"storage": Answer(507)},
}


def request_for(place, what):
    """Return the request that stores a part of the save."""
    if place.server.scheme != "gs":
        return {"method": "PUT", "path": {"shard": "rank-0", "manifest": "part-0", "commit": "log/|log%2F"}[what]}
    # There the names stand in the bodies. A shard is sent in chunks, and of what is small the manifest comes first.
    kind = "resumable" if what == "shard" else "multipart"
    return {"method": "POST", "query": f"uploadType={kind}", "after": int(what == "commit")}


@pytest.mark.parametrize("what", ["shard", "manifest", "commit"])
@pytest.mark.parametrize(
    ("place", "full"), [at(name, full) for name in FULL for full in FULL[name]], indirect=["place"]
)
def test_a_store_that_has_no_room_fails_the_save_and_the_next_one_goes_on_when_there_is_some(
    place, full, proxied, what
):
    """Moto and memory are never full."""
    size, proxy = 12 * MIB, proxied(place.server)
    there = place.probed().through(proxy.endpoint)
    save(place.url, 1, size, transfer=PARTS, **place.access)
    answer = FULL[f"{place.engine}-{place.server.name.replace('-', '')}"][full]
    saving = {"transfer": PARTS, "log": LogOptions(deadline_seconds=1), **there.access}
    with proxy.rule(answer, **request_for(place, what)) as refused:
        error = told(lambda: save(there.url, 2, size, **saving), UnavailableError)
    assert refused.hits
    assert (error.facts["status"], "Make room" in error.hint) == (answer.status, True)
    try:
        assert list(place.store().list_uploads("")) == []
    except UnsupportedError:
        assert place.server.scheme in ("gs", "az")
    check_holds(place.url, [1], size, **place.access)
    save(there.url, 3, size, transfer=PARTS, **there.access)
    check_holds(place.url, [3, 1], size, **place.access)
