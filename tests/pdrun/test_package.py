"""
The package as users get it: the folder table, the wheel, the sdist, and the installed command.
"""

import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = ("backends", "launcher", "parallel", "pdrun", "rendezvous", "templates", "ui")


TAG = "v0.3.0"


def packages_on_disk() -> dict[str, str]:
    """
    Package name -> folder, for every folder with an __init__.py below the installed top folders.
    """
    found = {}
    for top in FOLDERS:
        for init in (ROOT / top).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT).as_posix()
            inside = folder.removeprefix("pdrun").removeprefix("/").replace("/", ".")
            found[f"pdrun.{inside}".removesuffix(".")] = folder
    return found


def test_the_table_names_every_package_on_disk() -> None:
    assert CONFIG["package-dir"] == packages_on_disk()
    assert sorted(CONFIG["packages"]) == sorted(packages_on_disk())


def files_to_ship() -> set[str]:
    """Paths inside the wheel of everything in the packages' folders."""
    wanted = set()
    for package, folder in packages_on_disk().items():
        for file in (ROOT / folder).iterdir():
            if file.is_file() and file.suffix != ".pyc":
                wanted.add(package.replace(".", "/") + "/" + file.name)
    return wanted


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it, of a tree with a tag."""
    out = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "pdrun"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"], ["tag", TAG]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


@pytest.mark.slow
def test_the_wheel_is_complete(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        name for name in names if not name.split("/")[0].endswith(".dist-info")
    } == files_to_ship()
    assert wheel.name == "pdrun-0.3.0-py3-none-any.whl"
    assert b'__version__ = "0.3.0"' in zipfile.ZipFile(wheel).read("pdrun/__init__.py")
    assert b'__version__ = "0.3.0"' not in (ROOT / "pdrun/__init__.py").read_bytes()
    entry = next(name for name in names if name.endswith("entry_points.txt"))
    assert "pdrun = pdrun.__main__:main" in zipfile.ZipFile(wheel).read(entry).decode()


@pytest.mark.slow
def test_the_sdist_is_complete(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in packages_on_disk().values():
        assert {f"{folder}/{file.name}" for file in (ROOT / folder).glob("*.py")} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "pdrun/py.typed"} <= names


@pytest.mark.slow
def test_the_installed_command_runs_from_anywhere(built: Path, tmp_path: Path) -> None:
    """A user's own folders called launcher/ and backends/ must not get in the way."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False, system_site_packages=False)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python3*")) / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    # the dependencies come from the environment that runs the tests
    (site / "outer.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"
    )
    for name in ("launcher", "backends", "rendezvous"):
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "__init__.py").write_text("raise RuntimeError('shadowed')\n")
    code = "import pdrun, pdrun.launcher.config.spec as s; print(pdrun.__file__, s.__file__)"
    where = subprocess.run(
        [python, "-c", code], cwd=tmp_path / "work", capture_output=True, text=True, check=True
    ).stdout
    assert all(path.startswith(str(site)) for path in where.split())
    done = subprocess.run(
        [
            python,
            "-m",
            "pdrun",
            "--nodes",
            "1",
            "--devices",
            "2",
            "--no-python",
            "/bin/echo",
            "hello",
        ],
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hello") == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-m", "pdrun", "--version"], 78),
        (["-c", "import pdrun; pdrun.launch"], 1),
        (["-c", "from pdrun import init"], 1),
    ],
)
def test_the_source_tree_that_hides_the_installed_package_says_so(
    words: list[str], code: int
) -> None:
    """
    Without site-packages nothing else is installed: the tree's own folder pdrun/ is all that is
    found.
    """
    done = subprocess.run(
        [sys.executable, "-S", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == code
    last = done.stderr.splitlines()[-1]
    assert (
        "is pdrun's source tree, which hides the installed package: run in another folder, or pip"
        " install -e ." in last
    )
    assert code != 78 or done.stderr.count("\n") == 1
