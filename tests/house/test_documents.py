"""What the documents say of the project is there."""

import ast
import contextlib
import gc
import re
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta, lay_out
from ckptstore.objectstore.s3_options import read_s3_options
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.protocol.attempt import Description, begin
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.log import RunLog
from ckptstore.transfer.upload import upload_shard

ROOT = Path(__file__).parents[2]
DOCUMENTS = [path for path in sorted(ROOT.rglob("*.md")) if not {".venv", ".git"} & set(path.relative_to(ROOT).parts)]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_that_is_named_exists(document):
    targets = set(re.findall(r"`make ([a-z]+)", document.read_text()))
    assert {target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)} == set()


def test_every_test_that_the_evidence_names_exists():
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "EVIDENCE.md").read_text())
    assert named
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or (test and not re.search(rf"(def|class) {test}\b", (ROOT / path).read_text()))
    ]
    assert missing == []


def test_the_table_of_engines_has_every_engine_and_every_promise():
    table = runpy.run_path(str(ROOT / "tests" / "conformance" / "table.py"))
    readme = (ROOT / "ckptstore" / "objectstore" / "README.md").read_text()
    written = readme.partition(table["BEGIN"])[2].partition(table["END"])[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in written]
    assert head == ["promise", *map(table["label"], table["columns"]())]
    assert [row[0] for row in rows] == list(table["rows"]().values())
    assert {cell for row in rows for cell in row[1:]} <= {"yes", "-", ""}


def run_example(number, url, **given):
    """Run an example of README.md on the run at `url`; return its variables."""
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[number]
    given["url"] = url
    exec(example.replace("s3://bucket/runs/llama-7b", url), given)  # noqa: S102  (our own document)
    return given


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_example_of_a_training_starts_fresh_and_then_resumes(tmp_path):
    import torch  # noqa: PLC0415  (the other tests here do without)

    def trained():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        ran = run_example(0, str(tmp_path / "run"), torch=torch, model=model, optimizer=optimizer)
        return model, optimizer, int(ran["state"]["step"])

    first, _, step = trained()
    resumed, optimizer, _ = trained()
    assert step == 12000
    assert torch.equal(first.weight, resumed.weight)
    assert len(optimizer.state) == 2
    assert [each.global_step for each in ckptstore.CheckpointStore.open(tmp_path / "run").checkpoints()] == [12000] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_example_of_saving_in_the_background_saves_what_it_says(tmp_path):
    import torch  # noqa: PLC0415  (the same)
    from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415  (the same)

    import storage_writers as sw  # noqa: PLC0415  (the other tests here do without)

    url, model = str(tmp_path / "run"), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_one_step(model, optimizer):
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    given = {"torch": torch, "sw": sw, "model": model, "optimizer": optimizer, "start": 999, "steps": 1501}
    run_example(1, url, **given, get_state_dict=get_state_dict, train_one_step=train_one_step)
    assert [each.checkpoint_id for each in ckptstore.CheckpointStore.open(url).checkpoints()] == [
        "step-1500",
        "step-1000",
    ]


def waited_for(found):
    """Return what `found` returns, as soon as it returns something."""
    deadline = time.monotonic() + 20
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def saves_have_ended():
    """Say whether no save in the background is under way in this process."""
    from storage_writers import SaveFuture  # noqa: PLC0415  (needs torch)

    saves = [each for each in gc.get_objects() if issubclass(type(each), SaveFuture)]  # others pretend to have a class
    return all(each.done() for each in saves)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_example_of_a_resume_goes_on_and_is_proved(tmp_path, capfd):
    import torch  # noqa: PLC0415  (the same)
    from torch.utils.data import DataLoader  # noqa: PLC0415  (the same)

    (tmp_path / "manifest.json").write_text('{"files": ["a", "b"]}')
    url = str(tmp_path / "run")

    class Stopped(Exception):  # noqa: N818  (as a job that dies)
        pass

    def train(last):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        steps = []

        def train_one_step(model, optimizer, batch):
            loss = (model(batch) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(batch)
            if last and len(steps) == last - 1:  # a step later than the save of step 500 has ended
                waited_for(lambda: saves_have_ended() and ckptstore.CheckpointStore.open(url).latest())
            if len(steps) == last:
                raise Stopped
            return loss, 1.0

        given = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
            "scaler": torch.amp.GradScaler("cpu"),
            "config": {"width": 1},
            "tokenizer": {"vocabulary": ["a"]},
            "dataset": torch.utils.data.StackDataset(range(256 * 170), torch.ones(256 * 170, 1)),
            "evaluate": lambda _: 2.5,
            "train_one_step": train_one_step,
            "DataLoader": DataLoader,
            "Path": lambda name: tmp_path / name,
        }
        with contextlib.suppress(Stopped):
            run_example(2, url, **given)
        return len(steps)

    assert train(508) == 508
    assert "A fresh start" in capfd.readouterr().out
    waited_for(lambda: ckptstore.CheckpointStore.open(url).latest().trace())
    assert train(None) == 10
    assert "resumed from" in capfd.readouterr().out
    newest = ckptstore.CheckpointStore.open(url).latest()
    assert (newest.global_step, newest.metrics) == (500, {"val_loss": 2.5})
    assert newest.proved.startswith("proved: 5 steps, exact")


def test_the_example_without_torch_runs_as_it_is_printed(tmp_path):
    url, name = str(tmp_path / "run"), "model.layers.0.wq.weight"
    log, job = RunLog.create(open_store(url)), Incarnation.new(job="llama")
    weight = np.arange(256 * 4, dtype=np.float32).reshape(256, 4)
    for step in (11500, 12000):
        description = Description(global_step=step, metrics={"val_loss": 2.31})
        attempt = begin(log, job, checkpoint_id=f"step-{step}", world_size=1, description=description)
        layout = lay_out([Chunk(TensorMeta(name, "float32", weight.shape), (0, 0), weight.shape, weight.nbytes)])
        path = attempt.stem.shard_key(0)
        shard = upload_shard(log.store, path, layout, [[weight.tobytes()]], rank=0, options=TransferOptions())
        commit(log, job, attempt, [StoredShard(shard, layout.items)])
    ran = run_example(3, url)
    assert (ran["checkpoint"].checkpoint_id, ran["checkpoint"].global_step) == ("step-12000", 12000)
    assert np.array_equal(ran["weight"], weight[:128])
    store = ckptstore.CheckpointStore.open(url)
    assert store.latest().checkpoint_id == "step-11500"
    assert [pin.holder for pin in store.get("step-12000@2").committed.pins] == ["eval"]


def test_the_storage_options_that_are_printed_are_known():
    printed = re.findall(r"storage_options=(\{.*?\})\)", (ROOT / "README.md").read_text())
    assert len(printed) == 2
    for options in printed:
        read_s3_options(ast.literal_eval(options))


def test_one_version_is_stated_once_and_again():
    assert f'version = "{ckptstore.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {ckptstore.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_no_module_is_longer_than_a_reader_wants():
    modules = [
        path for folder in ("ckptstore", "storage_writers", "localstack") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [str(path.relative_to(ROOT)) for path in modules if len(path.read_text().splitlines()) > 420] == []
