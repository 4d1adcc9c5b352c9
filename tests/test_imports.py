"""Imports point one way, and the core needs the standard library alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import plait

ROOT = Path(plait.__file__).parent

ABOVE = {
    "core": set(),
    "config": set(),
    "logs": set(),
    "text": {"core"},
    "kernels": {"core"},
    "models": {"kernels", "core", "text"},
    "worker": {"models", "kernels", "core"},
    "transfer": {"core", "kernels"},
    "engine": {"worker", "transfer", "core", "models", "kernels", "text", "config", "logs"},
    "server": {"engine", "core", "text", "models", "config", "logs"},
}
"""What each part may import; ``cli``, ``llm`` and their helpers may import everything."""


def imports_of(path: Path) -> set[str]:
    """Modules named anywhere in a file, in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "plait":
                found.update(f"plait.{alias.name}" for alias in node.names)
    return found


def part_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "plait" or len(parts) < 2:
        return None
    is_module = (ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").is_file()
    return parts[1] if is_module else None  # else a name that plait itself exports


def test_imports_point_one_way():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        inside = path.relative_to(ROOT)
        part = inside.parts[0].removesuffix(".py")
        if part not in ABOVE:
            continue
        for module in imports_of(path):
            other = part_of(module)
            if other is not None and other != part and other not in ABOVE[part]:
                wrong.append(f"{inside} imports {module}")
    assert not wrong


def test_core_imports_the_standard_library_alone():
    foreign = []
    for path in sorted((ROOT / "core").rglob("*.py")):
        for module in imports_of(path):
            top = module.split(".")[0]
            if top != "plait" and top not in sys.stdlib_module_names:
                foreign.append(f"{path.name} imports {module}")
    assert not foreign


def test_the_core_reads_from_below():
    """The table in docs/design.md has each of its files, behind all that the file imports."""
    page = (ROOT.parent / "docs" / "design.md").read_text()
    table = page[page.index("| part | files of `core/` |") :].split("\n\n")[0]
    order = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row)]
    assert sorted(order) == sorted(p.stem for p in (ROOT / "core").glob("*.py") if p.stem != "__init__")
    wrong = []
    for place, name in enumerate(order):
        below = {f"plait.core.{other}" for other in order[:place]}
        core = {module for module in imports_of(ROOT / "core" / f"{name}.py") if part_of(module) == "core"}
        wrong += [f"{name} imports {module}, which comes later" for module in core - below]
    assert not wrong


def test_core_works_without_torch():
    """Every third-party import fails, and the scheduler still plans a step."""
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names and name.split(".")[0] != "plait":
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {str(ROOT.parent)!r})
import plait, plait.core
from plait.core.cache import Cache
from plait.core.geometry import Geometry
from plait.core.request import Request
from plait.core.sampling_params import SamplingParams
from plait.core.limits import SchedulerConfig
from plait.core.scheduler import Scheduler
scheduler = Scheduler(Cache(Geometry(16, 64, 640, 1, 64000)), SchedulerConfig(64, 4, 100))
scheduler.add(Request("a", [1, 2, 3], 3, SamplingParams(), 0, 4))
assert scheduler.schedule().num_tokens == 3
assert plait.SamplingParams is SamplingParams
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-S", "-c", program], check=True)
