"""Pipelines and pages call what there is, and what others publish is pinned to a commit."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashvar_factory.build import wheel
from flashvar_factory.cli import COMMANDS, list_builds
from flashvar_factory.config import schema
from flashvar_factory.config.expand import expand_platforms
from flashvar_factory.config.selection_arguments import SelectionArguments

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
PAGES = {
    str(path.relative_to(ROOT)): path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
}
CALLERS = {**WORKFLOWS, **PAGES}


def sessions() -> set[str]:
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    found = re.findall(r"^@nox\.session\((.*)\)\ndef (\w+)\(", text, re.MULTILINE)
    return {
        named[1] if (named := re.search(r'name="([\w-]+)"', options)) else function
        for options, function in found
    }


def test_the_search_sees_sessions_and_workflows() -> None:
    assert {"build-dev", "tests", "wheels"} <= sessions()
    assert {"build.yml", "ci.yml", "wheels.yml", "gpu.yml"} <= set(WORKFLOWS)


@pytest.mark.parametrize(
    ("call", "known"),
    [(r"nox\"? -s ([\w-]+)", sessions()), (r"-m flashvar_factory ([\w-]+)", set(COMMANDS))],
    ids=["sessions", "commands"],
)
def test_what_is_called_exists(call: str, known: set[str]) -> None:
    named = {
        name: set(re.findall(call, path.read_text(encoding="utf-8")))
        for name, path in CALLERS.items()
    }
    assert any(named.values())
    assert {name: words - known for name, words in named.items() if words - known} == {}


@pytest.mark.parametrize("path", WORKFLOWS.values(), ids=WORKFLOWS)
def test_actions_are_pinned_to_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (.+)", path.read_text(encoding="utf-8"))
    assert used
    of_others = [one for one in used if not one.startswith("$/")]
    loose = [one for one in of_others if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", one)]
    assert loose == []


def jobs(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))["jobs"]
    return found


def test_every_folder_of_tests_has_a_job() -> None:
    """Both here and where all tests run; those of tests/gpu need a GPU."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (paths,) = re.findall(r"^testpaths = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    found = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("tests/*/conftest.py")}
    assert {*re.findall(r'"(.+?)"', paths), "tests/gpu"} == found
    run = [step.get("run", "") for job in jobs("ci.yml").values() for step in job["steps"]]
    named = [word for one in run for word in one.split() if word.startswith("tests/")]
    assert sorted([*named, "tests/gpu"]) == sorted(found)


def before(job: str, every: dict[str, Any]) -> set[str]:
    """All jobs without which this one is not run."""
    needs = every[job].get("needs", [])
    direct = [needs] if isinstance(needs, str) else needs
    return {*direct, *(one for name in direct for one in before(name, every))}


def test_records_of_a_gpu_are_uploaded() -> None:
    """Of a selection: under the names that its tests and benchmarks write."""
    every = jobs("gpu.yml")["test"]["steps"]
    (upload,) = (one for one in every if "upload-artifact" in one.get("uses", ""))
    before_it = every[every.index(upload) - 1]
    assert upload["if"] == before_it["if"] == "inputs.selection"
    written = re.findall(r"--(?:results|json) (\S+)", before_it["run"])
    assert upload["with"]["path"].split() == written
    assert len(written) == 2


RELEASE = jobs("wheels.yml")
# What may write anything outside of the run.
TRUSTED = [name for name, job in RELEASE.items() if "write" in job.get("permissions", {}).values()]


def steps(job: str, action: str) -> list[dict[str, Any]]:
    return [one for one in RELEASE[job]["steps"] if action in one.get("uses", "")]


def test_the_search_sees_what_publishes() -> None:
    publishing = {name for name in RELEASE if "steps" in RELEASE[name]}
    publishing = {name for name in publishing if steps(name, "gh-action-pypi-publish")}
    assert publishing == {"publish-testpypi", "publish-others", "publish"}
    assert {*publishing, "attest", "attest-sbom", "notes"} == set(TRUSTED)


@pytest.mark.parametrize("name", TRUSTED)
def test_nothing_leaves_before_all_is_checked(name: str) -> None:
    assert {"check", "first", "second", "every-wheel", "smoke-aarch64"} <= before(name, RELEASE)
    assert "if" not in RELEASE["check"]
    conditions = {RELEASE[one].get("if") for one in (*before(name, RELEASE), name)} - {None}
    assert conditions == {"github.ref_type == 'tag'"}


def test_the_release_is_checked_with_its_tag_and_both_indexes() -> None:
    (check,) = (
        one for one in RELEASE["check"]["steps"] if "nox -s check-release" in one.get("run", "")
    )
    words = check["run"].split()
    assert words[words.index("--second-build") + 1] == "build/second"
    assert "$TAG" in check["run"]
    addresses = [words[at + 1] for at, word in enumerate(words) if word == "--index"]
    assert addresses == ["https://test.pypi.org/simple", "https://pypi.org/simple"]
    after = RELEASE["check"]["steps"].index(check)
    uploaded = [
        one for one in RELEASE["check"]["steps"] if one.get("with", {}).get("name") == "checked"
    ]
    assert [RELEASE["check"]["steps"].index(one) > after for one in uploaded] == [True]


@pytest.mark.parametrize("name", ["publish-testpypi", "publish-others", "publish"])
def test_an_index_gets_what_it_lacks_of_the_checked(name: str) -> None:
    (publish,) = steps(name, "gh-action-pypi-publish")
    assert "skip-existing" not in publish["with"]
    assert publish["with"]["attestations"] is True
    (download,) = steps(name, "download-artifact")
    maker = "compare-testpypi" if name == "publish-testpypi" else "compare-pypi"
    assert maker in before(name, RELEASE)
    made = {one["with"]["name"] for one in steps(maker, "upload-artifact")}
    assert {download["with"]["pattern"]} == made
    assert publish["with"]["packages-dir"].startswith(f"{download['with']['path']}/")
    (taken,) = steps(maker, "download-artifact")
    assert taken["with"]["name"] == "checked"
    (compared,) = (one for one in RELEASE[maker]["steps"] if "nox -s" in one.get("run", ""))
    assert (
        "nox -s select-unpublished -- dist --checked build/checked/release.json" in compared["run"]
    )


@pytest.mark.parametrize("name", TRUSTED)
def test_what_leaves_is_of_the_checked(name: str) -> None:
    """No artifact of a build is attested, sent or released: it was not compared with anything."""
    wanted = {"checked", "to-testpypi", "to-pypi"}
    taken = [one["with"] for one in steps(name, "download-artifact")]
    assert {one.get("name", one.get("pattern")) for one in taken} <= wanted
    subjects = [one["with"]["subject-path"] for one in steps(name, "actions/attest")]
    assert all(one.startswith("dist/") for one in subjects)


def test_each_sbom_is_of_one_proved_wheel() -> None:
    """The pattern of the matrix finds the one wheel of a release that the SBOM is of."""
    config = schema.read(ROOT / "variants.toml")
    names = [
        f"{build.stem}-1.2.3-{wheel.tag(build.platform)}.whl"
        for build in expand_platforms(SelectionArguments(), config)
    ]
    rows = list_builds.matrix(expand_platforms(SelectionArguments(), config))["include"]
    found = [[name for name in names if fnmatch(name, row["wheel"])] for row in rows]
    assert sorted(name for (name,) in found) == sorted(names)


def test_projects_are_those_of_a_release() -> None:
    """Also of wheels for older drivers, which have no line of their own in variants.toml."""
    config = schema.read(ROOT / "variants.toml")
    builds = expand_platforms(SelectionArguments(), config)
    found = list_builds.projects(config, builds, ROOT)
    assert {"flashvar", "flashvar-factory", "flashvar-sm87", "flashvar-sm90-cu12"} < set(found)
    assert len(found) == len({build.distribution for build in builds}) + 2


def test_flashvar_is_published_last() -> None:
    others = {"publish-others", "publish-testpypi", "attest", "attest-sbom"}
    assert others <= before("publish", RELEASE)
    assert "publish-testpypi" in before("publish-others", RELEASE)


@pytest.mark.parametrize(
    ("name", "exclude"), [("publish-testpypi", None), ("publish-others", [{"project": "flashvar"}])]
)
def test_each_project_has_a_job_that_uploads_it(name: str, exclude: object) -> None:
    """The failure of one, such as one that does not exist yet, stops no other."""
    strategy = RELEASE[name]["strategy"]
    assert strategy["fail-fast"] is False
    assert strategy["matrix"].get("exclude") == exclude
    assert strategy["matrix"]["project"] == "${{ fromJSON(needs.check.outputs.projects) }}"
    (publish,) = steps(name, "gh-action-pypi-publish")
    assert publish["with"]["packages-dir"] == "upload/${{ matrix.project }}"
    assert publish["if"] == "hashFiles(format('upload/{0}/*', matrix.project)) != ''"


def test_the_jobs_that_publish_run_no_code_of_the_checkout() -> None:
    for name in TRUSTED:
        assert steps(name, "actions/checkout") == [], name
