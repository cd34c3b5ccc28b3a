"""The steps after a save are recorded with it, those after a resume are compared: without ever failing the training."""

import itertools
import math
import threading
import time
from functools import partial

import pytest
import torch
from odd_stores import Denies, Gated
from stoppable import Tiny
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ckptstore import CheckpointStore, store
from ckptstore.errors import AccessDeniedError, CkptStoreError, DisagreementError, InvalidInputError
from ckptstore.events import ProofEnded, TraceFailed
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.testing.simulated import ManualClock
from ckptstore.training import Checkpointer, recording
from ckptstore.training.trace import Trace
from storage_writers import roots

_runs = itertools.count()


@pytest.fixture
def url():
    """The root of a run in memory that no other test has."""
    return f"memory://recording-{next(_runs)}"


@pytest.fixture
def events():
    return []


def traces(url):
    """Return the observed steps of each checkpoint's trace, by its name."""
    found = {each.checkpoint_id: each.trace() for each in CheckpointStore.open(url).checkpoints(include_set_aside=True)}
    return {
        name: None if trace is None else [each.global_step for each in Trace.from_json(trace).observations]
        for name, trace in found.items()
    }


def trained(url, *, until, seed=0, **options):
    """Train from what is there; return the report of the resume."""
    tiny = Tiny(seed)
    with Checkpointer(url, tiny.state, **options) as checkpointer:
        report = checkpointer.resume()
        tiny.run(checkpointer, until)
    return report


@pytest.mark.parametrize("background", [True, False])
def test_the_steps_after_a_save_are_its_trace(url, background):
    trained(url, until=12, every_steps=4, proof_steps=3, background=background)
    assert traces(url) == {"step-12": None, "step-8": [9, 10, 11], "step-4": [5, 6, 7]}
    observed = Trace.from_json(CheckpointStore.open(url).get("step-4").trace())
    assert observed.start_step == 4
    control = Tiny()
    losses = [control.step().item() for _ in range(7)]
    assert [each.loss for each in observed.observations] == pytest.approx(losses[4:])
    assert all(each.update_norm > 0 for each in observed.observations)
    assert {each.grad_norm for each in observed.observations} == {None}


@pytest.mark.parametrize("background", [True, False])
def test_saves_more_frequent_than_the_steps_of_a_trace_have_a_shorter_one(url, background):
    trained(url, until=9, every_steps=1, proof_steps=5, background=background)
    expected = {f"step-{at}": list(range(at + 1, min(at + 4, 9) + 1)) or None for at in range(1, 10)}
    assert traces(url) == expected
    events = []
    report = trained(url, until=12, seed=1, every_steps=100, observer=events.append)
    assert (report.global_step, report.proof.verdict) == (9, "no_trace")


def test_a_resume_is_compared_with_the_trace_and_written_down(url, events):
    trained(url, until=10, every_steps=4, proof_steps=2)
    report = trained(url, until=14, seed=1, proof_steps=2, observer=events.append)
    assert (report.global_step, report.proof.verdict, report.proof.steps) == (8, "proved", 2)
    at = CheckpointStore.open(url).get("step-8")
    assert at.proved == report.proof.summary()
    assert ProofEnded("step-8", at.seq, "proved", 0.0) in events


def test_a_resume_that_does_something_else_is_told_and_not_written_down(url, events, caplog):
    trained(url, until=10, every_steps=8, proof_steps=2)
    tiny = Tiny(seed=1)
    with Checkpointer(url, tiny.state, observer=events.append) as checkpointer:
        report = checkpointer.resume()
        with torch.no_grad():
            tiny.model.weight += 1
        tiny.run(checkpointer, 10)
    assert report.proof.verdict == "differs"
    assert CheckpointStore.open(url).latest().proved is None
    assert [each.verdict for each in events if isinstance(each, ProofEnded)] == ["differs"]
    assert "Resume from step-8: differs: loss" in caplog.text


def test_fewer_steps_are_compared_where_fewer_are_asked_for_and_all_that_there_are_at_the_end(url):
    trained(url, until=10, every_steps=4, proof_steps=5)
    assert trained(url, until=9, seed=1, proof_steps=1).proof.summary().startswith("proved: 1 steps, exact")
    assert trained(url, until=9, seed=2).proof.verdict == "too_few_steps"  # it ends after one of two


@pytest.mark.parametrize("options", [{"proof_steps": 0}, {"proof_steps": 5}])
def test_without_steps_to_record_nothing_is_recorded_or_compared(url, options, monkeypatch):
    trained(url, until=10, every_steps=4, proof_steps=0)
    assert traces(url) == {"step-8": None, "step-4": None}
    report = trained(url, until=12, seed=1, every_steps=8, **options)
    assert (report.proof is None) == (options["proof_steps"] == 0)
    assert CheckpointStore.open(url).get("step-8").proved is None


def test_a_training_that_never_observes_is_saved_as_any_other_and_not_measured_any_longer(url):
    tiny = Tiny()
    with Checkpointer(url, tiny.state, every_steps=2) as checkpointer:
        for _ in range(10):
            tiny.step()
            if checkpointer.due():
                checkpointer.save()
        assert checkpointer._recording._norm._before is None
        tiny.run(checkpointer, 14)  # from now on it observes
    assert traces(url) == {"step-14": None, "step-12": [13, 14], "step-10": None} | dict.fromkeys(
        ["step-8", "step-6", "step-4", "step-2"]
    )


def test_a_training_that_saves_by_itself_is_recorded_too(url):
    tiny = Tiny()
    with Checkpointer(url, tiny.state, proof_steps=2) as checkpointer:
        checkpointer.save()  # before anything was observed
        for _ in range(3):
            checkpointer.observe(loss=tiny.step())
    assert traces(url) == {"step-0": [1, 2]}


def test_a_trace_is_written_as_soon_as_a_slow_save_is_committed(url, monkeypatch):
    gated = Gated(open_store(url))
    monkeypatch.setattr(roots, "open_store", lambda *_, **__: gated)
    tiny = Tiny()
    with Checkpointer(url, tiny.state, proof_steps=2) as checkpointer:
        tiny.run(checkpointer, 2)
        checkpointer.save()
        tiny.run(checkpointer, 5)  # the window is over, and nothing is committed
        gated.gate.set()
        checkpointer.wait()
        checkpointer.observe(loss=tiny.step())
        until = time.monotonic() + 10
        while traces(url) != {"step-2": [3, 4]} and time.monotonic() < until:
            time.sleep(0.02)
        assert traces(url) == {"step-2": [3, 4]}


def test_a_save_that_failed_writes_no_trace_to_the_one_before(url, events, monkeypatch):
    class Down(ForwardingStore):
        def open_upload(self, key, *, size):
            if "step-4" in key:
                raise AccessDeniedError("Not this one.")
            return super().open_upload(key, size=size)

    monkeypatch.setattr(roots, "open_store", lambda *args, **options: Down(open_store(*args, **options)))
    tiny = Tiny()
    with Checkpointer(url, tiny.state, proof_steps=1, observer=events.append) as checkpointer:
        for step in (2, 4):
            tiny.run(checkpointer, step)
            checkpointer.save()
        with pytest.raises(AccessDeniedError):
            checkpointer.wait()
        tiny.run(checkpointer, 6)
    assert traces(url) == {"step-2": [3]}
    assert [each for each in events if isinstance(each, TraceFailed)] == []


def test_a_trace_that_cannot_be_written_is_an_event_and_the_training_goes_on(url, events, monkeypatch, caplog):
    monkeypatch.setattr(store, "open_store", lambda *args, **options: Denies(open_store(*args, **options), "create"))
    trained(url, until=10, every_steps=4, proof_steps=2, observer=events.append)
    monkeypatch.undo()
    assert traces(url) == {"step-8": None, "step-4": None}
    failed = [each for each in events if isinstance(each, TraceFailed)]
    assert sorted(each.checkpoint_id for each in failed) == ["step-4", "step-8"]
    assert all("AccessDenied" in each.reason for each in failed)
    assert "The trace or the proof of step-4 was not written" in caplog.text


def test_a_store_that_hangs_while_a_trace_is_written_holds_up_nothing(url, events, monkeypatch):
    gate = threading.Event()

    def open_later(*args, **options):
        gate.wait(30)
        return open_store(*args, **options)

    monkeypatch.setattr(recording, "LAST_WRITES_SECONDS", 0.3)
    tiny = Tiny()
    checkpointer = Checkpointer(url, tiny.state, every_steps=1, proof_steps=1, observer=events.append)
    monkeypatch.setattr(store, "open_store", open_later)
    began = time.monotonic()
    with checkpointer:
        tiny.run(checkpointer, 8)
    assert time.monotonic() - began < 10
    reasons = [each.reason for each in events if isinstance(each, TraceFailed)]
    assert reasons == ["the store is too slow"] * 3 + ["it was not written in time"] * 4
    gate.set()


def test_what_is_recorded_of_numbers_that_are_not_finite_comes_back_equal(url):
    def step(checkpointer, tiny, loss, norm):
        tiny.step()
        checkpointer.observe(loss=torch.tensor(loss), grad_norm=torch.tensor([norm]), batch_ids=[1, 2])

    def run(seed, **options):
        tiny = Tiny(seed)
        with Checkpointer(url, tiny.state, proof_steps=3, **options) as checkpointer:
            report = checkpointer.resume()
            if report.is_fresh:
                checkpointer.save()
            for loss, norm in [(math.nan, math.inf), (-math.inf, 1.0), (2.0, 3.0)]:
                step(checkpointer, tiny, loss, norm)
        return report

    run(0)
    observed = Trace.from_json(CheckpointStore.open(url).latest().trace()).observations
    assert [each.loss for each in observed] == pytest.approx([math.nan, -math.inf, 2.0], nan_ok=True)
    assert [each.grad_norm for each in observed] == [math.inf, 1.0, 3.0]
    assert run(1).proof.verdict == "proved"


def test_a_step_that_was_not_counted_is_replaced_by_the_one_that_was(url):
    tiny = Tiny()
    with Checkpointer(url, tiny.state, proof_steps=2) as checkpointer:
        checkpointer.save()
        tiny.step()
        checkpointer.observe(loss=1.0)
        checkpointer.observe(loss=2.0)  # the scaler skipped it: global_step is what it was
        tiny.step()
        checkpointer.observe(loss=3.0)
    observed = Trace.from_json(CheckpointStore.open(url).latest().trace()).observations
    assert [(each.global_step, each.loss) for each in observed] == [(1, 2.0), (2, 3.0)]


@pytest.mark.parametrize("is_open", [True, False], ids=["in a window", "outside"])
@pytest.mark.parametrize(
    "said",
    [
        {"loss": None},
        {"loss": "0.5"},
        {"loss": True},
        {"loss": torch.ones(2)},
        {"loss": 1j},
        {"loss": 1.0, "grad_norm": [1.0]},
        {"loss": 1.0, "grad_norm": torch.ones(2)},
    ],
    ids=repr,
)
def test_what_is_no_number_is_refused_at_the_first_step_that_observes_it(url, said, is_open):
    tiny = Tiny()
    with Checkpointer(url, tiny.state) as checkpointer:
        if is_open:
            checkpointer.save()
        tiny.step()
        with pytest.raises(InvalidInputError, match=r"loss|grad_norm"):
            checkpointer.observe(**said)


def test_a_step_is_observed_when_it_is_whole(url):
    tiny = Tiny()
    with Checkpointer(url, tiny.state) as checkpointer:
        tiny.progress.micro_step = 1
        with pytest.raises(InvalidInputError, match="between micro-steps"):
            checkpointer.observe(loss=1.0)


@pytest.mark.parametrize("ids", ["ab", {"a": 1}, [1.5], torch.ones(2, dtype=torch.float32)[0]], ids=repr)
def test_ids_that_tell_nothing_apart_are_refused(url, ids):
    tiny = Tiny()
    with Checkpointer(url, tiny.state) as checkpointer:
        checkpointer.save()
        tiny.step()
        if isinstance(ids, torch.Tensor):
            checkpointer.observe(loss=1.0, batch_ids=ids)  # a row
        else:
            with pytest.raises(InvalidInputError, match="id"):
                checkpointer.observe(loss=1.0, batch_ids=ids)


def test_ids_may_come_in_any_form_and_are_the_same(url):
    tiny = Tiny()
    forms = [[3, 1, 2], torch.tensor([1, 2, 3]), iter((2, 3, 1)), {1, 2, 3}]
    with Checkpointer(url, tiny.state, proof_steps=4) as checkpointer:
        checkpointer.save()
        for ids in forms:
            tiny.step()
            checkpointer.observe(loss=1.0, batch_ids=ids)
    observed = Trace.from_json(CheckpointStore.open(url).latest().trace()).observations
    assert len({each.batch_digest for each in observed}) == 1
    assert {each.samples for each in observed} == {3}


def test_what_takes_a_part_of_another_run_is_not_compared_with_it(url, tmp_path):
    trained(url, until=10, every_steps=4, proof_steps=2)
    tiny = Tiny(seed=1)
    with Checkpointer(tmp_path, tiny.state) as checkpointer:
        report = checkpointer.resume(source=url, only=("model",))
        tiny.run(checkpointer, 4)
    assert report.global_step == 8
    assert report.proof.verdict == "no_trace"


def test_a_second_resume_in_one_process_ends_what_was_recorded_of_the_first(url):
    tiny = Tiny()
    with Checkpointer(url, tiny.state, every_steps=4, proof_steps=3) as checkpointer:
        tiny.run(checkpointer, 9)
        checkpointer.wait()
        report = checkpointer.resume(step=4)
        tiny.run(checkpointer, 7)
    assert report.proof.verdict == "proved"
    assert traces(url) == {"step-8": [9], "step-4": [5, 6, 7]}


def test_a_resume_from_another_run_is_compared_and_nothing_is_written_there(url, tmp_path, events):
    trained(url, until=10, every_steps=4, proof_steps=2)
    tiny = Tiny(seed=1)
    with Checkpointer(tmp_path, tiny.state, proof_steps=2, observer=events.append) as checkpointer:
        report = checkpointer.resume(source=url)
        tiny.run(checkpointer, 12)
    assert (report.global_step, report.proof.verdict) == (8, "proved")
    assert "another run's" in report.proof.notes[-1]
    assert CheckpointStore.open(url).latest().proved is None
    assert [each.verdict for each in events if isinstance(each, ProofEnded)] == ["proved"]
    assert [each for each in events if isinstance(each, TraceFailed)] == []


class NeverKnown:
    """Of a save that never ends."""

    skipped = False
    seq = None

    def done(self):
        return False


def test_steps_are_told_to_be_lost_where_it_stays_unknown_whether_their_save_was_committed(url, events):
    tiny = Tiny()
    with Checkpointer(url, tiny.state, proof_steps=1, observer=events.append) as checkpointer:
        for at in range(6):
            checkpointer._recording.begin(f"save-{at}", NeverKnown(), seq=None)
            checkpointer.observe(loss=tiny.step())
        lost = [each.checkpoint_id for each in events if isinstance(each, TraceFailed)]
        assert lost == ["save-0", "save-1"]
    failed = [each for each in events if isinstance(each, TraceFailed)]
    assert [each.checkpoint_id for each in failed] == [f"save-{at}" for at in range(6)]
    assert {each.reason for each in failed} == {"it is not known whether its save was committed"}


def test_who_observes_after_saves_without_it_is_still_compared_with_what_was_resumed(url):
    trained(url, until=10, every_steps=8, proof_steps=2)
    tiny = Tiny(seed=1)
    with Checkpointer(url, tiny.state, proof_steps=2) as checkpointer:
        report = checkpointer.resume()
        checkpointer.save(checkpoint_id="a")
        tiny.step()
        checkpointer.save(checkpoint_id="b")
        checkpointer.observe(loss=tiny.step())
        checkpointer.observe(loss=tiny.step())
    assert report.proof.verdict == "differs"  # it begins with the second step
    assert report.proof.differing[0].quantity == "global_step"


class Shared:
    """Ranks that train one weight on their shares of batches of six: three and three, or six and none."""

    def __init__(self, root, seed, *, uneven=False, **options):
        self.tiny, self.uneven = Tiny(seed), uneven
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.checkpointer = Checkpointer(root, self.tiny.state, clock=ManualClock(), **options)

    def share(self):
        """Return this rank's ids of the next batch."""
        first = 6 * self.tiny.progress.global_step
        batch = list(range(first, first + 6))
        if self.uneven:
            return batch if self.rank == 0 else []
        each = 6 // self.world_size
        return batch[self.rank * each : (self.rank + 1) * each]

    def step(self, **said):
        """Take a step on all ranks, and observe it."""
        ids, tiny = self.share(), self.tiny
        inputs = torch.tensor([[each, 1.0, each % 5] for each in ids]).reshape(-1, 3) / 100
        losses = tiny.model(inputs).square().mean(1)
        tiny.optimizer.zero_grad()
        (losses.sum() / 6).backward()
        if self.world_size > 1:
            for each in tiny.model.parameters():
                dist.all_reduce(each.grad)
        norm = torch.nn.utils.clip_grad_norm_(tiny.model.parameters(), 1e9)
        tiny.optimizer.step()
        tiny.progress.global_step += 1
        self.checkpointer.observe(**{"loss": losses.mean(), "grad_norm": norm, "batch_ids": ids, **said})


def record(root, uneven=None):
    """Save at step 2, and observe three steps."""
    shared = Shared(root, 0, uneven=uneven, proof_steps=3)
    with shared.checkpointer as checkpointer:
        for _ in range(2):
            shared.step()
        checkpointer.save()
        for _ in range(3):
            shared.step()


def prove(root, uneven):
    """Resume, observe three steps, and return what came of the comparison."""
    shared = Shared(root, 1, uneven=uneven, proof_steps=3)
    with shared.checkpointer as checkpointer:
        report = checkpointer.resume()
        for _ in range(3):
            shared.step()
    return report.proof.verdict, report.proof.first_batch, report.proof.tolerances.is_exact


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "one share is empty"])
def test_what_two_ranks_recorded_proves_one_rank_and_two(gang, tmp_path, uneven):
    gang.values(2, record, str(tmp_path), uneven)
    observed = Trace.from_json(CheckpointStore.open(tmp_path).latest().trace())
    assert [(each.global_step, each.samples) for each in observed.observations] == [(3, 6), (4, 6), (5, 6)]
    assert all(math.isfinite(each.loss) for each in observed.observations)
    assert prove(str(tmp_path), uneven) == ("proved", "same", False)
    assert gang.values(2, prove, str(tmp_path), uneven) == [("proved", "same", True)] * 2


def observe_apart(root, what):
    """Save, and observe a step of which ranks say different things; return what was raised here."""
    shared = Shared(root, 0, proof_steps=3)
    is_last = shared.rank == 1
    said = {
        "ids": {"batch_ids": None} if is_last else {},
        "norm": {"grad_norm": None} if is_last else {},
        "loss": {"loss": torch.ones(2)} if is_last else {},
        "iterator": {"batch_ids": (1 // 0 for _ in "a")} if is_last else {},
    }[what]
    shared.checkpointer.save()
    errors = []
    try:
        shared.step(**said)
    except CkptStoreError as error:
        errors.append((type(error), str(error), type(error.__cause__)))
    shared.step()  # whoever corrects that goes on
    shared.checkpointer.close()
    return errors


@pytest.mark.parametrize(
    ("what", "text"), [("ids", "batch_ids was observed on 1 of 2"), ("norm", "grad_norm was observed on 1 of 2")]
)
def test_what_only_some_ranks_observe_is_refused_on_all(gang, tmp_path, what, text):
    for ((kind, said, _),) in gang.values(2, observe_apart, str(tmp_path), what):
        assert kind is InvalidInputError
        assert text in said


def test_what_is_wrong_on_one_rank_is_raised_on_all(gang, tmp_path):
    ended = gang.values(2, observe_apart, str(tmp_path / "1"), "loss")
    for ((kind, said, _),) in ended:
        assert kind is InvalidInputError
        assert "Rank 1: loss must be one number" in said
    ended = gang.values(2, observe_apart, str(tmp_path / "2"), "iterator")
    assert all("Rank 1: ZeroDivisionError" in said for ((_, said, _),) in ended)
    assert ended[1][0][2] is ZeroDivisionError


def observe_a_dtensor(root):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared = Shared(root, 0)
    errors = []
    for said in (
        {"loss": DTensor.from_local(torch.ones(()), mesh)},
        {"grad_norm": DTensor.from_local(torch.ones(()), mesh)},
    ):
        try:
            shared.step(**said)
        except InvalidInputError as error:
            errors.append(str(error))
    return errors


def test_a_dtensor_is_refused_before_anything_is_recorded(gang, tmp_path):
    for loss, norm in gang.values(2, observe_a_dtensor, str(tmp_path)):
        assert "loss is a DTensor" in loss
        assert "grad_norm is a DTensor" in norm
        assert "full_tensor()" in norm


def prove_apart(root, odd):
    """Resume where one rank sees another learning rate than the run that went on; return what each made of it."""
    shared = Shared(root, 1, proof_steps=3)
    with shared.checkpointer as checkpointer:
        report = checkpointer.resume()
        if shared.rank == odd:
            shared.tiny.state.learning_rates = lambda: [9.0]
        dues = []
        for _ in range(4):
            shared.step()
            dues.append(checkpointer.due())
    return report.proof.verdict, report.proof.steps, dues


def test_what_one_rank_sees_does_not_let_ranks_judge_apart(gang, tmp_path):
    gang.values(2, record, str(tmp_path))
    assert gang.values(2, prove_apart, str(tmp_path), 1) == [("proved", 3, [False] * 4)] * 2
    assert gang.values(2, prove_apart, str(tmp_path), 0) == [("differs", 2, [False] * 4)] * 2


def observe_on_one(root):
    shared = Shared(root, 0, proof_steps=3, background=False)
    shared.checkpointer.save()
    shared.tiny.progress.global_step += 1
    call = partial(shared.checkpointer.observe, loss=1.0) if shared.rank == 0 else shared.checkpointer.due
    with pytest.raises(DisagreementError, match="different calls") as apart:
        call()
    return apart.value.facts["calls"]


def test_who_observes_alone_is_named_on_all_ranks(gang, tmp_path):
    for calls in gang.values(2, observe_on_one, str(tmp_path)):
        assert calls["0"].startswith("observe (")
        assert calls["1"].startswith("due, ")


def observe_later_on_one(root):
    """Observe nothing between two saves, then on rank 0 only."""
    shared = Shared(root, 0, proof_steps=3)
    with shared.checkpointer as checkpointer:
        for at in range(4):
            checkpointer.save()
            shared.tiny.progress.global_step += 1
            if at > 1 and shared.rank == 0:
                checkpointer.observe(loss=1.0)
    return True


def test_what_one_rank_alone_observes_opens_no_window(gang, tmp_path):
    assert gang.values(2, observe_later_on_one, str(tmp_path)) == [True, True]
    assert set(traces(tmp_path).values()) == {None}


def record_apart(root):
    shared = Shared(root, 0, proof_steps=3 + dist.get_rank(), background=False)
    with pytest.raises(DisagreementError, match=r"rank 0: save with proof_steps=3 .*rank 1: save with proof_steps=4"):
        shared.checkpointer.save()
    return True


def test_ranks_that_would_record_for_different_times_are_told_at_the_first_save(gang, tmp_path):
    assert gang.values(2, record_apart, str(tmp_path)) == [True, True]


def observe_an_odd_rate(root):
    shared = Shared(root, 0, background=False)
    shared.checkpointer.save()
    if shared.rank == 1:
        shared.tiny.state.learning_rates = lambda: ["high"]
    with pytest.raises(InvalidInputError, match=r"Rank 1: lr\[0\] must be one number"):
        shared.step()
    return True


def test_a_learning_rate_that_is_none_on_one_rank_is_refused_on_all(gang, tmp_path):
    assert gang.values(2, observe_an_odd_rate, str(tmp_path)) == [True, True]
