"""The report of a release as a page that a person reads: one file, with all that it needs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

from flashvar_factory.release import report

_STYLE: Final = """\
      body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
             padding: 0 1rem; color: #1b1f24; background: #fff; }
      h1 small { font-weight: normal; color: #57606a; }
      table { border-collapse: collapse; width: 100%; }
      th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid #d0d7de;
               vertical-align: top; }
      td.number { text-align: right; font-variant-numeric: tabular-nums; }
      code { font: .85em ui-monospace, monospace; overflow-wrap: anywhere; }
      td:first-child { min-width: 14rem; }
      .summary { padding: .6rem 1rem; border-left: 4px solid #1a7f37; background: #dafbe1; }
      pre { overflow-x: auto; background: #f6f8fa; padding: 1rem; }
      @media (prefers-color-scheme: dark) {
        body { color: #e6edf3; background: #0d1117; } pre { background: #161b22; }
        th, td { border-color: #30363d; } .summary { background: #12261e; }
      }
"""


def html(found: Mapping[str, Any]) -> str:
    """The page of a report's document."""
    title = f"{found['project']} {found['version']}"
    return f"""\
<!DOCTYPE html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>Release {escape(title)}</title>
    <style>
{_STYLE}    </style>
  </head>
  <body>
    <h1>{escape(title)} <small>commit <code>{escape(found["revision"])}</code></small></h1>
    <p class="summary">{escape(report.summary(found))}</p>
    <h2>Files</h2>
    <table>
      <tr><th>file</th><th>bytes</th><th>architecture</th><th>kernels</th><th>toolkit</th>\
<th>driver</th><th>results</th></tr>
{_lines(map(_file, found["files"]))}    </table>
    <h2>Hashes (SHA-256)</h2>
    <table>
{_lines(map(_hash, found["files"]))}    </table>
    <h2>Steps</h2>
{_lines(map(_step, found["steps"]))}  </body>
</html>
"""


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"      {row}\n" for row in rows)


def _file(file: Mapping[str, Any]) -> str:
    code = f"{file['kind']} ({'+'.join(file['code_kinds'])})" if "code" in file else "-"
    kernels = len(file["kernels"]) if "kernels" in file else "-"
    results = "<br>".join(
        f"{escape(stage)}: {escape(text)}" for stage, text in file["results"].items()
    )
    return (
        f"<tr><td><code>{escape(file['file'])}</code></td>"
        f'<td class="number">{file["bytes"]:,}</td><td>{escape(code)}</td>'
        f'<td class="number">{kernels}</td><td>{escape(file.get("toolkit", "-"))}</td>'
        f"<td>{escape(file.get('driver', '-'))}</td><td>{results or '-'}</td></tr>"
    )


def _hash(file: Mapping[str, Any]) -> str:
    return (
        f"<tr><td><code>{escape(file['file'])}</code></td>"
        f"<td><code>{escape(file['sha256'])}</code></td></tr>"
    )


def _step(step: Mapping[str, Any]) -> str:
    line = f"<b>{escape(step['name'])}</b>: {escape(step['summary'])}"
    if not step["facts"]:
        return f"<p>{line}</p>"
    facts = escape(json.dumps(step["facts"], indent=1, ensure_ascii=False))
    return f"<details><summary>{line}</summary><pre>{facts}</pre></details>"
