"""Who may import whom, checked on the syntax tree.

    __init__ -> nodes -> nodes/patching -> {nodes/models, public names of kernels}

kernels/ is a library that knows no ComfyUI; compilers are imported where a backend needs them.
"""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMFYUI = {"folder_paths", "server", "nodes", "node_helpers", "execution", "latent_preview", "app"}
COMPILERS = {"triton", "cutlass"}
SHARED_KERNEL_FOLDERS = {"jit", "sm90", "bench"}  # not an op of their own
OPS = {p.name for p in (ROOT / "kernels").iterdir() if p.is_dir()} - SHARED_KERNEL_FOLDERS
SPECIFICATION = {"reference.py": set(), "emulation.py": {"reference"}}  # relative imports allowed


@dataclass(frozen=True)
class Import:
    """One imported module.

    module: dotted; inside the pack relative to its root ("kernels.sol_attn.config").
    internal: reached by a relative import.
    eager: happens when the file is imported.
    names: what is taken from it; empty for ``import module``.
    """

    module: str
    internal: bool
    eager: bool
    line: int
    names: tuple[str, ...] = ()

    @property
    def top(self):
        return self.module.split(".")[0]


def imports(path, source):
    """Every import in ``source``, the text of the file at ``path`` (POSIX, from the root)."""
    package = path.split("/")[:-1]
    found = []

    def visit(node, eager):
        if isinstance(node, ast.Import):
            found.extend(Import(a.name, False, eager, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(a.name for a in node.names)
            if not node.level:
                found.append(Import(node.module, False, eager, node.lineno, names))
            else:
                climbed = node.level - 1
                base = package[: len(package) - climbed]
                if climbed > len(package):
                    base = ["<outside>"]
                module = ".".join([*base, *filter(None, [node.module])])
                found.append(Import(module, True, eager, node.lineno, names))
        elif isinstance(node, ast.Call) and node.args:
            # importlib.import_module("triton") and __import__("triton")
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                found.append(Import(str(first.value), False, eager, node.lineno))
        inner = eager and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse(source), True)
    return found


def targets(item):
    """Modules that an internal import may reach: ``from .. import x`` may mean module x."""
    return [item.module, *(f"{item.module}.{name}".strip(".") for name in item.names)]


def inside(module, folder):
    return module == folder or module.startswith(folder + ".")


def violations(path, source, public=frozenset()):
    """What is wrong with the imports of a file, one text each; ``public`` is kernels.__all__."""
    parts = path.split("/")
    name = parts[-1]
    wrong = []
    for item in imports(path, source):

        def complain(what, item=item):
            wrong.append(f"{path}:{item.line}: {what}: {item.module or '.'}")

        if item.top == "hopper_sol" and not item.internal:
            complain("absolute import of the pack")
        if item.internal and item.top == "<outside>":
            complain("relative import out of the pack")
        external = not item.internal
        if path == "__init__.py":
            if item.eager and (item.internal or item.top not in sys.stdlib_module_names):
                complain("the root imports more than the standard library")
            elif item.internal and not any(inside(t, "nodes") for t in targets(item)):
                complain("the root imports more than nodes")
        elif parts[0] == "kernels":
            if external and (item.top in COMFYUI or item.top.startswith("comfy")):
                complain("kernels import ComfyUI")
            if item.internal and not inside(item.module, "kernels"):
                complain("kernels reach out of kernels")
            backend = any(part.startswith(("triton_", "sm90")) for part in parts[1:])
            if external and item.top in COMPILERS and item.eager and not backend:
                complain("compiler imported with a file that is not a backend's")
            if name in SPECIFICATION:
                folder = ".".join(parts[:-1])
                allowed = {f"{folder}.{module}" for module in SPECIFICATION[name]}
                if external and item.top not in {"torch", "math", "typing"}:
                    complain("the specification imports more than torch")
                if item.internal and item.module not in allowed:
                    complain("the specification imports more than the specification")
            if item.internal and len(parts) > 2 and parts[1] not in SHARED_KERNEL_FOLDERS:
                reached = {target.split(".")[1] for target in targets(item) if "." in target}
                if reached & (OPS - {parts[1]}):
                    complain("one op imports another")
        elif parts[0] == "nodes":
            if external and item.top in COMPILERS:
                complain("nodes import a compiler")
            if external and item.top == "kernels":
                complain("absolute import of kernels, which is another package")
            from_kernels = item.internal and any(inside(t, "kernels") for t in targets(item))
            if from_kernels and not (item.module == "kernels" and set(item.names) <= public):
                complain(f"nodes import private parts of kernels {item.names}")
            if parts[1] == "models" and item.internal and not inside(item.module, "nodes.models"):
                complain("models import more than models")
            if parts[1] == "patching" and item.internal:
                layers = ("nodes.patching", "nodes.models", "kernels")
                modules = [item.module] if item.module not in ("", "nodes") else targets(item)[1:]
                if not all(any(inside(m, layer) for layer in layers) for m in modules):
                    complain("patching imports a node file")
    return wrong


def public_names():
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return frozenset(ast.literal_eval(node.value))
    raise AssertionError("kernels/__init__.py has no __all__")


def pack_files():
    files = [ROOT / "__init__.py", *ROOT.glob("kernels/**/*.py"), *ROOT.glob("nodes/**/*.py")]
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


@pytest.mark.parametrize("path", pack_files())
def test_layering(path):
    source = (ROOT / path).read_text("utf-8")
    assert violations(path, source, public_names()) == []


PUBLIC = frozenset({"sol_attention"})

BAD = [
    ("__init__.py", "import torch", "more than the standard library"),
    ("__init__.py", "from .nodes import make_extension", "more than the standard library"),
    (
        "__init__.py",
        "try:\n    import comfy\nexcept ImportError:\n    pass",
        "more than the standard",
    ),
    ("__init__.py", "def f():\n    from .kernels import x", "more than nodes"),
    ("__init__.py", "class A:\n    import numpy", "more than the standard library"),
    ("kernels/op.py", "import comfy.ops", "kernels import ComfyUI"),
    ("kernels/op.py", "def f():\n    from comfy_api.latest import io", "kernels import ComfyUI"),
    ("kernels/sol_attn/op.py", "import folder_paths", "kernels import ComfyUI"),
    ("kernels/sol_attn/op.py", "from server import PromptServer", "kernels import ComfyUI"),
    ("kernels/sol_attn/op.py", "import nodes", "kernels import ComfyUI"),
    ("kernels/sol_attn/op.py", "from ...nodes import schema", "kernels reach out"),
    ("kernels/sol_attn/op.py", "from ... import nodes", "kernels reach out"),
    ("kernels/sol_attn/op.py", "from .... import x", "relative import out of the pack"),
    ("kernels/sol_attn/op.py", "import triton", "compiler imported"),
    ("kernels/sol_attn/prepare.py", "from cutlass import cute", "compiler imported"),
    ("kernels/sol_attn/op.py", "if True:\n    import triton.language as tl", "compiler imported"),
    ("kernels/registry.py", "import importlib\nimportlib.import_module('triton')", "compiler"),
    ("kernels/sol_attn/reference.py", "import numpy", "more than torch"),
    ("kernels/sol_attn/reference.py", "def f():\n    import json", "more than torch"),
    ("kernels/sol_attn/reference.py", "from .config import BLOCK_SIZE", "more than the spec"),
    ("kernels/sol_attn/emulation.py", "from .config import BLOCK_SIZE", "more than the spec"),
    ("kernels/sol_attn/emulation.py", "from . import config", "more than the spec"),
    ("kernels/fp8_linear/op.py", "from ..sol_attn import config", "one op imports another"),
    ("kernels/fp8_linear/op.py", "from .. import sol_attn", "one op imports another"),
    ("kernels/fp8_linear/op.py", "from ..sol_attn.config import x", "one op imports another"),
    ("nodes/load_model.py", "def f():\n    import triton", "nodes import a compiler"),
    ("nodes/patching/run.py", "import cutlass.cute", "nodes import a compiler"),
    ("nodes/patching/run.py", "from ...kernels.sol_attn import x", "private parts of kernels"),
    ("nodes/patching/run.py", "from ...kernels import registry", "private parts of kernels"),
    ("nodes/patching/run.py", "from ... import kernels", "private parts of kernels"),
    ("nodes/run_report.py", "from ..kernels.arch import x", "private parts of kernels"),
    ("nodes/run_report.py", "import kernels", "absolute import of kernels"),
    ("nodes/models/wan.py", "from ...kernels import sol_attention", "models import more"),
    ("nodes/models/wan.py", "from ..patching import plan", "models import more"),
    ("nodes/models/wan.py", "from .. import patching", "models import more"),
    ("nodes/patching/run.py", "from ..sol_attention import x", "patching imports a node file"),
    ("nodes/patching/run.py", "from .. import schema", "patching imports a node file"),
    ("nodes/patching/run.py", "from ..schema import schema", "patching imports a node file"),
    ("nodes/patching/run.py", "from ... import nodes", "patching imports a node file"),
    ("nodes/patching/run.py", "from hopper_sol.kernels import x", "absolute import of the pack"),
    ("kernels/op.py", "def f():\n    import hopper_sol", "absolute import of the pack"),
    ("__init__.py", "def f():\n    import hopper_sol.nodes", "absolute import of the pack"),
]

GOOD = [
    ("__init__.py", "import logging\nasync def f():\n    from .nodes import make_extension"),
    ("kernels/sol_attn/reference.py", "import math\nfrom typing import NamedTuple\nimport torch"),
    ("kernels/sol_attn/emulation.py", "import torch.nn.functional\nfrom .reference import x"),
    ("kernels/sol_attn/triton_fwd.py", "import triton\nfrom .config import x"),
    ("kernels/sol_attn/sm90_fwd.py", "from cutlass import cute\nfrom ..sm90 import pipeline"),
    ("kernels/sm90/mma.py", "import cutlass"),
    ("kernels/sol_attn/__init__.py", "def load():\n    import triton"),
    (
        "kernels/fp8_linear/op.py",
        "from .. import registry\nfrom ..arch import x\nfrom ..jit import y",
    ),
    ("nodes/patching/run.py", "from ...kernels import sol_attention\nfrom ..models import x"),
    ("nodes/patching/run.py", "from . import plan\nfrom .plan import KEY\nfrom .. import models"),
    ("nodes/sol_attention.py", "from .patching.apply import x\nfrom comfy_api.latest import io"),
    ("nodes/models/wan.py", "from .base import x\ndef f():\n    import comfy.ldm.wan.model"),
]


@pytest.mark.parametrize(("path", "source", "what"), BAD)
def test_checker_catches(path, source, what):
    found = violations(path, source, PUBLIC)
    assert any(what in text for text in found), found


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_checker_allows(path, source):
    assert violations(path, source, PUBLIC) == []


def test_checker_reads_every_file_of_the_pack():
    files = pack_files()
    assert {"__init__.py", "kernels/sol_attn/op.py", "nodes/patching/run.py"} <= set(files)
    assert not any("/." in file or "__pycache__" in file for file in files)


def test_root_is_inert():
    """ComfyUI imports every pack at start; ours must not make it wait for torch."""
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('pack', {str(ROOT / '__init__.py')!r})\n"
        "before = set(sys.modules)\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
