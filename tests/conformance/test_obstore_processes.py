"""obstore in processes that fork, and in those that are killed."""

import re
import signal
import subprocess
import sys
import textwrap

import pytest
from obstore.store import S3Store

from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.credentials import FromEnvironment
from ckptstore.objectstore.obstore_errors import translating
from ckptstore.objectstore.urls import open_store
from ckptstore.units import MIB


def run(code, *arguments):
    """Run code in a process of its own; return its exit status and what it printed."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


FORKED = """
    import os, sys
    from ckptstore.objectstore.urls import open_store
    store = open_store(sys.argv[1])
    if sys.argv[2] == "used":
        store.put("a", b"parent")
    child = os.fork()
    if not child:
        try:
            store.put("a", b"child")
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(store.get("a", max_bytes=10), flush=True)
"""


@pytest.mark.servers
def test_a_forked_child_may_use_a_store_that_its_parent_did_not(s3_url):
    code, said = run(FORKED, s3_url, "unused")
    assert (code, said) == (0, "b'child'\n")


@pytest.mark.servers
def test_a_forked_child_of_a_process_that_used_obstore_is_refused_instead_of_hanging(s3_url):
    code, said = run(FORKED, s3_url, "used")
    assert code == 0
    assert re.fullmatch(r"UnsupportedError obstore was used before .*forkserver.*\nb'parent'\n", said)


@pytest.mark.servers
@pytest.mark.parametrize("end", ["os._exit(7)", "sys.exit(7)"])
@pytest.mark.parametrize("size", [9, 12 * MIB], ids=["one request", "parts"])
def test_an_upload_belongs_to_the_process_that_began_it(s3_url, size, end):
    """A child that gave it up would hang, or take its parts from its parent."""
    code = f"""
        import os, signal, sys
        from ckptstore.errors import UnsupportedError
        from ckptstore.objectstore.urls import open_store
        from ckptstore.options import TransferOptions
        store, size = open_store(sys.argv[1], transfer=TransferOptions(part_bytes=5 << 20)), int(sys.argv[2])
        with store.open_upload("shard", size=size) as upload:
            upload.write(bytes(size - 1))
            child = os.fork()
            if not child:
                signal.alarm(20)
                for call in (lambda: upload.write(b"x"), upload.complete):
                    try:
                        call()
                    except UnsupportedError:
                        upload.abort()
                    else:
                        os._exit(1)
                {end}
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            upload.write(b"x")
            print(upload.complete().size)
    """
    assert run(code, s3_url, str(size)) == (0, f"{size}\n")


@pytest.mark.servers
def test_a_process_killed_in_the_middle_of_an_upload_publishes_nothing(s3_url):
    code = """
        import os, signal, sys
        from ckptstore.objectstore.urls import open_store
        from ckptstore.options import TransferOptions
        store = open_store(sys.argv[1], transfer=TransferOptions(part_bytes=5 << 20))
        upload = store.open_upload("data/0/shard", size=40 << 20)
        for _ in range(int(sys.argv[2])):
            upload.write(bytes(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    for written in (1, 12, 40):
        assert run(code, s3_url, str(written))[0] == -signal.SIGKILL
        assert list(open_store(s3_url).list("")) == []


class Interrupted(dict[str, str]):
    """An environment that is looked at in the moment in which an interrupt arrives."""

    def get(self, *_):
        raise KeyboardInterrupt


def test_an_interrupt_while_credentials_are_handed_out_stays_an_interrupt():
    provider = FromEnvironment(Interrupted())
    client = S3Store("bucket", endpoint="http://127.0.0.1:9", region="us-east-1", credential_provider=provider)
    request = Request("GET", "s3://bucket/a", "a", writes=False)
    with pytest.raises(KeyboardInterrupt), translating(request, limit=1, provider=lambda: provider):
        client.get("a")
