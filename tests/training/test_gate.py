"""The gate: everything that differs is named, with what opens it, before anything is read."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import pytest

from ckptstore import IncompatibleStateError, InvalidInputError
from ckptstore.training.compat import Matrix
from ckptstore.training.fingerprints import fingerprint
from ckptstore.training.gate import Facts, check

THINGS = {
    "model": {"layers": 2, "vocab_size": 11},
    "tokenizer": {"tokens": ["a", "b"], "side": "right"},
    "data": {"files": {"a.bin": "blake3:1"}, "samples": 100},
}
STATE = {
    "components": ["model", "optimizer", "scheduler", "progress"],
    "models": {
        "model": {
            "parameters": {"embed.weight": ["float32", [11, 4]], "layers.0.weight": ["float32", [4, 4]]},
            "buffers": {},
            "aliases": {},
        }
    },
    "optimizers": {
        "optimizer": {
            "class": "torch.optim.adamw.AdamW",
            "defaults": {"weight_decay": 0.1},
            "groups": 1,
        }
    },
    "schedulers": {"scheduler": "torch.optim.lr_scheduler.LambdaLR"},
    "precision": {"autocast": "torch.bfloat16", "float32_matmul": "highest"},
}
PARALLELISM = {"dp": 4, "tp": 1, "pp": 1, "zero": 3, "fsdp": 4}


def facts(things=None, state=None, **given):
    prints = {name: fingerprint(what) for name, what in (THINGS if things is None else things).items()}
    said = {
        "fingerprints": {name: one.digest for name, one in prints.items()},
        "documents": {name: one.document for name, one in prints.items()},
        "parallelism": PARALLELISM,
        "world_size": 4,
        "state": STATE if state is None else state,
    }
    return Facts(**{**said, **given})


SAVED = facts()


def changed(value, path, new):
    """Return nested tables with another value in one place; `...` takes it out."""
    first, *rest = path
    inner = {**value, first: changed(value.get(first, {}), rest, new) if rest else new}
    return {name: each for name, each in inner.items() if each is not ...}


def state(*path, to):
    return facts(state=changed(STATE, path, to))


def things(*path, to):
    return facts(things=changed(THINGS, path, to))


def refused(now, saved=SAVED, **options):
    """Return the refusal."""
    with pytest.raises(IncompatibleStateError) as caught:
        check(saved, now, **options)
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  (our own bytes; it goes to the other ranks)
    assert error.facts["count"] >= 1
    return error


def test_the_same_program_may_resume_and_nothing_is_remarked():
    report = check(SAVED, facts())
    assert report.decision.status == "same"
    assert (report.accepted, report.migrated, report.fresh, report.left, report.unchecked) == (
        (),
        (),
        frozenset(),
        frozenset(),
        (),
    )
    assert pickle.loads(pickle.dumps(report)) == report  # noqa: S301  (our own bytes)


@pytest.mark.parametrize(
    ("now", "named", "way"),
    [
        (things("data", "samples", to=99), "fingerprints.data.samples: 100 → 99", "allow=['data']"),
        (
            things("tokenizer", "side", to="left"),
            'fingerprints.tokenizer.side: "right" → "left"',
            "allow=['tokenizer']",
        ),
        (things("data", to=...), 'fingerprints.data: "blake3:', "allow=['data']"),
        (
            state("models", "model", "parameters", "layers.1.weight", to=["float32", [4, 4]]),
            'state.models.model.parameters.layers.1.weight: absent → ["float32", [4, 4]]',
            "pass a Migrator",
        ),
        (
            state("models", "model", "parameters", "embed.weight", to=["float32", [13, 4]]),
            'embed.weight: ["float32", [11, 4]] → ["float32", [13, 4]]',
            "pass a Migrator",
        ),
        (
            state("models", "model", "parameters", "embed.weight", to=["bfloat16", [11, 4]]),
            'embed.weight: ["float32", [11, 4]] → ["bfloat16", [11, 4]]',
            "pass a Migrator",
        ),
        (
            state("optimizers", "optimizer", "class", to="torch.optim.sgd.SGD"),
            'optimizer.class: "torch.optim.adamw.AdamW" → "torch.optim.sgd.SGD"',
            "pass a Migrator",
        ),
        (state("optimizers", "optimizer", "groups", to=2), "groups: 1 → 2", "pass a Migrator"),
        (
            state("optimizers", "optimizer", "defaults", "weight_decay", to=0),
            "defaults.weight_decay: 0.1 → 0",
            "allow=['optimizers.optimizer.defaults.weight_decay']",
        ),
        (state("schedulers", "scheduler", to="mine.Cosine"), '"mine.Cosine"', "allow=['schedulers.scheduler']"),
        (
            state("precision", "autocast", to="torch.float16"),
            'state.precision.autocast: "torch.bfloat16" → "torch.float16"',
            "allow=['precision.autocast']",
        ),
        (
            facts(parallelism={**PARALLELISM, "dp": 2, "fsdp": 2, "tp": 2}),
            "parallelism.tp: 1 → 2",
            "drill reshard URL --from dp=4,tp=1,pp=1,zero=3,fsdp=4 --to dp=2,tp=2,pp=1,zero=3,fsdp=2 --matrix FILE`",
        ),
        (facts(parallelism={**PARALLELISM, "zero": 2}), "parallelism.zero: 3 → 2", "ckptstore drill reshard"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_each_difference_is_refused_with_old_and_new_and_what_would_open_the_way(now, named, way):
    error = refused(now)
    assert named in str(error)
    assert way in error.hint


def test_all_differences_are_named_at_once():
    now = facts(
        things=changed(THINGS, ["data", "samples"], 99),
        state=changed(
            changed(STATE, ["precision", "autocast"], "torch.float16"), ["optimizers", "optimizer", "class"], "x"
        ),
        parallelism={**PARALLELISM, "tp": 2},
    )
    error = refused(now)
    assert [each["path"] for each in error.facts["differences"]] == [
        "parallelism.tp",
        "fingerprints.data.samples",
        "state.optimizers.optimizer.class",
        "state.precision.autocast",
    ]
    assert error.facts["differences"][1] == {"path": "fingerprints.data.samples", "saved": 100, "now": 99}
    assert "in 4 things" in str(error)
    assert len(error.facts["ways"]) == 3


def test_what_is_allowed_by_name_is_accepted_and_reported():
    now = facts(
        things=changed(THINGS, ["data", "samples"], 99),
        state=changed(STATE, ["precision", "autocast"], "torch.float16"),
    )
    report = check(SAVED, now, allow=["data", "precision"])
    assert [str(each) for each in report.accepted] == [
        "fingerprints.data.samples: 100 → 99",
        'state.precision.autocast: "torch.bfloat16" → "torch.float16"',
    ]
    assert check(SAVED, now, allow={"data", "precision.autocast"}).accepted == report.accepted
    assert "fingerprints.data" not in str(refused(now, allow=["data"]))


@pytest.mark.parametrize("allow", [["model"], ["models"], ["model", "optimizer", "optimizers"]])
def test_no_name_opens_another_architecture(allow):
    now = facts(
        state=changed(
            changed(STATE, ["models", "model", "parameters", "embed.weight"], ["float32", [13, 4]]),
            ["optimizers", "optimizer", "class"],
            "torch.optim.sgd.SGD",
        )
    )
    assert refused(now, allow=allow).facts["count"] == 2


@pytest.mark.parametrize("wrong", ["data", 5, [1], None])
def test_names_that_are_no_list_of_names_are_refused(wrong):
    with pytest.raises(InvalidInputError, match="allow must be a list"):
        check(SAVED, SAVED, allow=wrong)


def test_a_digest_without_a_document_is_compared_as_it_is():
    saved = replace(SAVED, documents={})
    error = refused(things("data", "samples", to=99), saved)
    assert error.facts["differences"][0]["saved"] == SAVED.fingerprints["data"]


def test_two_kinds_of_digest_of_one_document_are_the_same():
    digests = {name: fingerprint(what, algorithm="sha256").digest for name, what in THINGS.items()}
    assert check(SAVED, replace(SAVED, fingerprints=digests)).accepted == ()


def test_two_digests_of_one_kind_differ_though_the_documents_do_not_say_how():
    other = {**SAVED.fingerprints, "data": "blake3:" + "0" * 64}
    assert "fingerprints.data" in str(refused(replace(SAVED, fingerprints=other)))


def test_a_fingerprint_that_was_not_taken_then_is_not_compared_and_that_is_said():
    assert check(SAVED, things("code", to="v2")).unchecked == ("code",)


def test_only_another_number_of_data_parallel_ranks_is_allowed():
    report = check(SAVED, facts(parallelism={**PARALLELISM, "dp": 3, "fsdp": 3}, world_size=3))
    assert (report.decision.category, report.decision.status) == (1, "allowed")


def test_the_matrix_opens_and_closes():
    tp = facts(parallelism={**PARALLELISM, "dp": 2, "fsdp": 2, "tp": 2})
    change = {"from": {"dp": 4, "zero": 3}, "to": {"dp": 2, "tp": 2, "zero": 3}}
    verified = Matrix.read([{**change, "status": "verified", "evidence": "drill.json"}])
    assert check(SAVED, tp, matrix=verified).decision.evidence == "drill.json"
    assert "drill reshard" in refused(tp, matrix=Matrix.read([{**change, "status": "blocked_until_drill_passes"}])).hint
    forbidden = Matrix.read([{"from": {"dp": 4, "zero": 3}, "to": {"dp": 3, "zero": 3}, "status": "forbidden"}])
    assert "forbids" in refused(facts(parallelism={**PARALLELISM, "dp": 3, "fsdp": 3}), matrix=forbidden).hint


def test_a_checkpoint_that_does_not_say_its_topology_is_not_guessed_about():
    saved = replace(SAVED, parallelism={})
    error = refused(facts(), saved)
    assert error.facts["differences"][0]["path"] == "parallelism"
    assert "allow=['parallelism']" in error.hint
    assert check(saved, facts(), allow=["parallelism"]).accepted[0].now == PARALLELISM


# Components


def components(*names):
    """Return a program, or a checkpoint, that also has these."""
    return facts(
        state={
            **STATE,
            "components": [*STATE["components"], *names],
            "schedulers": {"scheduler": STATE["schedulers"]["scheduler"], **dict.fromkeys(names, "k")},
        }
    )


def test_a_component_that_was_not_saved_begins_anew_only_if_that_is_said():
    error = refused(components("ema"))
    assert 'state.components.ema: absent → "used"' in str(error)
    assert error.facts["count"] == 1
    assert check(SAVED, components("ema"), allow=["ema"]).fresh == {"ema"}
    assert check(SAVED, components("sampler.train"), allow=["sampler"]).fresh == {"sampler.train"}


def test_a_component_that_was_saved_is_left_only_if_that_is_said():
    assert "state.components.ema" in str(refused(SAVED, components("ema")))
    report = check(components("ema"), SAVED, allow=["ema"])
    assert (report.left, report.fresh) == ({"ema"}, frozenset())


def test_only_the_components_that_are_taken_are_compared():
    now = facts(
        state=changed(
            changed(components("ema").state, ["optimizers", "optimizer", "class"], "x"), ["schedulers", "ema"], "m"
        )
    )
    assert check(SAVED, now, only=["model"]).accepted == ()
    assert refused(now, only=["model", "optimizer"]).facts["count"] == 1
    other = state("models", "model", "parameters", "embed.weight", to=["float32", [13, 4]])
    assert refused(other, only=["model"]).facts["count"] == 1
    assert check(SAVED, other, only=["progress"]).accepted == ()


def test_a_checkpoint_that_says_nothing_of_its_state_is_refused():
    assert "state: absent" in str(refused(facts(), replace(SAVED, state={})))


# Migrators


@dataclass
class Covers:
    """Covers what begins with a path."""

    path: str
    name: str = "mine"

    def covers(self, difference):
        return difference.path.startswith(self.path)

    def migrate(self, key, saved, target):  # noqa: ARG002  (the protocol's)
        raise AssertionError("nothing is migrated by a decision")


def test_what_a_migrator_covers_is_open_and_reported_with_its_name():
    now = state("models", "model", "parameters", "embed.weight", to=["float32", [13, 4]])
    report = check(SAVED, now, migrators=[Covers("nothing", "other"), Covers("state.models.model.parameters.embed")])
    (line,) = report.migrated
    assert line.startswith("state.models.model.parameters.embed.weight: ")
    assert line.endswith("(by mine)")


def test_a_migrator_may_make_up_for_another_stage_but_not_for_what_is_forbidden():
    now = facts(parallelism={**PARALLELISM, "zero": 2})
    assert len(check(SAVED, now, migrators=[Covers("parallelism.zero")]).migrated) == 1
    assert refused(facts(parallelism={**PARALLELISM, "zero": 2, "tp": 2}), migrators=[Covers("parallelism.zero")])
    forbidden = Matrix.read([{"from": {"dp": 4, "zero": 3}, "to": {"dp": 4, "zero": 2}, "status": "forbidden"}])
    assert refused(now, migrators=[Covers("parallelism")], matrix=forbidden)


def test_a_refusal_says_which_differences_are_covered_already():
    now = facts(
        things=changed(THINGS, ["data", "samples"], 99),
        state=changed(STATE, ["models", "model", "parameters", "embed.weight"], ["float32", [13, 4]]),
    )
    error = refused(now, migrators=[Covers("state.models")])
    assert error.facts["count"] == 1
    assert "(covered by mine)" in str(error)
    assert error.facts["differences"][1]["covered_by"] == "mine"
