"""What `make lint` asks of the workflows and of the actions that they use, beyond GitHub's own schema.

Nothing here can be tried without GitHub, so all that can be known from the files is: that what they name exists (make
targets, actions, inputs, columns of the matrix), that code of others is pinned, that what a job found is kept when it
fails, and that no stranger's code gets more than it needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

WORKFLOWS = Path(".github/workflows")
KEEP = "./ci/keep"
HOSTED = "ubuntu-24.04"
GATE = (
    "github.event_name != 'pull_request' || "
    "(github.event.action == 'labeled' && github.event.label.name == 'gpu') || "
    "(github.event.action != 'labeled' && github.event.pull_request.head.repo.full_name == github.repository)"
)
"""What must hold for a change to be run on machines of one's own: see .github/workflows/gpu-gate.yml."""

_FINDS = ("test-cpu", "test-gpu", "verify", "fuzz", "museum", "stress", "soak")
_RUN = re.compile(r'make(?: [A-Z_]+=[^\s$]+| [a-z-]+)+(?: >> "\$GITHUB_STEP_SUMMARY")?')
_FORBIDDEN = {
    "pull_request_target": "runs with the rights of this repository what a stranger wrote",
    "workflow_run": "runs with the rights of this repository after what a stranger wrote",
}


@dataclass(frozen=True)
class File:
    """A workflow or an action: its path in the repository, its text and what that holds."""

    path: Path
    text: str
    data: dict[Any, Any]

    @property
    def triggers(self) -> dict[str, Any]:
        """Of a workflow. YAML reads the key ``on`` as true."""
        found: Any = self.data.get("on", self.data.get(True, {}))
        if isinstance(found, str):
            return {found: None}
        return dict(found) if isinstance(found, dict) else dict.fromkeys(found)

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        """Of a workflow; an action is one job."""
        jobs: dict[str, dict[str, Any]] = self.data.get("jobs", {})
        return jobs if self.is_workflow else {"": self.data["runs"]}

    @property
    def is_workflow(self) -> bool:
        """Else an action."""
        return self.path.parent == WORKFLOWS

    @property
    def inputs(self) -> dict[str, Any]:
        """What a caller gives, of any kind of caller."""
        if not self.is_workflow:
            return self.data.get("inputs") or {}
        found: dict[str, Any] = {}
        for kind in ("workflow_call", "workflow_dispatch"):
            found |= (self.triggers.get(kind) or {}).get("inputs") or {}
        return found


class _UniqueKeys(yaml.SafeLoader):
    """GitHub refuses a key that is there twice; PyYAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the key {key!r} is there twice")
        return super().construct_mapping(node, deep)


def load(root: Path) -> tuple[dict[Path, File], list[str]]:
    """The workflows and actions of a repository by path, and what keeps some of them from being read."""
    files: dict[Path, File] = {}
    complaints = []
    paths = [*(root / WORKFLOWS).glob("*.y*ml"), *(root / "ci").glob("*/action.yml")]
    for path in sorted(paths):
        relative, text = path.relative_to(root), path.read_text()
        try:
            data = yaml.load(text, _UniqueKeys)  # a safe loader
        except yaml.YAMLError as error:
            complaints.append(f"{relative}: no YAML: {' '.join(str(error).split())}")
            continue
        if isinstance(data, dict) and isinstance(data.get("jobs" if relative.parent == WORKFLOWS else "runs"), dict):
            files[relative] = File(relative, text, data)
        else:
            complaints.append(f"{relative}: neither a workflow with jobs nor an action that runs something")
    if not any(file.is_workflow for file in files.values()):
        complaints.append(f"{WORKFLOWS}: no workflow found")
    return files, complaints


def complaints(files: dict[Path, File], targets: frozenset[str], variables: frozenset[str]) -> Iterator[str]:
    """What is wrong with them, a line each; ``targets``, ``variables``: of the Makefile."""
    for file in files.values():
        if file.is_workflow:
            yield from _said(file, _of_workflow(file, files))
        yield from _said(file, _of_names(file))
        yield from _said(file, _of_contexts(file))
        yield from _said(file, _of_values(file, variables))
        for job in file.jobs.values():
            if "uses" in job:
                yield from _said(file, _of_use(file, job, files))
            yield from _said(file, _of_steps(file, job.get("steps", []), files, targets))
            yield from _said(file, _of_order(file, job))
            yield from _said(file, _of_caches(job))
            yield from _said(file, _of_artifacts(job, files))


def _said(file: File, found: Iterator[str]) -> Iterator[str]:
    yield from (f"{file.path}: {each}" for each in found)


def _of_workflow(file: File, files: dict[Path, File]) -> Iterator[str]:
    if file.data.get("permissions") != {"contents": "read"}:
        yield "expected `permissions: {contents: read}` and nothing more, for the whole workflow"
    for trigger, why in _FORBIDDEN.items():
        if trigger in file.triggers:
            yield f"the trigger {trigger} {why}"
    called_only = set(file.triggers) == {"workflow_call"}
    if not called_only and set(file.data.get("concurrency") or ()) != {"group", "cancel-in-progress"}:
        yield "expected `concurrency` with `group` and `cancel-in-progress`"
    concurrency = file.data.get("concurrency") or {}
    if not called_only and "${{ github.ref }}" not in str(concurrency.get("group")):
        yield "`concurrency`: expected a group by `github.ref`: in one for all, a branch would end the run of another"
    if "schedule" in file.triggers and concurrency.get("cancel-in-progress") is not False:
        yield "`concurrency`: expected `cancel-in-progress: false`: what runs for hours is not cut short"
    if called_only and "concurrency" in file.data:
        yield "`concurrency` is for who calls it: in a group of the same name it would wait for its own caller"
    if "secrets" in file.text:
        yield "no job here needs `secrets`"
    for name, job in file.jobs.items():
        if "permissions" in job:
            yield f"job {name}: `permissions` are those of the whole workflow"
        if "runs-on" in job and "timeout-minutes" not in job:
            yield f"job {name}: expected `timeout-minutes`; without, a hang lasts six hours"
        gate = " ".join(str(job.get("if", "")).split())
        if "pull_request" in file.triggers and not _hosted(job, files) and gate != GATE:
            yield f"job {name}: pull requests run on machines of one's own: expected `if: {GATE}`, got {gate!r}"


def _hosted(job: dict[str, Any], files: dict[Path, File]) -> bool:
    """Whether a job, or all jobs of the workflow that it calls, run on GitHub's machines."""
    if "uses" not in job:
        return bool(job.get("runs-on") == HOSTED)
    called = files.get(Path(job["uses"]))
    return called is not None and all(_hosted(each, files) for each in called.jobs.values())


def _of_names(file: File) -> Iterator[str]:
    """Inputs, and columns of the matrix, that expressions name."""
    for name in sorted(set(re.findall(r"\binputs\.([\w-]+)", file.text)) - set(file.inputs)):
        yield f"`inputs.{name}`: there is no such input"
    matrix = set()
    for job in file.jobs.values():
        found = job.get("strategy", {}).get("matrix", {})
        matrix |= set(found) | {key for cell in found.get("include", []) for key in cell}
    for name in sorted(set(re.findall(r"\bmatrix\.([\w-]+)", file.text)) - matrix):
        yield f"`matrix.{name}`: the matrix has no such column"


def _of_contexts(file: File) -> Iterator[str]:
    """What expressions begin with: of a name that is not known GitHub makes nothing, or refuses the file."""
    known = {"github", "inputs", "matrix", "vars", "env"}
    conditions = [
        str(each["if"]) for job in file.jobs.values() for each in (job, *job.get("steps", [])) if "if" in each
    ]
    for expression in [*re.findall(r"\$\{\{(.*?)\}\}", file.text), *conditions]:
        for name in re.findall(r"(?<![\w.-])([A-Za-z_]\w*)\.", re.sub(r"'[^']*'", "", expression)):
            if name not in known:
                yield f"`{' '.join(expression.split())}`: expected one of {', '.join(sorted(known))}, got {name!r}"
    for name, job in file.jobs.items():
        if file.is_workflow and re.search(r"\benv\.", str(job.get("if", ""))):
            yield f"job {name}: `if` of a job cannot see `env`"


def _of_values(file: File, variables: frozenset[str]) -> Iterator[str]:
    """Values for make: one that it does not know is a default that nobody asked for."""
    for job in file.jobs.values():
        for each in (job, *job.get("steps", [])):
            for name in each.get("env") or {}:
                if name not in variables and not name.startswith("PIP_"):
                    yield f"`env`: {name}: the Makefile has no such variable"


def _of_order(file: File, job: dict[str, Any]) -> Iterator[str]:
    """A failing step fails the job; actions of this repository are there once it is checked out."""
    there = not file.is_workflow
    for each in (job, *job.get("steps", [])):
        uses = each.get("uses", "")
        if "continue-on-error" in each:
            yield f"`{uses or each.get('run') or 'job'}`: `continue-on-error`: what fails must make the job red"
        there = there or uses.startswith("actions/checkout@")
        if each is not job and uses.startswith("./") and not there:
            yield f"`uses: {uses}`: expected actions/checkout before it"


def _of_caches(job: dict[str, Any]) -> Iterator[str]:
    """What is saved under a key of its own, since no cache is replaced, is what the next run restores."""
    steps = job.get("steps", [])
    restored = [each.get("with") or {} for each in steps if each.get("uses", "").startswith("actions/cache/restore@")]
    for step in steps:
        if not step.get("uses", "").startswith("actions/cache/save@"):
            continue
        saved = step.get("with") or {}
        key = str(saved.get("key"))
        if "${{ github.run_id }}" not in key or "${{ github.run_attempt }}" not in key:
            yield f"cache {key!r}: expected `github.run_id` and `github.run_attempt` in it: no cache is replaced"
        same = [one for one in restored if (one.get("path"), one.get("key")) == (saved.get("path"), saved.get("key"))]
        begins = [str(one.get("restore-keys") or "-").strip() for one in same]
        if not any(key.startswith(begin) and "github.run" not in begin for begin in begins):
            yield f"cache {key!r}: expected a step that restores its path by it, with `restore-keys` that begin it"


def _of_artifacts(job: dict[str, Any], files: dict[Path, File]) -> Iterator[str]:
    """Artifacts of a run have names of their own: of two alike the second is refused, and lost."""
    if "matrix" not in job.get("strategy", {}):
        return
    for step in job.get("steps", []):
        called = files.get(Path(step.get("uses", "")) / "action.yml")
        if called is None:
            continue
        cell = {name for name, value in (step.get("with") or {}).items() if "matrix." in str(value)}
        for inner in called.data["runs"].get("steps", []):
            if inner.get("uses") == KEEP:
                name = str((inner.get("with") or {}).get("name"))
                if not cell & set(re.findall(r"\$\{\{ inputs\.([\w-]+) \}\}", name)):
                    yield f"`uses: {step['uses']}`: the artifact {name!r} has the same name in each cell of the matrix"


def _of_use(file: File, step: dict[str, Any], files: dict[Path, File]) -> Iterator[str]:
    uses = step["uses"]
    if uses.startswith("./"):
        path = Path(uses)
        called = files.get(path if path.parent == WORKFLOWS else path / "action.yml")
        if called is None:
            yield f"`uses: {uses}`: there is no such workflow or action"
            return
        if called.is_workflow and "workflow_call" not in called.triggers:
            yield f"`uses: {uses}`: cannot be called, it has no trigger `workflow_call`"
        given = set(step.get("with") or {})
        needed = {name for name, each in called.inputs.items() if each.get("required")}
        yield from (f"`uses: {uses}`: takes no input {name!r}" for name in sorted(given - set(called.inputs)))
        yield from (f"`uses: {uses}`: the input {name!r} is missing" for name in sorted(needed - given))
        return
    noted = re.search(rf"uses: {re.escape(uses)}[ ]+# (.+)", file.text)
    note = "" if noted is None else noted.group(1)
    if re.fullmatch(r"[\w.-]+(?:/[\w.-]+)+@[0-9a-f]{40}", uses):
        if not re.fullmatch(r"v\d+\.\d+\.\d+", note):
            yield f"`uses: {uses}`: expected the version of this commit behind it, `# v1.2.3`, got {note!r}"
    elif not (re.fullmatch(r"[\w.-]+(?:/[\w.-]+)+@v\d+(?:\.\d+)*", uses) and note.startswith("by version: ")):
        yield (
            f"`uses: {uses}`: expected a full commit (40 hex digits) and `# v1.2.3` behind it, or a version and "
            "`# by version: WHY`"
        )


def _of_steps(
    file: File, steps: list[dict[str, Any]], files: dict[Path, File], targets: frozenset[str]
) -> Iterator[str]:
    finding = False
    for step in steps:
        uses, run = step.get("uses", ""), step.get("run", "")
        if uses:
            yield from _of_use(file, step, files)
        if uses.startswith("actions/checkout@") and (step.get("with") or {}).get("persist-credentials") is not False:
            yield "checkout: expected `persist-credentials: false`"
        for line in run.strip().splitlines():
            yield from _of_command(line.strip(), targets)
            finding = finding or any(target in line.split() for target in _FINDS)
        keeps = uses == KEEP or uses.startswith(("actions/upload-artifact@", "actions/cache/save@"))
        keeps = keeps or any(word in ("summary", "regressions") for word in run.split())
        if keeps and step.get("if") != "always()":
            yield f"`{uses or run.strip()}`: expected `if: always()`; a failing job has something to keep"
        if uses == KEEP:
            finding = False
    if finding:
        yield f"what make finds is lost: expected a last step `uses: {KEEP}`"


def _of_command(line: str, targets: frozenset[str]) -> Iterator[str]:
    if not _RUN.fullmatch(line):
        yield f"`run: {line}`: expected one make target, which anybody can run by hand (values by `env`)"
        return
    words = line.partition(" >> ")[0].split()[1:]
    yield from (f"`run: {line}`: no make target {word!r}" for word in words if "=" not in word and word not in targets)
