"""pyproject.toml, requirements.txt, CHANGELOG.md and the tree agree; the source is plain."""

import ast
import re
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
FRONTEND = "comfyui-frontend-package"


def read(path):
    return (ROOT / path).read_text("utf-8")


def tracked(*suffixes):
    """Files of the repository, from its root, without what tools leave behind."""
    files = [p for p in ROOT.iterdir() if p.is_file()]
    for folder in ("kernels", "nodes", "web", "workflows", "locales", "tests"):
        files += (p for p in ROOT.glob(f"{folder}/**/*") if p.is_file())
    paths = (p.relative_to(ROOT).as_posix() for p in files)
    return sorted(p for p in paths if p.endswith(suffixes) and "__pycache__" not in p)


def requirement_name(requirement):
    return re.split(r"[<>=!~;\[ ]", requirement)[0].lower().replace("_", "-")


def required(text):
    """Requirements of a requirements file, comments left out."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return sorted(line for line in lines if line)


def test_packages_are_those_of_the_tree():
    """setuptools does not look for itself: a forgotten folder would be missing in a wheel."""
    settings = PYPROJECT["tool"]["setuptools"]
    folders = {
        Path(path).parent.as_posix()
        for path in tracked(".py")
        if path.startswith(("nodes/", "kernels/"))
    }
    expected = {"hopper_sol", *("hopper_sol." + f.replace("/", ".") for f in folders)}
    assert sorted(settings["packages"]) == sorted(expected)
    assert settings["package-dir"] == {"hopper_sol": "."}


def test_every_package_has_an_init():
    for package in PYPROJECT["tool"]["setuptools"]["packages"]:
        folder = ROOT.joinpath(*package.split(".")[1:])
        assert (folder / "__init__.py").is_file(), f"{package} has no __init__.py"


def test_package_data_covers_what_comfyui_serves():
    """A wheel without its web folder has nodes but no help pages."""
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["hopper_sol"]
    for folder in ("web", "workflows", "locales"):
        if any(path.startswith(f"{folder}/") for path in tracked("")):
            assert f"{folder}/**/*" in patterns


def test_requirements_are_the_dependencies():
    """ComfyUI installs requirements.txt, pip and the registry read pyproject.toml."""
    dependencies = PYPROJECT["project"]["dependencies"]
    shared = [d for d in dependencies if requirement_name(d) != FRONTEND]
    assert required(read("requirements.txt")) == sorted(shared)
    assert len(dependencies) == len(shared) + 1, "the registry reads the frontend version from here"


def test_requirements_leave_comfyui_its_own():
    """Installing this pack must never change ComfyUI's torch, triton, numpy or CUDA."""
    names = [requirement_name(d) for d in PYPROJECT["project"]["dependencies"]]
    for name in names:
        assert not name.startswith(("torch", "triton", "numpy", "xformers")), name
        # The CuTe DSL is a compiler that depends on none of CUDA's libraries.
        assert not name.startswith("nvidia-") or name == "nvidia-cutlass-dsl", name
    for requirement in required(read("requirements.txt")):
        named = requirement.split(";")[0]
        assert "==" not in named and "<" not in named, requirement


def test_comfy_section():
    comfy = PYPROJECT["tool"]["comfy"]
    assert "web" not in comfy, "WEB_DIRECTORY serves web/ already; both would load it twice"
    # PublisherId is empty until the pack is published; an invented one would be someone else's.
    assert "PublisherId" in comfy and comfy["DisplayName"]
    assert re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"])
    assert read("__init__.py").count('WEB_DIRECTORY = "./web"') == 1


def test_version_is_the_newest_of_the_changelog():
    version = PYPROJECT["project"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    headings = re.findall(r"^## (.+?)\s*$", read("CHANGELOG.md"), re.MULTILINE)
    assert headings, "CHANGELOG.md has no '## X.Y.Z' heading"
    assert headings[0].split()[0].strip("[]") == version


def test_files_named_by_the_project_exist():
    project = PYPROJECT["project"]
    for path in (project["readme"], *project["license-files"]):
        assert (ROOT / path).is_file(), f"pyproject.toml names {path}, which does not exist"


# -- nodes -------------------------------------------------------------------------------------


def listed_nodes():
    """(module, class) pairs of nodes/__init__.py, read without importing anything."""
    for node in ast.parse(read("nodes/__init__.py")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "NODES":
            return ast.literal_eval(node.value)
    raise AssertionError("nodes/__init__.py has no NODES")


def literal_node_ids(path):
    """node_id=... of every schema call inside a define_schema."""
    ids = []
    for function in ast.walk(ast.parse(read(path))):
        if isinstance(function, ast.FunctionDef) and function.name == "define_schema":
            for call in ast.walk(function):
                if isinstance(call, ast.Call):
                    ids += [k.value for k in call.keywords if k.arg == "node_id"]
    return [getattr(value, "value", None) for value in ids]


@pytest.mark.parametrize(("module", "name"), listed_nodes())
def test_node_id_is_a_literal(module, name):
    """ComfyUI-Manager finds nodes by reading the source."""
    assert literal_node_ids(f"nodes/{module}.py") == [name]
    assert name.startswith("HopperSol")


@pytest.mark.parametrize("name", [name for _, name in listed_nodes()])
def test_node_has_a_help_page(name):
    page = ROOT / "web" / "docs" / f"{name}.md"
    assert page.is_file(), f"web/docs/{name}.md is missing"
    assert page.read_text("utf-8").strip()


def test_help_pages_belong_to_nodes():
    names = {name for _, name in listed_nodes()}
    pages = [Path(p).name.split(".")[0] for p in tracked(".md") if p.startswith("web/docs/")]
    assert set(pages) <= names


def test_every_node_file_is_listed():
    files = {
        path.stem
        for path in (ROOT / "nodes").glob("*.py")
        if "define_schema" in path.read_text("utf-8")
    }
    assert files == {module for module, _ in listed_nodes()}


# -- source ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", tracked(".py", ".js", ".mjs", ".md", ".toml", ".txt", ".json"))
def test_source_survives_a_windows_console(path):
    """Windows tools read and print text as cp1252 unless told otherwise."""
    data = (ROOT / path).read_bytes()
    assert not data.startswith(b"\xef\xbb\xbf"), "byte order mark"
    data.decode("utf-8").encode("cp1252")


def dangerous(source):
    """What in a Python source could run foreign code or load a pickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "builtins.eval", "builtins.exec", "torch.load"):
                found.append(f"line {node.lineno}: {called}(")
            if called.endswith(("os.system", "os.popen")):
                found.append(f"line {node.lineno}: {called}(")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module or ''}.{a.name}" for a in node.names]
            for module in modules:
                if module.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "shelve"):
                    found.append(f"line {node.lineno}: import {module}")
                if module == "torch.load":
                    found.append(f"line {node.lineno}: import {module}")
    return found


def shipped(*suffixes):
    return [path for path in tracked(*suffixes) if not path.startswith("tests/")]


@pytest.mark.parametrize("path", shipped(".py"))
def test_source_runs_no_foreign_code(path):
    assert dangerous(read(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "def f():\n    exec(text)",
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x', weights_only=True)",
        "from torch import load",
        "import os\nos.system('x')",
    ],
)
def test_checker_catches(source):
    assert dangerous(source)


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "x = 'eval(1)'  # exec(", "re.compile('x')", "import torch\ntorch.save(1)"],
)
def test_checker_allows(source):
    assert dangerous(source) == []


@pytest.mark.parametrize("path", shipped(".js", ".mjs"))
def test_scripts_run_no_foreign_code(path):
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", read(path), flags=re.DOTALL)
    assert not re.search(r"(?<![\w.])(eval|Function)\s*\(", code)
