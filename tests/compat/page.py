"""The tables of tests/compat/RESULTS.md, written from tests/compat/tested.json: `python -m tests.compat.page`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.compat.environments import read_environments
from tests.compat.groups import GROUPS
from tests.compat.results import read_results
from tests.ranks import REPO

FILE = REPO / "tests" / "compat" / "RESULTS.md"
AXES = {"python": "Python", "torch": "torch", "deepspeed": "deepspeed", "transformers": "transformers"}
MORE = ("accelerate", "peft", "trl", "datasets")
WHO = {
    "ours": "ours against ordinary",
    "stock": "stock against ordinary",
    "ours to stock": "ours against stock",
}
"""What a comparison of `tests.compat.compare` is called on the page."""

Results = Sequence[Mapping[str, Any]]


def write(path: Path = FILE) -> None:
    """Replaces what is between the markers of the page."""
    path.write_text(with_tables(path.read_text(encoding="utf-8"), read_results()), encoding="utf-8")


def with_tables(text: str, results: Results) -> str:
    """Returns the page with its tables as the results have them.

    Raises:
        KeyError: the page has a marker that no table belongs to.
        ValueError: it lacks one.
    """
    tables = {
        "environments": environments_table(results),
        "groups": groups_table(results),
        "skipped and failed": exceptions_list(results),
        "frameworks": frameworks_table(results),
        "comparison": comparison_table(results),
    }
    marked = re.compile(r"(<!-- written by tests/compat: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    written = []

    def replaced(match: re.Match[str]) -> str:
        written.append(match[2])
        return f"{match[1]}\n{tables[match[2]]}\n\n{match[4]}"

    result = marked.sub(replaced, text)
    if sorted(written) != sorted(tables):
        raise ValueError(f"the page has the markers {written} instead of {list(tables)}")
    return result


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def environments_table(results: Results) -> str:
    """Returns what each environment is: exact versions, and why it is there."""
    rows = [
        [
            result["name"],
            *(result["versions"][axis] for axis in AXES),
            ", ".join(f"{name} {result['versions'][name]}" for name in MORE if name in result["versions"]),
            f"{result['why']}; {result['date']}",
        ]
        for result in results
    ]
    done = {result["name"] for result in results}
    rows += [
        [
            environment.name,
            *(getattr(environment, axis) for axis in AXES),
            ", ".join(f"{name} {environment.pins[name]}" for name in MORE if name in environment.pins),
            f"{environment.why}; not run yet",
        ]
        for environment in read_environments()
        if environment.name not in done
    ]
    return table(["environment", *AXES.values(), "and", "why; when it ran"], rows)


def count(group: Mapping[str, Any] | None) -> str:
    """Returns the counts of a group: what passed, and what did not."""
    if group is None:
        return ""
    rest = [f"{group[kind]} {kind}" for kind in ("failed", "skipped") if group[kind]]
    return ", ".join([str(group["passed"]), *rest])


def groups_table(results: Results) -> str:
    """Returns the counts of each group of tests that ran, in each environment."""
    ran = [group for group in GROUPS if any(group in result["groups"] for result in results)]
    rows = [[result["name"], *(count(result["groups"].get(group)) for group in ran)] for result in results]
    return table(["environment", *ran], rows)


def exceptions_list(results: Results) -> str:
    """Returns every failure, and every reason for which tests were skipped with how many and where.

    Of more than two environments it gives the number; `tests/compat/tested.json` names them.
    """
    lines = []
    for result in results:
        for group in result["groups"].values():
            lines += [f"- {result['name']}, failed: `{name}`: {why}" for name, why in group["failures"].items()]
    reasons: dict[str, dict[str, int]] = {}
    for result in results:
        for group in result["groups"].values():
            for why in group["skips"].values():
                where = reasons.setdefault(why, {})
                where[result["name"]] = where.get(result["name"], 0) + 1
    for why, where in sorted(reasons.items()):
        places = ", ".join(f"{number} in {name}" for name, number in where.items())
        if len(where) > 2:
            places = f"{sum(where.values())} in {len(where)} environments"
        lines.append(f"- skipped, {why}: {places}")
    return "\n".join(lines) or "Nothing failed, and nothing was skipped."


def frameworks_table(results: Results) -> str:
    """Returns for each framework whether its own requirements are met, and whether pip resolves it together with us."""
    rows = [
        [
            result["name"],
            f"`{result['pins']['framework']}`",
            "; ".join(result["pins"]["broken"]) or "met",
            result["pins"]["resolves"],
        ]
        for result in results
        if result["pins"]
    ]
    return table(["environment", "framework", "its requirements of these packages", "pip resolves all"], rows)


def comparison_table(results: Results) -> str:
    """Returns who differs in what, and where that was seen; models that differ alike share a row and an example."""
    rows: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
    alike, unknown = [], []
    for result in results:
        if "error" in result["comparison"] or not result["comparison"]:
            unknown.append(f"{result['name']} ({result['comparison'].get('error', 'not run yet')})")
            continue
        found = [
            ((model, way, topic), _told(entries))
            for model, ways in result["comparison"].items()
            for way, topics in ways.items()
            for topic, entries in topics.items()
        ]
        for key, told in found:
            rows.setdefault(key, (told, []))[1].append(result["name"])
        if not found:
            alike.append(result["name"])
    alike_rows: dict[tuple[str, str, str], list[str]] = {}
    for (model, way, topic), (told, names) in sorted(rows.items()):
        cells = alike_rows.setdefault((way, topic, ", ".join(names)), ["", told])
        cells[0] = f"{cells[0]}, {model}".removeprefix(", ")
    lines = [[models, WHO[way], topic, told, names] for (way, topic, names), (models, told) in alike_rows.items()]
    text = [table(["models", "who", "differs in", "such as", "environments"], lines)] if lines else []
    text += [f"No difference at all: {', '.join(alike)}."] if alike else []
    text += [f"Not compared: {', '.join(unknown)}."] if unknown else []
    return "\n\n".join(text)


def _told(entries: Sequence[str]) -> str:
    rest = f"; {len(entries) - 1} more such" if len(entries) > 1 else ""
    return entries[0].replace("|", "\\|") + rest


if __name__ == "__main__":
    write()
