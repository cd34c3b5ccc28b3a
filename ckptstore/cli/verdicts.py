"""What `verify` says of what it found: as a document, and the same for people."""

from __future__ import annotations

from ckptstore.cli.access import pointed
from ckptstore.cli.documents import Document, findings_of
from ckptstore.cli.render import print_line
from ckptstore.errors import NotFoundError
from ckptstore.format.layout import RUN_KEY
from ckptstore.maintenance.scrub import Loss
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.verify import Verdict
from ckptstore.store import CheckpointStore
from ckptstore.units import counted, format_bytes


def judged_document(verdict: Verdict, store: CheckpointStore, *, quarantined: bool, recorded: bool) -> Document:
    """Return what a verification found in a checkpoint's data, and what became of it; of the log it is said apart."""
    findings = findings_of(verdict, of_log=False)
    try:
        aside = store.get(seq=verdict.seq).committed.set_aside
    except NotFoundError:  # retired, perhaps since the verdict
        aside = None
    return {
        "checkpoint_id": verdict.checkpoint_id,
        "seq": verdict.seq,
        "set_aside": aside,
        "ok": not findings,
        "retired": verdict.retired,
        "objects": len({*verdict.objects} - {RUN_KEY}),
        "bytes_read": verdict.bytes_read,
        "findings": findings,
        "quarantined": quarantined,
        "recorded": recorded,
    }


def loss_document(loss: Loss | None) -> Document | None:
    """Return what a resume loses, or None."""
    if loss is None:
        return None
    return {
        "newest": _named(loss.newest),
        "instead": None if loss.instead is None else _named(loss.instead),
        "complete": loss.complete,
        "steps": loss.steps,
        "seconds": loss.seconds,
    }


def _named(committed: Committed) -> Document:
    commit = committed.commit
    return {"checkpoint_id": commit.checkpoint_id, "seq": committed.seq, "global_step": commit.global_step}


def print_verdicts(document: Document) -> None:
    """Print the document of `verify` for people."""
    log, level = document["log"], document["level"]
    if document["share"]["log"]:
        print_line("ok       the log: its records link" if log["ok"] else "DAMAGED  the log")
    else:
        print_line("-        the log: another share has its records")
    _print_findings(log["findings"])
    for each in document["checkpoints"] if level != "chain" else []:
        _print_checkpoint(each, level, complete=document["share"]["complete"])
    if document["loss"] is not None:
        _print_loss(document["loss"])


def _print_checkpoint(each: Document, level: str, *, complete: bool) -> None:
    aside = f" ({each['set_aside']})" if each["set_aside"] else ""
    what = f"{_exact(each)}{aside}"
    if each["retired"]:
        print_line(f"{'gone':8} {what}: retired meanwhile, which is no damage")
        return
    read = f", {format_bytes(each['bytes_read'])} of shards hashed" if level == "full" else ", contents not read"
    share = "" if complete else f", {counted(each['objects'], 'object')} of this share"
    print_line(f"{_judgement(each['findings']):8} {what}: level {level}{read}{share}")
    _print_findings(each["findings"])
    if each["quarantined"]:
        print_line("    It is quarantined now: it is no longer selected, and nothing was deleted.")
    if each["recorded"]:
        print_line(f"    Recorded in the log: verified at level {level}.")
    if _judgement(each["findings"]) == "DAMAGED" and each["set_aside"] is None:
        print_line(
            pointed("    Mend it from a replica: `ckptstore repair URL --from URL2`; or set it aside: --quarantine.")
        )


def _judgement(findings: list[Document]) -> str:
    if not findings:
        return "ok"
    return "REWRITTEN" if all(each["kind"] == "rewritten" for each in findings) else "DAMAGED"


def _print_findings(findings: list[Document]) -> None:
    for each in findings:
        twice = ", read twice" if each["confirmed"] else ""
        once = "" if each["confirmed"] or each["kind"] == "rewritten" or each["level"] == "chain" else ", READ ONCE"
        print_line(f"    {each['kind']} ({each['level']}{twice}{once}): {each['key']}")
        print_line(f"        {each['message']}")
        if once:
            print_line("        A second reading found it whole: look at the network and the memory of this machine.")
        if each["tensor_count"]:
            shown = ", ".join(each["tensors"][:4])
            more = each["tensor_count"] - 4
            print_line(f"        hits {shown}{f' and {more} more' if more > 0 else ''}")


def _print_loss(loss: Document) -> None:
    newest = f"{_exact(loss['newest'])} is the newest, and is damaged"
    if loss["instead"] is None:
        print_line(f"LOSS     {newest}. No older selectable one is whole: a resume has nothing to start from.")
        return
    whole = "is whole" if loss["complete"] else "has no damage in this share"
    steps = "" if loss["steps"] is None else f" {loss['steps']} steps"
    seconds = "" if loss["seconds"] is None else f" {loss['seconds']:.0f} s of training"
    lost = " and".join(filter(None, (steps, seconds))) or " what came since"
    print_line(f"LOSS     {newest}. {_exact(loss['instead'])} {whole}: a resume from it loses{lost}.")


def _exact(each: Document) -> str:
    return f"{each['checkpoint_id']}@{each['seq']}"
