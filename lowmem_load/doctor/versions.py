"""The installed releases, beside those that were tested (`tested.json`)."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from packaging.version import Version

from lowmem_load.doctor.finding import NOTE, OK, PROBLEM, Finding

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy")
NEEDED = frozenset({"torch", "deepspeed", "transformers", "accelerate", "safetensors", "huggingface_hub"})
DECIDING = ("python", "torch", "deepspeed", "transformers")
"""What an environment must agree in to be one that was tested."""


def installed() -> dict[str, str]:
    """Return the installed releases by package; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def of_environments() -> dict[str, Mapping[str, str]]:
    """Return the releases of each environment that was tested, by its name."""
    content = json.loads(files("lowmem_load").joinpath("tested.json").read_text(encoding="utf-8"))
    return {each["name"]: each["versions"] for each in content["environments"]}


def check_versions(found: Mapping[str, str], known: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield what is to be said of releases.

    Args:
        found: those installed.
        known: those tested, by environment.
    """
    for package in sorted(NEEDED - set(found)):
        yield Finding("versions", PROBLEM, f"{package} is not installed", f"pip install {package}")
    same = [name for name, versions in known.items() if all(_equal(found, versions, each) for each in DECIDING)]
    if same:
        yield Finding(
            "versions", OK, f"Python, torch, DeepSpeed and transformers are those of the tested set {same[0]}"
        )
    for package in ("python", *PACKAGES):
        releases = sorted({Version(Version(each[package]).public) for each in known.values() if package in each})
        if package in found and releases:
            yield _of_package(package, Version(Version(found[package]).public), releases)


def _equal(found: Mapping[str, str], versions: Mapping[str, str], package: str) -> bool:
    if package not in found or package not in versions:
        return False
    one, other = Version(found[package]), Version(versions[package])
    return one.release[:2] == other.release[:2] if package == "python" else one.public == other.public


def _of_package(package: str, release: Version, tested_ones: list[Version]) -> Finding:
    first, last = tested_ones[0], tested_ones[-1]
    said = f"{package} {release}, tested {first} to {last}"
    if release.release[:2] < first.release[:2]:
        return Finding("versions", PROBLEM, said, f"pip install '{package}>={first}'" * (package != "python"))
    if release.release[:2] > last.release[:2]:
        return Finding(
            "versions", NOTE, said, "newer than what was tested: watch the first run, or install a tested one"
        )
    return Finding("versions", OK, said)
