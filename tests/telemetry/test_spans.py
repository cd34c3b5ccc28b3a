"""Saves and restores as OpenTelemetry sees them: by its own SDK, with an exporter in memory."""

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import storage_writers as sw
from ckptstore.errors import AccessDeniedError, NotFoundError
from ckptstore.events import SaveBegan, together
from ckptstore.objectstore.urls import open_store
from ckptstore.telemetry import Metrics, Spans
from ckptstore.telemetry.spans import MAX_OPEN
from ckptstore.testing.faults import Fault, FaultyStore


class Exported:
    """A provider, and the spans that have ended."""

    def __init__(self):
        self.memory, self.provider = InMemorySpanExporter(), TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))

    @property
    def spans(self):
        return self.memory.get_finished_spans()

    def of(self, name):
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def exported():
    return Exported()


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "run")


def state():
    return {"w": torch.arange(6.0)}


def test_a_save_is_a_span_below_what_asked_for_it_and_its_phases_are_below_it(exported, url):
    writer = sw.CkptStoreWriter(url, observer=Spans(exported.provider))
    writer.describe(global_step=7)
    with exported.provider.get_tracer("trainer").start_as_current_span("step 7") as step:
        sw.async_save(state(), checkpoint_id="a", storage_writer=writer).result()
    writer.close()
    (save,) = exported.of("checkpoint.save")
    assert save.parent.span_id == step.get_span_context().span_id
    assert save.attributes == {
        "checkpoint.background": True,
        "checkpoint.id": "a",
        "checkpoint.seq": 1,
        "checkpoint.step": 7,
        "checkpoint.bytes": save.attributes["checkpoint.bytes"],
    }
    assert save.status.is_unset
    below = [span for span in exported.spans if span.parent and span.parent.span_id == save.context.span_id]
    assert sorted(span.name for span in below) == [
        f"checkpoint.{phase}" for phase in ("commit", "gather", "plan", "stage", "upload", "verify")
    ]
    slack = 50_000_000  # two clocks, one of them monotonic
    for span in below:
        assert save.start_time - slack <= span.start_time <= span.end_time <= save.end_time + slack
    in_order = [exported.of(f"checkpoint.{name}")[0] for name in ("plan", "upload", "gather", "verify", "commit")]
    assert [span.start_time for span in in_order] == sorted(span.start_time for span in in_order)


def test_a_save_and_a_load_that_fail_say_with_what(exported, url):
    spans = Spans(exported.provider)
    store = FaultyStore(open_store(url), lambda call: Fault.DENIED if "rank-" in call.key else None)
    with pytest.raises(AccessDeniedError):
        sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store, observer=spans))
    with pytest.raises(NotFoundError):
        sw.load(state(), storage_reader=sw.CkptStoreReader(url, observer=spans))
    for name, code in (("checkpoint.save", "access_denied"), ("checkpoint.restore", "not_found")):
        (span,) = exported.of(name)
        assert (span.attributes["error.type"], span.status.description) == (code, code)
        assert not span.status.is_ok


def test_a_load_is_a_span_as_long_as_it_took(exported, url):
    sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    sw.load(state(), storage_reader=sw.CkptStoreReader(url, observer=Spans(exported.provider)))
    (span,) = exported.spans
    assert (span.name, span.attributes["checkpoint.id"], span.attributes["checkpoint.seq"]) == (
        "checkpoint.restore",
        "a",
        1,
    )
    assert span.end_time > span.start_time


def test_saves_that_never_end_are_held_within_a_limit(exported):
    spans = Spans(exported.provider)
    for number in range(MAX_OPEN + 3):
        spans(SaveBegan(number, background=True))
    assert len(exported.spans) == 3


def test_no_secret_of_a_url_or_of_what_a_store_says_is_in_a_span_or_a_metric(exported):
    def plan(call):
        return Fault.DENIED if "rank-" in call.key or "latest" in call.key else None

    metrics, told = Metrics(), []
    observer = together(Spans(exported.provider), metrics, told.append)
    store = FaultyStore(open_store("memory://user:hunter2@spans"), plan)
    with pytest.raises(AccessDeniedError):
        sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store, observer=observer))
    assert told
    for said in ([span.to_json() for span in exported.spans], metrics.exposition(), told):
        assert "hunter2" not in str(said)
