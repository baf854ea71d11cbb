"""Rules for the source: imports go one way, heavy packages are imported only in their place, files stay small.

Everything is read from the source text, so an import inside a function counts like one at the top of its file.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

from caraserve import errors

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "caraserve"
MODULES = sorted(PACKAGE.rglob("*.py"))
LABORATORY = ROOT / "scripts" / "laboratory"
EXPERIMENTS = sorted(LABORATORY.rglob("*.py"))
FOLDERS = [ROOT / folder for folder in ("caraserve", "tests", "scripts")]
SOURCES = sorted(
    path for ending in ("py", "cu", "cuh", "h") for folder in FOLDERS for path in folder.rglob(f"*.{ending}")
)

# Folders and single modules, from the command line down: each imports only from those below it.
LAYERS = (
    *("__main__", "cli", "serve", "serve_cluster", "start_checks"),  # arguments, and all wiring
    *("bench", "http", "cluster"),
    *("loop", "profiling", "engine", "lora", "kv", "tokenizer"),
    *("backend_factory", "gpu", "cpu"),
    *("telemetry", "core", "model", "demo", "config", "errors", "util"),
)

# Folders of the laboratory, likewise.
LABORATORY_LAYERS = ("papers", "fleet", "gpu")

# Inside folders, from the top down: subfolders, and single files beside them. Those in one tuple import neither each
# other nor what is above them.
SUBFOLDERS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "gpu": (
        *("backend", "builder", "assist", "forward", ("checkpoint", "merged_weights"), "memory"),
        *("weights", "supported_plans", ("linear", "attention"), "kernels", "driver"),
    ),
    "http": (
        *("app", "operations", "openapi", "server", "connection_limit"),  # routes and connections
        *("dispatch", "proxy", "peer_watch"),  # this instance or another
        *("generation", "generation_routes", "deadline", "tracing", "direct_text"),
        *("management", "apis", "access"),
        *("responses", "request_log", "streaming", "context", "client", "api_request", "whole_answer", "tls_files"),
        "body",
    ),
    "cluster": ("node", "transfer", "placement", "routing", "membership", "state"),
}

# Packages with a price, and the parts that may pay it.
HOMES = {
    "torch": {"model", "gpu", "bench"},
    "cupy": {"gpu"},
    "triton": {"gpu"},
    "numba": {"cpu"},
    "llvmlite": {"cpu"},
    "aiohttp": {"http", "cluster", "bench", "serve_cluster", "cli"},
    "orjson": {"http", "cluster", "bench"},
    "msgspec": {"cluster", "bench", "core", "engine", "cpu", "gpu"},
    "safetensors": {"model", "lora"},
    "tokenizers": {"tokenizer"},
    "llguidance": {"tokenizer"},
    "jinja2": {"tokenizer"},
    "rich": {"telemetry", "serve", "cli", "bench"},
    "uvloop": {"serve", "cli", "bench"},
    "yaml": {"cli"},
}

# Files whose decisions are functions of their arguments: no clock, no chance, no input or output. They import the
# standard library, contracts, and one another.
PURE = (
    *("core/fair_queue.py", "engine/scheduler.py", "engine/merge_policy.py"),
    *("kv/block_pool.py", "kv/memory_budget.py"),
    *(
        f"cluster/membership/{name}.py"
        for name in ("anti_entropy", "connection", "dialer", "events", "messages", "protocol", "swim")
    ),
    *(f"cluster/state/{name}.py" for name in ("lww_map", "replicated_map")),
    *(
        f"cluster/routing/{name}.py"
        for name in ("cost", "perf_model", "placement_plan", "policies", "policy_rules", "router")
    ),
    *(f"cluster/placement/{name}.py" for name in ("bin_packing", "cold_adapters", "loraserve", "migration", "plan")),
    "cluster/transfer/delete_lease.py",
)
PURE_IMPORTS = {f"caraserve.{name.removesuffix('.py').replace('/', '.')}" for name in PURE}
PURE_IMPORTS |= {"caraserve.cluster.membership.auth"}
PURE_PACKAGES = ("core", "model", "config", "errors", "util")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), relative(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a file's tree."""
    return tuple(ast.walk(tree(path)))


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Returns every module imported anywhere in the file, as (dotted name, line)."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            # `from caraserve import loop` imports caraserve.loop; `from caraserve import __version__` does not.
            for alias in node.names if node.module == "caraserve" else ():
                yield f"caraserve.{alias.name}", node.lineno
            # As does `from caraserve.cluster import wire`.
            folder = ROOT / (node.module or "").replace(".", "/")
            files = [alias.name for alias in node.names if (folder / f"{alias.name}.py").is_file()]
            for file in files if node.module != "caraserve" else ():
                yield f"{node.module}.{file}", node.lineno
            if node.module != "caraserve" and len(files) < len(node.names):
                yield f"{'.' * node.level}{node.module or ''}", node.lineno


def part(path: Path) -> str:
    """Returns the first name below the package: `http` for caraserve/http/streaming.py, `serve` for serve.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def own_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the imports of other parts of the package, as (part, line)."""
    for name, line in imports(path):
        package, _, rest = name.partition(".")
        if package == "caraserve" and (head := rest.split(".")[0]) and head != part(path) and head != "__version__":
            yield head, line


def test_every_part_has_a_layer() -> None:
    assert {part(path) for path in MODULES} - {"__init__"} == set(LAYERS)


def test_imports_run_downwards() -> None:
    for path in MODULES:
        below = LAYERS[LAYERS.index(part(path)) + 1 :] if part(path) in LAYERS else ()
        for there, line in own_imports(path):
            assert there in below, f"{relative(path)}:{line}: {part(path)} imports {there}, which is not below it"


def inner_part(path: Path) -> str:
    """Returns the second name below the package: `routing` for caraserve/cluster/routing/cost.py."""
    return path.relative_to(PACKAGE).parts[1].removesuffix(".py")


@pytest.mark.parametrize("folder", SUBFOLDERS)
def test_imports_inside_a_folder_run_downwards(folder: str) -> None:
    order = [(names,) if isinstance(names, str) else names for names in SUBFOLDERS[folder]]
    ranks = {name: rank for rank, names in enumerate(order) for name in names}
    files = [path for path in MODULES if part(path) == folder]
    assert {inner_part(path) for path in files} - {"__init__"} == set(ranks)
    for path in files:
        here = inner_part(path)
        for name, line in imports(path):
            there = name.split(".")[2] if name.startswith(f"caraserve.{folder}.") else here
            assert there == here or ranks[here] < ranks[there], (
                f"{relative(path)}:{line}: {here} imports {there}, which is not below it"
            )


def test_imports_of_the_laboratory_run_downwards() -> None:
    assert {path.relative_to(LABORATORY).parts[0] for path in EXPERIMENTS} == {*LABORATORY_LAYERS, "__init__.py"}
    for path in EXPERIMENTS:
        folder = path.relative_to(LABORATORY).parts[0]
        below = LABORATORY_LAYERS[LABORATORY_LAYERS.index(folder) :] if folder in LABORATORY_LAYERS else ()
        for name, line in imports(path):
            there = name.removeprefix("scripts.laboratory.").split(".")[0]
            assert there == name.split(".")[0] or there in below, f"{relative(path)}:{line} imports {name}"


def test_the_product_does_not_import_what_only_a_checkout_has() -> None:
    for path in MODULES:
        for name, line in imports(path):
            assert name.split(".")[0] not in ("scripts", "tests"), f"{relative(path)}:{line} imports {name}"


def circles(arrows: Mapping[str, Set[str]]) -> list[list[str]]:
    """Returns the names that import one another, directly or through others, in groups."""
    reached: dict[str, set[str]] = {}
    for name in arrows:
        found, left = set[str](), [*arrows[name]]
        while left:
            there = left.pop()
            if there not in found:
                found.add(there)
                left += arrows.get(there, ())
        reached[name] = found
    groups = {frozenset(other for other in reached[name] if name in reached.get(other, ())) for name in reached}
    return sorted(sorted(group) for group in groups if group)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_files_import_one_another() -> None:
    known = {module_name(path) for path in MODULES}
    arrows = {module_name(path): {name for name, _ in imports(path)} & known for path in MODULES}
    assert circles({name: there - {name} for name, there in arrows.items()}) == []


def test_no_folders_import_one_another() -> None:
    """A folder counts as one, as does a file beside folders."""
    arrows: dict[str, set[str]] = {}
    for path in MODULES:
        here = ".".join(module_name(path).split(".")[:3])
        there = {".".join(name.split(".")[:3]) for name, _ in imports(path) if name.startswith("caraserve.")}
        arrows.setdefault(here, set()).update(there - {here})
    assert circles(arrows) == []


def test_heavy_packages_are_imported_only_where_they_belong() -> None:
    for path in MODULES:
        for name, line in imports(path):
            homes = HOMES.get(name.split(".")[0])
            assert homes is None or part(path) in homes, f"{relative(path)}:{line}: {name} belongs in {homes}"
    for path in set(EXPERIMENTS) - set((LABORATORY / "gpu").iterdir()):
        for name, line in imports(path):
            assert name.split(".")[0] != "torch", f"{relative(path)}:{line}: torch belongs in laboratory/gpu"


def test_the_product_does_not_need_the_test_extra() -> None:
    extra = {"transformers", "peft", "openai", "hypothesis", "pytest", "accelerate", "huggingface_hub"}
    extra |= {"prometheus_client", "kubernetes_validate"}
    for path in MODULES:
        for name, line in imports(path):
            assert name.split(".")[0] not in extra, f"{relative(path)}:{line} imports {name}"


@pytest.mark.parametrize("name", PURE)
def test_pure_files_take_time_and_chance_as_arguments(name: str) -> None:
    for module, line in imports(PACKAGE / name):
        head, _, rest = module.partition(".")
        ours = head == "caraserve" and (module in PURE_IMPORTS or rest.split(".")[0] in PURE_PACKAGES)
        standard = head in sys.stdlib_module_names - {"time", "datetime", "random", "asyncio", "threading", "os"}
        handed_in = module == "random" and only_annotates(PACKAGE / name, "Random")
        assert ours or standard or handed_in or module in ("orjson", "numpy", "msgspec", "msgspec.structs"), (
            f"{name}:{line} imports {module}"
        )


def only_annotates(path: Path, what: str) -> bool:
    """Whether a file imports only that name from `random` and never calls it, but uses it in annotations."""
    nodes = nodes_of(path)
    hints = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation]
    hinted = {id(inner) for hint in hints for inner in ast.walk(hint)}
    taken = [
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        if node.module == "random"
        for alias in node.names
    ]
    plain = not any(isinstance(node, ast.Import) and node.names[0].name == "random" for node in nodes)
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == what]
    return plain and taken == [what] and all(id(node) in hinted for node in uses)


def test_only_active_request_writes_the_fields_of_a_request() -> None:
    """Checks the fields of `x.request` in all files, and those of `request` where it is a `core.request.Request`."""
    allowed = {PACKAGE / "engine" / "active_request.py", PACKAGE / "core" / "request.py"}
    for path in {*MODULES, *EXPERIMENTS} - allowed:
        is_imported = ("caraserve.core.request" in {name for name, _ in imports(path)}) and any(
            isinstance(node, ast.ImportFrom) and "Request" in {alias.name for alias in node.names}
            for node in nodes_of(path)
        )
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                owner = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_mutator(node.func):
                owner = node.func.value.value if isinstance(node.func.value, ast.Attribute) else node.func.value
            else:
                continue
            is_request = (isinstance(owner, ast.Attribute) and owner.attr == "request") or (
                is_imported and isinstance(owner, ast.Name) and owner.id == "request"
            )
            assert not is_request, f"{relative(path)}:{node.lineno} writes a request"


def dependency_attributes() -> set[str]:
    """Returns the names of attributes that hold a function or an object behind a Protocol, and in no class data."""
    classes = [node for path in (*MODULES, *EXPERIMENTS) for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    protocols = {node.name for node in classes if "Protocol" in {ast.unparse(base) for base in node.bases}}
    kinds = re.compile(rf"\b(?:{'|'.join(['Callable', *sorted(protocols)])})\b")
    found, data = set(), set()
    for node in (node for cls in classes for node in ast.walk(cls)):
        if isinstance(node, ast.AnnAssign):
            name = node.target.attr if isinstance(node.target, ast.Attribute) else ast.unparse(node.target)
            (found if kinds.search(ast.unparse(node.annotation)) else data).add(name)
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = {
                arg.arg
                for arg in (*node.args.args, *node.args.kwonlyargs)
                if arg.annotation and kinds.search(ast.unparse(arg.annotation))
            }
            for inner in ast.walk(node):
                if isinstance(inner, ast.Assign):
                    targets = inner.targets[0].elts if isinstance(inner.targets[0], ast.Tuple) else inner.targets
                    values = inner.value.elts if isinstance(inner.value, ast.Tuple) else [inner.value]
                    found |= {
                        target.attr
                        for target, value in zip(targets, values, strict=False)
                        if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and value.id in given
                    }
    return found - data


def test_dependencies_come_in_through_constructors() -> None:
    names = dependency_attributes()
    nodes = [(path, node) for path in (*MODULES, *EXPERIMENTS) for node in nodes_of(path)]
    for path, node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            assert own or not (node.attr in names or node.attr.startswith("on_")), (
                f"{relative(path)}:{node.lineno} assigns {ast.unparse(node)} from outside: pass it to the constructor, "
                "or pass one list of observers to both sides"
            )


def is_mutator(function: ast.Attribute) -> bool:
    return function.attr in ("move_to", "append", "extend", "insert", "pop", "remove", "clear", "update")


@pytest.mark.parametrize(
    "module", ["caraserve", "caraserve.loop", "caraserve.http.app", "caraserve.cluster.placement.planner_process"]
)
def test_importing_loads_no_heavy_package(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'numba', 'llvmlite', 'cupy'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_files_are_short_enough_to_read() -> None:
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > 500} == {}


def test_no_file_has_marks_of_unfinished_work() -> None:
    marks = re.compile(rf"\b(?:{'|'.join(('TO' + 'DO', 'FIX' + 'ME', 'XX' + 'X', 'Not' + 'ImplementedError'))})\b")
    found = {relative(path): marks.findall(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


def test_only_the_command_line_prints() -> None:
    for path in {*MODULES, *EXPERIMENTS} - {PACKAGE / "cli" / "main.py"}:
        for node in nodes_of(path):
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not prints, f"{relative(path)}:{node.lineno} prints"


def test_every_module_says_what_it_is() -> None:
    assert [relative(path) for path in (*MODULES, *EXPERIMENTS) if not ast.get_docstring(tree(path))] == []


def drawn_errors() -> dict[str, tuple[str | None, int | None]]:
    """Returns the tree in the docstring of errors.py: {class: (its parent, the status written beside it)}."""
    drawn: dict[str, tuple[str | None, int | None]] = {}
    above: list[tuple[int, str]] = []  # (column, class), the path to the line before
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"(?P<lead>[ │├└─]+)(?P<name>[A-Z]\w+) {2,}(?P<note>.+)", line)
        if match is None:
            continue
        column = len(match["lead"])
        above = [entry for entry in above if entry[0] < column]
        status = re.search(r"\b[1-5]\d\d\b", match["note"])
        drawn[match["name"]] = (above[-1][1] if above else None, int(status.group()) if status else None)
        above.append((column, match["name"]))
    return drawn


def defined_errors() -> dict[str, type[errors.CaraServeError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }


def test_the_drawn_error_tree_is_the_real_one() -> None:
    real = {name: cls.__base__.__name__ for name, cls in defined_errors().items() if cls is not errors.CaraServeError}
    drawn = {name: parent for name, (parent, _) in drawn_errors().items() if parent is not None}
    assert drawn == real


def test_errors_that_end_the_start_are_the_only_ones_without_a_drawn_status() -> None:
    assert {name for name, (_, status) in drawn_errors().items() if status is None} == {"ConfigError", "ModelLoadError"}


@pytest.mark.parametrize("name", sorted(defined_errors()))
def test_an_error_has_the_drawn_status_and_a_docstring(name: str) -> None:
    cls = defined_errors()[name]
    _, status = drawn_errors()[name]
    assert cls.status == (status or errors.CaraServeError.status)
    assert cls.__doc__
