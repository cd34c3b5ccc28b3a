"""The commands in one place, and the door that turns every error into a message, a hint and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ckptstore
from ckptstore.cli import (
    access,
    changing,
    checking,
    collecting,
    doctor,
    drilling,
    listing,
    looking,
    metering,
    repairing,
    tuning,
)
from ckptstore.cli.documents import Document, error_document
from ckptstore.cli.exits import EPILOG, Exit, exit_for
from ckptstore.cli.render import print_error, print_json, print_line
from ckptstore.errors import CkptStoreError
from ckptstore.format.version import FORMAT

CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""What all usage errors are. typer brings its own click or uses the installed one, depending on its version."""


APPENDING = ("verify", "repair", "rollback", "restore", "pin", "unpin", "retire", "gc")
"""What may append to the log."""


class Door(TyperGroup):
    """The group of all commands. No traceback leaves it."""

    _command = ""
    """Which one was asked for."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,  # noqa: ARG002  (typer's signature; `python -m` has a longer name)
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002  (the same)
        windows_expand_args: bool = True,  # noqa: ARG002, FBT001, FBT002  (the same; a name is taken literally)
        **extra: Any,
    ) -> Any:
        """Run one command and exit with its code, or return it where that is asked for."""
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        options = given[: given.index("--")] if "--" in given else given
        code, error = Exit.FINE, None
        access.forget()
        self._command = ""
        try:
            answer = super().main(
                access.moved_to_the_front(given), "ckptstore", complete_var, standalone_mode=False, **extra
            )
            code = Exit.FINE if answer is None else answer
        except CkptStoreError as ours:
            code, error = exit_for(ours), error_document(ours)
        except CLICK_ERROR as usage:
            code, error = Exit.INPUT, _usage_document(usage, self._command)
        except typer.Abort:
            code, error = Exit.STOPPED, _stopped_document(self._command)
        except Exception as fault:  # noqa: BLE001  (the last door: people get a message, never a traceback)
            code, error = Exit.INTERNAL, _internal_document(fault)
        if error is not None and "--json" in options:
            print_json(error)
        elif error is not None:
            print_error(error["message"], error["hint"])
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an interrupt is told like a question that was not answered."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise typer.Abort from interrupt
        finally:
            self._command = ctx.invoked_subcommand or ""


def _usage_document(usage: Any, command: str) -> Document:
    context = getattr(usage, "ctx", None)  # an option without its value has none
    path = context.command_path if context else f"ckptstore {command}".strip()
    hint = f"Run `{path} --help`."
    return {"error": "usage", "message": usage.format_message(), "hint": hint, "facts": {}}


def _stopped_document(command: str) -> Document:
    if command == "drill":
        hint = "The run was not touched. What may be left under drill/, the next drill removes."
    elif command in APPENDING:
        hint = access.pointed("Run `ckptstore log URL` to see whether something was appended.")
    else:
        hint = "Nothing was appended. Run it again."
    return {"error": "stopped", "message": "Stopped.", "hint": hint, "facts": {}}


def _internal_document(fault: Exception) -> Document:
    """Say where it happened; the text of a foreign error is not shown, since it may hold credentials."""
    frame = traceback.extract_tb(fault.__traceback__)[-1]
    where = f"{frame.filename}:{frame.lineno}"
    return {
        "error": "internal",
        "message": f"A fault in ckptstore: {type(fault).__name__} at {where}.",
        "hint": f"Report it with this line and the version, {ckptstore.__version__}.",
        "facts": {"type": type(fault).__name__, "at": where},
    }


app = typer.Typer(
    cls=Door,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
for _command in (
    listing.ls,
    looking.show,
    listing.latest,
    listing.log,
    looking.tree,
    checking.verify,
    repairing.repair,
    changing.rollback,
    changing.restore,
    changing.pin,
    changing.unpin,
    collecting.retire,
    collecting.gc,
    doctor.doctor,
    tuning.tune,
    metering.metrics,
    metering.alerts,
    drilling.drill,
):
    app.command(epilog=EPILOG)(_command)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  (typer's callback)
    if wanted:
        print_line(f"ckptstore {ckptstore.__version__} (format {FORMAT})")
        raise typer.Exit


@app.callback()
def _root(
    *,
    engine: access.Engine = None,
    option: access.Option = None,
    require_signature: access.RequireSignature = None,
    signed_from: access.SignedFrom = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look into a run of distributed training checkpoints, verify it, and roll it back or forth.

    --engine and --option say how the store is reached, --require-signature whose records are believed. They may stand
    anywhere in a command.
    """
    access.keep(engine, option or (), require_signature=require_signature or (), signed_from=signed_from)
