"""Kill a training at every file that it makes, renames or removes, by `ckpt-chaos`, which knows nothing of ckptstore.

Each point is a run that is killed there and a second one that goes on: it must start from the newest commit that is in
the log, and end with the weights of a run that nothing disturbs. `before`: killed before the file is touched; `torn`:
the file is cut in half (which the tool does to what `torch.save` and `open` write, here the last weights); `term`:
SIGTERM, and killed five seconds later if it still runs. A point at which the first run ended well shows nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.arguments import count

ROOT = Path(__file__).parents[1]
MODES = ("before", "torn", "term")
SMALL = ("--steps", "4", "--every", "2", "--workers", "0")
"""Two saves: that keeps the points few."""
KEEPING = ("--steps", "8", "--every", "2", "--workers", "0", "--keep-last", "2")
"""Four saves, of which two are deleted."""
BAD = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"
BAD_KEEPING = "HARD_FAIL,SILENT_DIVERGENCE,CONTROL_FAIL"
"""Whether work was lost the tool cannot say there: it takes each record of the log for a checkpoint."""
ALL = 1000
TOOL = ("-m", "ckpt_chaos")
CHOSEN = """
import sys
from ckpt_chaos import byo, cli
byo._select = lambda events, *_: [(at, mode) for at, mode in {wanted} if at <= len(events)]
sys.exit(cli.main())
"""
"""The tool, at points that were chosen: it cannot be asked for some."""
TURNS = 4


@dataclass(frozen=True)
class Variant:
    """What is killed, and where.

    Args:
        script: How Python is told to run it.
        ranks: How many processes it has.
        killed: Which of them.
        setting: What the script is told. Workers fetch samples and touch no file, so there are none.
        bad: Verdicts that it must not come to.
    """

    script: tuple[str, ...]
    ranks: int = 1
    killed: int = 0
    setting: tuple[str, ...] = SMALL
    bad: str = BAD

    @property
    def options(self) -> list[str]:
        """What the tool is told of it."""
        return ["--ranks", str(self.ranks), "--crash-rank", str(self.killed)] if self.ranks > 1 else []

    @property
    def environment(self) -> dict[str, str]:
        """What a process finds in its environment. The tool reads there whom to kill, and does not write it."""
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # who aborts says where
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of each peer
            "CKPT_CHAOS_CRASH_RANK": str(self.killed),
        }


_PLAIN, _RANKS = ("examples/train_plain.py",), ("-m", "benchmarks.chaos_ranks")
VARIANTS = {
    "one process": Variant(_PLAIN),
    "two ranks, rank 0 killed": Variant(_RANKS, ranks=2),
    "two ranks, rank 1 killed": Variant(_RANKS, ranks=2, killed=1),
    "one process, two are kept": Variant(_PLAIN, setting=KEEPING, bad=BAD_KEEPING),
}


@dataclass(frozen=True)
class Point:
    """What became of one.

    Args:
        label: Number, kind and name of the file event, and the mode; names without what is drawn anew in each run.
        mode: How it was killed; "" for the run that nothing disturbs.
        verdict: The tool's.
        newest, resumed: Slots of the log: the newest when it was killed, and what the second run went on from.
        crashed: The first run did not end well, as it was to be.
        planned: It was killed at the same event as the first time that the events were counted, but for drawn names.
    """

    label: str
    mode: str
    verdict: str
    newest: int
    resumed: int | None
    crashed: bool
    planned: bool

    @property
    def at(self) -> tuple[int, str]:
        """Number of the file event, and the mode."""
        return int(self.label[1:].partition(" ")[0]), self.mode

    def __str__(self) -> str:
        """Return it in a line of the report."""
        return f"{self.label}: newest {self.newest}, resumed from {self.resumed}, {self.verdict}"


@dataclass(frozen=True)
class Ended:
    """What one call of the tool ended in.

    Args:
        code: Its exit code: 0 if no verdict is bad.
        points: Those at which something was killed.
        control: The verdict on a run that nothing disturbs.
        output: What it printed.
        command: What it was told.
    """

    code: int
    points: list[Point]
    control: str
    output: str
    command: list[str] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Run the tool; return 1 if a verdict is bad."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks chaos", description=__doc__)
    parser.add_argument("--points", type=count, default=ALL, help="so many at most of each variant. [all]")
    parser.add_argument("--jobs", type=count, default=2, help="points at a time. [2]")
    parser.add_argument("--only", choices=VARIANTS, action="append", help="this variant; may be repeated. [all]")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="instead of benchmarks/results")
    given = parser.parse_args(argv)
    about = {"modes": MODES, "points": given.points, "jobs": given.jobs}
    before = results.read("chaos", folder=given.results)
    rows = {row["variant"]: row for row in before["rows"]} if before else {}
    bad = 0
    for name in given.only or VARIANTS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ckptstore-chaos-") as folder:
            ended = killed_everywhere(VARIANTS[name], Path(folder) / "work", points=given.points, jobs=given.jobs)
            later = killed_later(VARIANTS[name], Path(folder), ended.points)
        took = {"seconds": round(time.monotonic() - began), "commit": results.commit()}
        rows[name] = row = counted(name, ended) | {"shown_later": [str(point) for point in later]} | took
        bad += ended.code != 0 or any(point.verdict != "PASS" for point in later)
        print(ended.output if ended.code else "", {key: row[key] for key in row if key not in ("list", "command")})
        kept = [rows[each] for each in VARIANTS if each in rows]
        print(results.write("chaos", kept, about=about, folder=given.results))  # after each: all take an hour
    return 1 if bad else 0


def killed_later(variant: Variant, folder: Path, points: Sequence[Point]) -> list[Point]:
    """Kill once more where a run ended before: it may make a file event less than the one that was counted."""
    missed = {point.at for point in points if not point.crashed}
    later: list[Point] = []
    for turn in range(TURNS if missed else 0):
        left = sorted(missed - {point.at for point in later})
        if left:
            tool = ("-c", CHOSEN.format(wanted=left))
            ended = killed_everywhere(variant, folder / f"later-{turn}", tool=tool)
            later += [point for point in ended.points if point.crashed]
    return later


def killed_everywhere(
    variant: Variant,
    work: Path,
    *,
    points: int = ALL,
    jobs: int = 2,
    tool: Sequence[str] = TOOL,
) -> Ended:
    """Let the tool kill `variant` at its file events, evenly chosen if there are more than `points`.

    Args:
        variant: What is killed.
        work: A folder that does not exist; runs are made there.
        points: For all modes together.
        jobs: Points at a time.
        tool: How Python is told to run it.
    """
    options = {
        "--checkpoint-glob": "{out}/run/log/*.json",
        "--step-regex": r"resumed from seq (\d+)",
        "--result-file": "{out}/final.pt",
        "--modes": ",".join(MODES),
        "--max-points": str(points),
        "--jobs": str(jobs),
        "--fail-on": variant.bad,
    }
    told = ["run", "--ckpt-ignore-size", *(word for pair in options.items() for word in pair), *variant.options]
    script = [*variant.script, "{out}/run", "--final", "{out}/final.pt", *variant.setting]
    command = [sys.executable, *tool, *told, "--work", str(work), "--", sys.executable, *script]
    done = subprocess.run(  # (the limit is above what all points take)
        command, cwd=ROOT, env=variant.environment, check=False, capture_output=True, text=True, timeout=4 * 3600
    )
    found = list(_points(work, variant.killed))
    return Ended(
        done.returncode,
        [point for point in found if point.mode],
        next((point.verdict for point in found if not point.mode), "none"),
        done.stdout + done.stderr,
        ["ckpt-chaos", *told, "--", "python", *script],
    )


def _points(work: Path, rank: int) -> list[Point]:
    from ckpt_chaos.runner import rejudge  # noqa: PLC0415  (who does not run this need not have it)

    planned = _events(work / "reference", rank)
    found = []
    folders = {folder.name: folder for folder in work.glob("pt_*")}
    for order, row in enumerate(rejudge(work)):
        label, at = _undrawn(row.label), re.match(r"#(\d+) .*\[(\w+)\]$", row.label)
        seen = _events(folders[f"pt_{order:03d}"], rank) if at else {}
        number = int(at[1]) if at else 0
        found.append(
            Point(
                label=label,
                mode=at[2] if at else "",
                verdict=row.verdict,
                newest=row.outcome.newest_complete_step,
                resumed=row.outcome.resumed_from_step,
                crashed=row.crashed,
                planned=seen.get(number) == planned.get(number),
            )
        )
    return found


def _events(folder: Path, rank: int) -> dict[int, str]:
    """Return the file events of a run by their numbers, without what is drawn anew in each run."""
    path = folder / f"events.log.rank{rank}"
    lines = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
    return {int(number): _undrawn(f"{kind}:{name}") for number, kind, name, _ in lines}


def _undrawn(text: str) -> str:
    return re.sub(r"[0-9a-f]{32}", "*", text)


def counted(name: str, ended: Ended) -> dict[str, Any]:
    """Return one row of the report."""
    verdicts: Mapping[str, int] = Counter(point.verdict for point in ended.points)
    return {
        "variant": name,
        "points": len(ended.points),
        **{mode: sum(point.mode == mode for point in ended.points) for mode in MODES},
        "verdicts": dict(verdicts),
        "control": ended.control,
        "did_not_crash": [point.label for point in ended.points if not point.crashed],
        "at_another_event": [point.label for point in ended.points if not point.planned],
        "command": " ".join(ended.command),
        "list": [str(point) for point in ended.points],
    }
