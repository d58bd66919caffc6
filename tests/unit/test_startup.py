"""lowmem_load switched on by the environment: what a process is given, and when its first load is prepared.

transformers and lowmem_load's own install are stood in for in most processes here: their start is what is tested.
"""

import os
import subprocess
import sys
import sysconfig
import textwrap
import threading
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lowmem_load.integrations.startup_hook import FOLDER, SWITCH, before_first_load, switched_on
from tests.ranks import REPO

PTH = REPO / "lowmem_load_startup.pth"
BASE = Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}")
"""The interpreter below the virtual environment: it looks into the user's site-packages."""

MODELING_UTILS = """
print("modeling_utils runs")
class PreTrainedModel:
    @classmethod
    def from_pretrained(cls, name):
        return f"ordinary {cls.__name__} {name}"
    @classmethod
    def _from_config(cls, config):
        return f"ordinary {cls.__name__} {config}"
"""
INSTALL = """
print("install is imported")
def install(*, on_load, strict=False, download=True):
    from transformers.modeling_utils import PreTrainedModel
    print("install runs" + " strictly" * strict)
    ordinary = PreTrainedModel.__dict__["from_pretrained"].__func__
    def from_pretrained(cls, name):
        rank = int(__import__("os").environ.get("RANK", 0))
        report = type("Report", (), {"rank": rank, "__str__": lambda _: "saved"})()
        on_load(report)
        return "ours " + ordinary(cls, name)
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Stand-ins: a transformers of one module, and next to the true startup modules an `install` that prints."""
    folder = tmp_path / "packages"
    for package, modules in {
        "transformers": {"__init__": "", "modeling_utils": MODELING_UTILS},
        "lowmem_load": {"__init__": "print('lowmem_load is imported')"},
        "lowmem_load/integrations": {"__init__": "", "install": INSTALL},
    }.items():
        (folder / package).mkdir(parents=True)
        for module, source in modules.items():
            (folder / package / f"{module}.py").write_text(source)
    true = ("startup_hook.py", "switch.py", "on_pythonpath")
    for name in (*(f"integrations/{name}" for name in true), "errors.py"):
        (folder / "lowmem_load" / name).symlink_to(REPO / "lowmem_load" / name)
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing in it."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=True)
    return folder


@pytest.fixture
def installed(empty: Path, packages: Path) -> Iterator[Path]:
    """The interpreter of an environment that has the stand-ins, and the start-up file, in its site-packages."""
    [site_packages] = empty.glob("lib/python*/site-packages")
    files = {"__editable__.pth": f"{packages}\n", PTH.name: PTH.read_text()}
    for name, text in files.items():
        (site_packages / name).write_text(text)
    yield empty / "bin" / "python"
    for name in files:
        (site_packages / name).unlink()


def python(
    source: str,
    *options: str,
    path: str | None = None,
    env: Mapping[str, str] | None = None,
    executable: str | Path = sys.executable,
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", SWITCH, "RANK")}
    environment |= {"PYTHONPATH": path} if path is not None else {}
    return subprocess.run(
        [str(executable), *options, "-c", textwrap.dedent(source)],
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# -- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, [FOLDER]),
        ("", [FOLDER]),
        ('/b::/a b:"/c\'"', [FOLDER, "/b", "", "/a b", '"/c\'"']),
        (f"/a:{FOLDER}", [FOLDER, "/a"]),
        (FOLDER, [FOLDER]),
    ],
)
def test_the_folder_comes_first_and_the_rest_stays(before: str | None, after: list[str]) -> None:
    given = {"HOME": "/root", **({} if before is None else {"PYTHONPATH": before})}
    environment = switched_on(given)
    assert environment == {"HOME": "/root", SWITCH: "1", "PYTHONPATH": ":".join(after)}
    assert switched_on(environment) == environment


# -- the first load --------------------------------------------------------------------------------------------------

LOADS = """
    import sys
    print("heavy" if "transformers" in sys.modules else "nothing heavy")
    import importlib.util
    importlib.util.find_spec("transformers.modeling_utils")  # to look is not to load
    from transformers.modeling_utils import PreTrainedModel
    class Model(PreTrainedModel):
        @classmethod
        def from_pretrained(cls, name):
            print("override")
            return super().from_pretrained(name)
    print(Model.from_pretrained("a"))
    print(Model.from_pretrained("b"))
    print(PreTrainedModel._from_config("c"))
    print([type(finder).__module__ for finder in sys.meta_path if "lowmem_load" in type(finder).__module__])
"""
LOADED = [
    *("lowmem_load is imported", "nothing heavy", "modeling_utils runs", "override", "install is imported"),
    *("install runs", "ours ordinary Model a", "override", "ours ordinary Model b"),
    *("ordinary PreTrainedModel c", "[]"),
]
ORDINARY = [line.removeprefix("ours ") for line in LOADED if "install" not in line and "imported" not in line]


def test_the_first_load_is_prepared_and_nothing_before(packages: Path) -> None:
    run = python(LOADS, path=f"{FOLDER}:{packages}")
    assert run.stdout.splitlines() == LOADED, run.stderr
    first, *others = run.stderr.splitlines()
    assert first.startswith("lowmem_load: on: models for ZeRO-3 or FSDP2")
    assert others == ["lowmem_load: saved"] * 2
    run = python(LOADS, path=f"{FOLDER}:{packages}", env={"RANK": "1"})
    assert (run.stdout.splitlines(), run.stderr) == (LOADED, ""), "rank 1 says nothing"


def test_the_variable_turns_the_folder_off_or_makes_it_strict(packages: Path) -> None:
    run = python(LOADS, path=f"{FOLDER}:{packages}", env={SWITCH: "0"})
    assert run.stdout.splitlines() == ["lowmem_load is imported", *ORDINARY], run.stderr
    run = python(LOADS, path=f"{FOLDER}:{packages}", env={SWITCH: "strict"})
    assert [line.replace(" strictly", "") for line in run.stdout.splitlines()] == LOADED, run.stderr
    assert "install runs strictly" in run.stdout


def test_the_file_in_site_packages_needs_only_the_variable(installed: Path) -> None:
    run = python(LOADS, "-I", env={SWITCH: "1"}, executable=installed)
    assert run.stdout.splitlines() == LOADED, run.stderr
    for environment in ({}, {SWITCH: ""}, {SWITCH: "0"}):
        run = python(LOADS, env=environment, executable=installed)
        assert (run.stdout.splitlines(), run.stderr) == (ORDINARY, "")
    run = python(LOADS, path=FOLDER, env={SWITCH: "1"}, executable=installed)
    assert run.stdout.splitlines() == LOADED, run.stderr
    assert run.stderr.count("lowmem_load: on") == 1, "both ways at once install once"


@pytest.mark.parametrize(
    ("install", "env", "message"),
    [
        ("raise ImportError('transformers lacks Gone')", {}, "cannot be installed in it: transformers lacks Gone"),
        (INSTALL, {SWITCH: "yes"}, "LOWMEM_LOAD_INSTALL is 'yes'; expected 1, strict, no-download, or 0"),
    ],
)
def test_a_failed_install_stops_every_load(install: str, env: dict[str, str], message: str, packages: Path) -> None:
    (packages / "lowmem_load/integrations/install.py").write_text(install)
    source = """
        from transformers.modeling_utils import PreTrainedModel
        for load in (PreTrainedModel.from_pretrained, PreTrainedModel._from_config, PreTrainedModel.from_pretrained):
            try:
                load("a")
            except Exception as error:
                print(isinstance(error, ImportError), str(error))
    """
    run = python(source, path=f"{FOLDER}:{packages}", env={"RANK": "1", **env})
    said = [line for line in run.stdout.splitlines() if message in line]
    assert len(said) == 3 and all(line.startswith("False") for line in said), run.stdout + run.stderr
    assert "ours " not in run.stdout


def test_a_failed_import_of_transformers_can_be_repeated(packages: Path) -> None:
    (packages / "transformers/modeling_utils.py").write_text(
        "import builtins\nif not hasattr(builtins, 'again'):\n    builtins.again = 1\n    raise ImportError('no')\n"
        + MODELING_UTILS
    )
    source = "try:\n    import transformers.modeling_utils\nexcept ImportError as error:\n    print(error)\n"
    run = python(source + textwrap.dedent(LOADS), path=f"{FOLDER}:{packages}")
    assert run.stdout.splitlines()[-8:] == LOADED[-8:], run.stdout + run.stderr


class Class:
    """Stands for PreTrainedModel."""

    @classmethod
    def from_pretrained(cls, name: str) -> str:
        return f"ordinary {name}"


def test_a_wrapper_put_around_the_class_meanwhile_stays() -> None:
    class Model(Class):
        from_pretrained = Class.__dict__["from_pretrained"]

    prepared: list[str] = []
    before_first_load(Model, lambda: prepared.append("once"))
    inner = Model.__dict__["from_pretrained"]
    Model.from_pretrained = classmethod(lambda cls, name: f"wrapped {inner.__func__(cls, name)}")  # type: ignore[assignment,arg-type]
    # Once through the wrapper to what is prepared, once more through all that lies around the class then.
    assert Model.from_pretrained("a") == "wrapped wrapped ordinary a"
    assert [Model.from_pretrained(name) for name in "bc"] == ["wrapped ordinary b", "wrapped ordinary c"]
    assert prepared == ["once"]


def test_threads_that_load_at_once_all_wait_for_what_is_prepared() -> None:
    class Model(Class):
        from_pretrained = Class.__dict__["from_pretrained"]

    started = threading.Barrier(3)
    loaded: list[str] = []

    def prepare() -> None:
        threading.Event().wait(0.2)  # the other has arrived, as a rule
        Model.from_pretrained = classmethod(lambda cls, name: f"ours {name}")  # type: ignore[assignment,arg-type]

    def load(name: str) -> None:
        stand_in = Model.from_pretrained
        started.wait()
        loaded.append(stand_in(name))

    before_first_load(Model, prepare)
    threads = [threading.Thread(target=load, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    started.wait()
    for thread in threads:
        thread.join()
    assert sorted(loaded) == ["ours a", "ours b"]


# -- other Pythons, and other start-up files --------------------------------------------------------------------------


def test_a_python_without_lowmem_load_is_unaffected(empty: Path) -> None:
    source = "import sys; print(sys.path, sys.meta_path)"
    run = python(source, path=FOLDER, env={SWITCH: "1"}, executable=empty / "bin" / "python")
    plain = python(source, executable=empty / "bin" / "python")
    assert (run.returncode, run.stdout, run.stderr) == (0, plain.stdout, "")


def test_sitecustomize_and_usercustomize_behind_it_run_once(packages: Path, tmp_path: Path) -> None:
    (packages / "sitecustomize.py").write_text("print('theirs runs')\nvalue = 7\n")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    user = tmp_path / "user" / "lib" / version / "site-packages"
    user.mkdir(parents=True)
    (user / "usercustomize.py").write_text("print('the user runs')\n")
    source = "import sitecustomize, sys; print(sitecustomize.value, sitecustomize.__file__)"
    run = python(
        source + textwrap.dedent(LOADS),
        path=f"{FOLDER}:{packages}",
        env={"PYTHONUSERBASE": str(tmp_path / "user")},
        executable=BASE,
    )
    imported, *rest = LOADED
    begin = [imported, "theirs runs", "the user runs", f"7 {packages / 'sitecustomize.py'}"]
    assert run.stdout.splitlines() == [*begin, *rest], run.stderr


def test_an_error_in_another_sitecustomize_is_reported_as_usual(packages: Path) -> None:
    (packages / "sitecustomize.py").write_text("import no_such_module")
    plain = python("print('here')", path=str(packages))
    assert "Error in sitecustomize" in plain.stderr
    run = python(LOADS, path=f"{FOLDER}:{packages}")
    assert run.stdout.splitlines() == LOADED
    assert run.stderr.startswith(plain.stderr)
