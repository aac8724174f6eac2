"""Python source as a program that can be watched and changed: the places where it calls, and edits of them.

A site is a call, an operator or an index inside a function. `Program.loaded` runs files with a call of a hook
in place of each site; the hook sees the function and the arguments. `Program.edited` writes changes of sites
into the text, and leaves everything else as it is.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.abc
import io
import itertools
import operator
import re
import sys
import sysconfig
import tokenize
import traceback
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, TypeGuard

from nnx_parallel.errors import RecipeError

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("platlib", "purelib", "stdlib"))
"""The folders of installed code."""
Hook = Callable[..., Any]
"""`(number of the site, function, *arguments, **keywords) -> result`."""
Place = tuple[int, ...]
"""An operand: `(n,)` is an argument, `(n, m)` an element of an argument, `()` the object of a method."""
_OPERATORS: dict[type[ast.operator], str] = {
  ast.Add: "add",
  ast.Div: "truediv",
  ast.MatMult: "matmul",
  ast.Mult: "mul",
  ast.Pow: "pow",
  ast.Sub: "sub",
}
_OF_THE_FRAME = frozenset(("dir", "eval", "exec", "globals", "locals", "super", "vars"))
"""Functions that read the frame of their caller: a hook between them would be the caller."""
_HOOK, _OPERATOR, _SLICE = "__annotated_site__", "__annotated_operator__", "__annotated_slice__"
_BREAKS = re.compile("[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
"""Characters that end a line for some readers of a patch, and not for others."""


@dataclasses.dataclass(frozen=True)
class Change:
  """What to write at a site.

  Attributes:
    keywords: arguments to add -> the entries of their spec, as text.
    operands: operands to reshard, by their place in `Source.operands` -> the entries of the spec.
    form: `""` as it is written; `"matmul"`: the function instead of the operator; `"get"`: `.at[i].get(...)`
      instead of an index; `"take"`: the same instead of `jnp.take(table, i, axis=0)`.
  """

  keywords: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
  operands: Mapping[Place, str] = dataclasses.field(default_factory=dict[Place, str])
  form: str = ""


class Source:
  """A Python file and its sites.

  Attributes:
    path: the file.
    text: its text.
    sites: the node of each site, by its number.
  """

  def __init__(self, path: Path, text: str | None = None, first: int = 0):
    self.path = path
    self.text = _read(path) if text is None else text
    self.sites: dict[int, ast.expr] = dict(_numbered(ast.parse(self.text, str(path)), first))
    self._first = first

  def where(self, site: int) -> str:
    """The line of a site, and its code in one line."""
    node = self.sites[site]
    code = " ".join((ast.get_source_segment(self.text, node) or "").split())
    return f"{self.path.name}, line {node.lineno}: {code}"

  def operands(self, site: int) -> dict[Place, ast.expr]:
    """The operands of a site that are written one by one: arguments, and elements of a list or tuple."""
    node = self.sites[site]
    if isinstance(node, ast.BinOp):
      return {(0,): node.left, (1,): node.right}
    if not isinstance(node, ast.Call):
      return {(0,): node.value} if isinstance(node, ast.Subscript) else {}
    found: dict[Place, ast.expr] = {(): node.func.value} if isinstance(node.func, ast.Attribute) else {}
    for n, argument in enumerate(_until_star(node.args)):
      found[n,] = argument
      if isinstance(argument, (ast.List, ast.Tuple)):
        found |= {(n, m): element for m, element in enumerate(_until_star(argument.elts))}
    return found

  def method(self, site: int) -> str:
    """The name of the attribute that a site calls, or nothing."""
    node = self.sites[site]
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""

  def is_take(self, site: int) -> bool:
    """Whether a site is written as `f(table, rows, axis=0)`, or without the name of the axis."""
    node = self.sites[site]
    if not isinstance(node, ast.Call) or any(isinstance(x, ast.Starred) for x in node.args):
      return False
    axis = [*node.args[2:], *(keyword.value for keyword in node.keywords if keyword.arg == "axis")]
    first = len(axis) == 1 and isinstance(axis[0], ast.Constant) and axis[0].value == 0
    simple = isinstance(node.args[0], (ast.Attribute, ast.Name, ast.Subscript))
    return first and simple and len(node.args) + len(node.keywords) == 3

  def run(self, module: types.ModuleType, hook: Hook | None) -> None:
    """Runs the file in a module; with a hook, each site inside a function calls the hook."""
    tree = ast.parse(self.text, str(self.path))
    if hook is not None:
      numbers = {node: n for n, node in _numbered(tree, self._first)}
      tree = ast.fix_missing_locations(_Hooked(numbers).visit(tree))
    module.__dict__.update({_HOOK: hook, _OPERATOR: operator, _SLICE: slice})
    exec(compile(tree, str(self.path), "exec"), module.__dict__)

  def names(self) -> dict[str, str]:
    """Imported module or object -> its name in this file, of the imports at the top."""
    found: dict[str, str] = {}
    for node in ast.parse(self.text).body:
      if isinstance(node, ast.Import):
        roots = [x.name.split(".")[0] for x in node.names]
        found |= {
          x.name if x.asname else root: x.asname or root for x, root in zip(node.names, roots, strict=True)
        }
      elif isinstance(node, ast.ImportFrom) and node.module:
        found |= {f"{node.module}.{x.name}": x.asname or x.name for x in node.names}
    return found

  def _bound(self) -> set[str]:
    """The names that the file binds itself, other than by an import."""
    nodes = [*ast.walk(ast.parse(self.text))]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return (
      names | arguments | {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    )

  def edited(self, changes: Mapping[int, Change]) -> str:
    """The text with these changes of sites, and with the imports that they need."""
    names, imports = self.names(), list[str]()

    def named(path: str, line: str) -> str:
      if path not in names:
        names[path] = line.split()[-1]
        imports.append(line)
      return names[path]

    taken = "P" in {*self._bound(), *names.values()} and "jax.P" not in names
    line = f"from jax.sharding import PartitionSpec{'' if taken else ' as P'}"

    def spec(entries: str) -> str:
      return f"{names.get('jax.P') or named('jax.sharding.PartitionSpec', line)}({entries})"

    edits = _Edits(self.text)
    for site, change in changes.items():
      stated = ", ".join(f"{key}={spec(entries)}" for key, entries in change.keywords.items())
      node, operands = self.sites[site], self.operands(site)
      for place, entries in change.operands.items():
        reshard = f"{named('jax', 'import jax')}.sharding.reshard"
        edits.around(operands[place], f"{reshard}(", f", {spec(entries)})")
      if isinstance(node, ast.BinOp) and change.form == "matmul":
        jnp = names.get("jax.numpy") or f"{named('jax', 'import jax')}.numpy"
        edits.around(node, f"{jnp}.matmul(", f", {stated})")
        edits.between(node.left, node.right, " @ ", ", ")
      elif isinstance(node, ast.Subscript) and change.form == "get":
        edits.insert(edits.find(edits.end(node.value), b"["), ".at")
        edits.around(node, "", f".get({stated})")
      elif isinstance(node, ast.Call) and change.form == "take":
        table, rows = node.args[:2]
        edits.replace(edits.start(node), edits.start(table), "")
        edits.replace(edits.end(table), edits.start(rows), ".at[")
        edits.replace(edits.end(rows), edits.end(node), f'].get(mode="fill", {stated})')
      elif isinstance(node, ast.Call) and stated:
        edits.add_keywords(node, stated)
    return _with_imports(edits.text(), imports)


class Program:
  """A Python file and modules that it imports, to be changed together.

  Attributes:
    sources: the file, then the modules.
  """

  def __init__(self, sources: Sequence[Source]):
    self.sources = sources

  @classmethod
  def read(cls, paths: Iterable[Path]) -> Program:
    """Reads files; their sites have different numbers."""
    sources = list[Source]()
    for path in paths:
      sources.append(Source(path, first=max(itertools.chain(*(x.sites for x in sources)), default=-1) + 1))
    nodes = ast.walk(ast.parse(sources[0].text))
    if any(isinstance(node, ast.ImportFrom) and node.level for node in nodes):
      raise RecipeError(
        f"{sources[0].path} has relative imports, so it does not run alone.",
        fix="write absolute imports: from package.module import ...",
      )
    return cls(sources)

  def of(self, site: int) -> Source:
    """The file of a site."""
    return next(source for source in self.sources if site in source.sites)

  def edited(self, changes: Mapping[int, Change]) -> Program:
    """The program with these changes."""
    own = [{n: x for n, x in changes.items() if n in source.sites} for source in self.sources]
    return Program([Source(x.path, x.edited(some)) for x, some in zip(self.sources, own, strict=True)])

  @contextlib.contextmanager
  def loaded(self, hook: Hook | None = None) -> Generator[types.ModuleType]:
    """Runs the file as a new module; it imports the other files anew, and each site calls the hook."""
    main, *others = self.sources
    module = types.ModuleType(f"nnx_parallel_annotated_{main.path.stem}")
    module.__file__ = str(main.path)
    before, path = {*sys.modules}, [*sys.path]
    sys.modules[module.__name__] = module
    folder = str(main.path.parent.resolve())
    sys.path.insert(0, folder)
    try:
      with _imported({source.path.resolve(): source for source in others}, hook):
        main.run(module, hook)
        yield module
    finally:
      sys.path[:] = path
      for name in {*sys.modules} - before:  # another call may import other files by the same names
        file = str(getattr(sys.modules[name], "__file__", None) or "")
        if name == module.__name__ or (file.startswith(folder) and not file.startswith(LIBRARIES)):
          del sys.modules[name]

  def is_inside(self, error: BaseException) -> bool:
    """Whether an error came from these files, below the function that caught it."""
    return self._last(error) is not None

  def on_stack(self, error: BaseException) -> str:
    """The last line of these files on the stack of an error of jax: in a backward pass, of its cause."""
    for one, what in ((error, ""), (error.__cause__, ", in its backward pass")):
      if found := self._last(one):
        source, line = found
        return f"{source.path.name}, line {line}{what}: {source.text.splitlines()[line - 1].strip()}"
    return self.sources[0].path.name

  def _last(self, error: BaseException | None) -> tuple[Source, int] | None:
    by_name = {str(source.path): source for source in self.sources}
    stack = reversed(traceback.extract_tb(error.__traceback__ if error else None))
    return next(((by_name[x.filename], x.lineno or 1) for x in stack if x.filename in by_name), None)


@contextlib.contextmanager
def _imported(sources: Mapping[Path, Source], hook: Hook | None) -> Generator[None]:
  """Lets imports run these files anew, with the hook; afterwards the modules are those of before."""

  def is_own(module: types.ModuleType) -> bool:
    file: Any = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).resolve() in sources

  before = {name: module for name, module in sys.modules.items() if sources and is_own(module)}
  for name in before:
    package, _, child = name.rpartition(".")
    del sys.modules[name]
    if package in sys.modules:
      vars(sys.modules[package]).pop(child, None)
  importer = _Importer(sources, hook)
  sys.meta_path.insert(0, importer)
  try:
    yield
  finally:
    sys.meta_path.remove(importer)
    for name in importer.names:
      sys.modules.pop(name, None)
    for name, module in before.items():
      sys.modules[name] = module
      package, _, child = name.rpartition(".")
      if package in sys.modules:
        setattr(sys.modules[package], child, module)


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds and runs some files."""

  def __init__(self, sources: Mapping[Path, Source], hook: Hook | None):
    self._sources, self._hook = sources, hook
    self.names = list[str]()

  def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
    spec = PathFinder.find_spec(fullname, path)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() not in self._sources:
      return None
    self.names.append(fullname)
    spec.loader = self
    return spec

  def exec_module(self, module: types.ModuleType) -> None:
    self._sources[Path(str(module.__file__)).resolve()].run(module, self._hook)


def _read(path: Path) -> str:
  try:
    text = path.read_bytes().decode()
    ast.parse(text, str(path))
  except (OSError, SyntaxError, UnicodeDecodeError) as error:
    raise RecipeError(f"{path} cannot be read.", details=str(error), fix="a Python file in UTF-8.") from error
  if found := _BREAKS.search(text):
    raise RecipeError(
      f"{path} has the character {found.group()!r}, and a patch of it would not apply.",
      fix="save it with lines that end with \\n only.",
    )
  return text


def _numbered(tree: ast.AST, first: int) -> Iterator[tuple[int, ast.expr]]:
  return ((n, node) for n, node in enumerate(ast.walk(tree), first) if _is_site(node))


def _is_site(node: ast.AST) -> TypeGuard[ast.expr]:
  if isinstance(node, ast.Call):
    return not (isinstance(node.func, ast.Name) and node.func.id in _OF_THE_FRAME)
  if isinstance(node, ast.Subscript):
    return isinstance(node.ctx, ast.Load)
  return isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS


def _until_star(nodes: Sequence[ast.expr]) -> Iterator[ast.expr]:
  return itertools.takewhile(lambda node: not isinstance(node, ast.Starred), nodes)


class _Hooked(ast.NodeTransformer):
  """Replaces the sites inside functions by calls of the hook."""

  def __init__(self, numbers: Mapping[ast.expr, int]):
    self._numbers, self._inside = numbers, False

  def _function(self, node: Any) -> Any:
    before, self._inside = self._inside, True
    body = node.body
    node.body = [self.visit(x) for x in body] if isinstance(body, list) else self.visit(body)
    self._inside = before
    return node

  visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

  def generic_visit(self, node: ast.AST) -> ast.AST:
    number = self._numbers.get(node) if isinstance(node, ast.expr) else None
    node = super().generic_visit(node)
    if number is None or not self._inside:
      return node
    keywords: list[ast.keyword] = []
    if isinstance(node, ast.Call):
      inputs, keywords = [node.func, *node.args], node.keywords
    elif isinstance(node, ast.BinOp):
      inputs = [_operator(_OPERATORS[type(node.op)]), node.left, node.right]
    elif isinstance(node, ast.Subscript):
      inputs = [_operator("getitem"), node.value, _index(node.slice)]
    else:
      return node
    found = ast.Call(ast.Name(_HOOK, ast.Load()), [ast.Constant(number), *inputs], keywords)
    return ast.copy_location(found, node)

  def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
    node.value = node.value and self.visit(node.value)
    return node

  def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
    return node

  def visit_arguments(self, node: ast.arguments) -> ast.AST:
    return node


def _operator(name: str) -> ast.expr:
  return ast.Attribute(ast.Name(_OPERATOR, ast.Load()), name, ast.Load())


def _index(node: ast.expr) -> ast.expr:
  """An index as an expression: `a:b` stands only between brackets."""
  if isinstance(node, ast.Tuple):
    return ast.Tuple([_index(x) for x in node.elts], ast.Load())
  if isinstance(node, ast.Slice):
    parts = [x or ast.Constant(None) for x in (node.lower, node.upper, node.step)]
    return ast.Call(ast.Name(_SLICE, ast.Load()), parts, [])
  return node


class _Edits:
  """Changes of a text at positions of its nodes, which count bytes."""

  def __init__(self, text: str):
    self._bytes = text.encode()
    lines = self._bytes.splitlines(keepends=True)
    self._starts = [0]
    for line in lines:
      self._starts.append(self._starts[-1] + len(line))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    self._comments: dict[int, int] = {}
    for token in comments:
      start = self._starts[token.start[0] - 1] + len(token.line[: token.start[1]].encode())
      self._comments[start + len(token.string.encode())] = start
    self._edits: list[tuple[int, int, tuple[int, int], str]] = []

  def start(self, node: ast.expr) -> int:
    return self._starts[node.lineno - 1] + node.col_offset

  def end(self, node: ast.expr) -> int:
    return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

  def find(self, at: int, what: bytes) -> int:
    return self._bytes.index(what, at)

  def replace(self, start: int, end: int, text: str) -> None:
    self._edits.append((start, end, (2, 0), text))

  def insert(self, at: int, text: str) -> None:
    self.replace(at, at, text)

  def around(self, node: ast.expr, before: str, after: str) -> None:
    """Puts texts around a node: the text of a node around another one is outside."""
    start, end = self.start(node), self.end(node)
    self._edits.append((start, start, (1, start - end), before))
    self._edits.append((end, end, (0, end - start), after))

  def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
    """Replaces an operator, with the spaces around it, between its operands."""
    start, end = self.end(left), self.start(right)
    found = self.find(start, old.strip().encode())
    while self._bytes[found - 1 : found].isspace() and found > start:
      found -= 1
    stop = self.find(start, old.strip().encode()) + len(old.strip())
    while self._bytes[stop : stop + 1] == b" " and stop < end:
      stop += 1
    self.replace(found, stop, new)

  def add_keywords(self, call: ast.Call, text: str) -> None:
    """Adds arguments to a call: on a line of their own if the call ends with such a line."""
    close = self.end(call) - 1
    last = close
    while last in self._comments or self._bytes[last - 1 : last].isspace():
      last = self._comments.get(last, last - 1)
    given = bool(call.args or call.keywords)
    comma = self._bytes[last - 1 : last] == b","
    gap = self._bytes[last:close]
    if given and b"\n" in gap:
      first = [*call.args, *call.keywords][0]
      indent = self._bytes[self._starts[first.lineno - 1] :].split(b"\n")[0]
      space = indent[: len(indent) - len(indent.lstrip())].decode()
      self.insert(last, f"{'' if comma else ','}\n{space}{text},")
    else:
      self.insert(last, f"{'' if not given else ' ' if comma else ', '}{text}")

  def text(self) -> str:
    result = self._bytes
    for start, end, _, text in sorted(self._edits, key=lambda edit: (edit[0], edit[2]), reverse=True):
      result = result[:start] + text.encode() + result[end:]
    return result.decode()


def _with_imports(text: str, imports: Sequence[str]) -> str:
  """The text with these lines after its imports, or after its docstring."""
  if not imports:
    return text
  body = ast.parse(text).body
  found = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
  first = (
    body[0] if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else None
  )
  # Next to other imports of jax, if there are any.
  own = [node for node in found if ast.unparse(node).split()[1].split(".")[0] == "jax"]
  last = own[-1] if own else found[-1] if found else first
  at = 0 if last is None else last.end_lineno or 0
  lines = text.splitlines(keepends=True)
  return "".join([*lines[:at], *(f"{line}\n" for line in imports), *lines[at:]])
