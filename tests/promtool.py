"""Prometheus' own checker of rules, and series that were scraped, as it takes them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOW = (
    "There is no promtool: `make test` fetches it where Debian's packages can be had, or put it on PATH: "
    "apt-get download prometheus && dpkg-deb -x prometheus_*.deb prometheus, then prometheus/usr/bin/promtool."
)


def promtool(*arguments):
    """Run it; skip the test where there is none."""
    found = shutil.which("promtool", path=str(Path(sys.executable).parent)) or shutil.which("promtool")
    if found is None:
        pytest.skip(HOW)
    return subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


def series_of(scrapes):
    """Return what promtool takes as series: one scrape a minute.

    Args:
        scrapes: Of each minute, by instance: values by name and labels.
    """
    keys = {(instance, key) for scrape in scrapes for instance, values in scrape.items() for key in values}
    return [
        {
            "series": f"{name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in said)}}}",
            "values": " ".join(
                "_" if (value := scrape.get(instance, {}).get((name, *labels))) is None else repr(float(value))
                for scrape in scrapes
            ),
        }
        for instance, (name, *labels) in sorted(keys)
        for said in [[*labels, ("run", "story"), ("job", "trainer"), ("instance", instance)]]
    ]


def check_fires(folder, rules, scrapes, expected):
    """Check that at the last minute these alerts fire and no others."""
    (folder / "rules.yml").write_text(rules)
    unit = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series_of(scrapes),
                "promql_expr_test": [
                    {
                        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{len(scrapes) - 1}m",
                        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)],
                    }
                ],
            }
        ],
    }
    (folder / "test.yml").write_text(json.dumps(unit))
    ended = promtool("test", "rules", folder / "test.yml")
    assert ended.returncode == 0, ended.stdout + ended.stderr
