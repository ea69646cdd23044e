"""The rules of the house, read off the source: who may import whom, and what an import may do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sitvit"
ORDER = ["data", "train", "generate", "eval", "analyze", "report", "compare"]
FREE = {"models": set(), "flow": set()}
SHARED = {"runtime", "config"}  # machine and experiment files, for everything right of models and flow
OWNERS = {
    "omegaconf": {"config/", "compare/settings.py"},
    "torch_fidelity": {"eval/inception.py"},
    "torchvision": set(),
    "torchdiffeq": {"flow/ode.py"},
    "accelerate": {"runtime.py", "train/"},
    "matplotlib": {"report/"},
    "PIL": {"data/images.py", "generate/samples.py"},
    "datasets": {"data/hub.py"},
    "diffusers": {"data/autoencoder.py", "models/", "generate/pipeline.py"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[str]:
    """Absolute dotted names of all that a file imports, inside functions too."""
    names = []
    parts = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(parts[: len(parts) - node.level]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [module] + [f"{module}.{alias.name}" for alias in node.names]
    return names


def inner(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def targets(path: Path) -> set[str]:
    """First parts, below sitvit, of what a file imports of ours."""
    ours = [name.split(".") for name in imports(path) if name.startswith("sitvit.")]
    known = {p.stem for p in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir() if p.is_dir()}
    return {parts[1] for parts in ours if parts[1] in known}


@pytest.mark.parametrize("path", MODULES, ids=inner)
def test_imports_run_leftwards(path):
    package = path.relative_to(PACKAGE).parts[0]
    if package in FREE:
        assert targets(path) <= {package}
    elif package in ORDER:
        left = set(ORDER[: ORDER.index(package) + 1])
        assert targets(path) <= left | set(FREE) | SHARED
    elif package == "config":
        assert targets(path) <= {"models", "flow", "config"}
    elif package == "runtime.py":
        assert targets(path) == set()


@pytest.mark.parametrize("path", MODULES, ids=inner)
def test_heavy_packages_have_one_owner(path):
    for name in imports(path):
        owners = OWNERS.get(name.split(".")[0])
        assert owners is None or any(inner(path).startswith(owner) for owner in owners), name


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda p: p.name)
def test_scripts_hold_no_logic(path):
    body = ast.parse(path.read_text("utf-8")).body
    kinds = [type(node) for node in body]
    assert kinds == [ast.Expr, ast.ImportFrom, ast.If]
    assert len(body[2].body) == 1


@pytest.mark.parametrize("path", MODULES, ids=inner)
def test_no_name_tells_nothing(path):
    assert not {"utils", "helpers", "common", "manager"} & set(path.with_suffix("").parts[-2:])


@pytest.mark.parametrize("path", MODULES, ids=inner)
def test_only_any_passes_free_keyword_arguments(path):
    """`**kwargs` swallows misspelt names; build_model hands its overrides to a checked constructor."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.args.kwarg:
            assert node.name == "build_model"


@pytest.mark.parametrize("path", MODULES, ids=inner)
def test_every_module_and_public_name_says_what_it_is(path):
    tree = ast.parse(path.read_text("utf-8"))
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def test_importing_everything_has_no_effect(tmp_path):
    """No folder made, no variable set, no logging configured, no device probed, no process joined."""
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in MODULES]
    names = [name.removesuffix(".__init__") for name in names]
    program = f"""
import logging, os
import torch, diffusers, accelerate, matplotlib, PIL.Image, omegaconf
before = dict(os.environ), list(logging.getLogger().handlers), torch.get_num_threads(), os.listdir(".")
for name in {names!r}:
    __import__(name)
after = dict(os.environ), list(logging.getLogger().handlers), torch.get_num_threads(), os.listdir(".")
assert before == after, (before, after)
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_help_and_configuration_errors_import_no_heavy_package():
    program = """
import sys
from pathlib import Path
from sitvit import cli
from sitvit.config import Config, load_config
verbs = [cli.train_sit, cli.sample, cli.evaluate, cli.encode_latents, cli.report, cli.fetch_data, cli.compare]
for verb in [*verbs, cli.geometry, cli.analyze]:
    try:
        verb(["--help"])
    except SystemExit:
        pass
try:
    load_config(Path("configs/demo_sit.yaml"), ["train.learning_rate=1"], Config)
    raise AssertionError
except ValueError:
    pass
cli.train_sit(["--config", "configs/sit_vit5_xl.yaml", "--dry-run"])
heavy = {"torch", "diffusers", "accelerate", "matplotlib", "numpy", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
