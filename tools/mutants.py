"""Breaks source files in small ways, one at a time, and says which test fails for each.

`tools/mutants.py core/interpret.py` takes the file's tests, and changes after which it does the same, from
tests/mutants.toml; without names it takes all files there. No file is written: a forked process imports each
changed text. Lines are chosen by their text, so that an edit of one leaves the choice of others.
"""

import ast
import hashlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

COUNT, LIMIT_S, CPU_S = 20, 900, 300  # lines of a file; seconds for one run of its tests
ROOT = Path(__file__).resolve().parent.parent
OTHER = {
  "Eq": "!=", "NotEq": "==", "Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Is": "is not", "IsNot": "is",
  "In": "not in", "NotIn": "in", "Add": "-", "BitOr": "&", "And": "or", "Or": "and",
}  # fmt: skip
TYPES = ("annotation", "returns", "decorator_list")
FATES = ("killed", "equivalent", "SURVIVED")


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
  """What may stand in place of parts of a node: each part, and its new text."""
  match node:
    case ast.Compare(left=left, ops=[op], comparators=[right]) | ast.BinOp(left=left, op=op, right=right):
      yield node, f"({ast.unparse(left)} {OTHER.get(type(op).__name__, '+')} {ast.unparse(right)})"
    case ast.BoolOp(op=op, values=values):
      yield node, "(" + f" {OTHER[type(op).__name__]} ".join(map(ast.unparse, values)) + ")"
    case ast.UnaryOp(op=ast.Not(), operand=part):
      yield node, f"({ast.unparse(part)})"
    case ast.If(test=test) | ast.IfExp(test=test):
      yield test, f"(not ({ast.unparse(test)}))"
    case ast.comprehension(ifs=[test, *_]):
      yield test, "True"
    case ast.Constant(value=bool() | int() | str() as value):
      yield node, f"{not value}" if isinstance(value, bool) else f"({value!r} + {type(value)(1)!r})"
    case ast.Tuple(elts=[*some, _], ctx=ast.Load()) | ast.List(elts=[*some, _], ctx=ast.Load()) if some:
      yield node, ast.unparse(type(node)(some, ast.Load()))
    case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue():
      yield node, "pass"
    case _:
      pass


def mutants(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
  """All changes in a tree, except in texts and types, and some that each call would notice."""
  for name, field in ast.iter_fields(node):
    for child in field if isinstance(field, list) else [field]:
      text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
      told = text or isinstance(child, (ast.Raise, ast.JoinedStr)) or name in TYPES
      if isinstance(child, ast.AST) and not told and getattr(child, "arg", "") != "strict":
        key = name == "slice" and isinstance(child, ast.Constant) and isinstance(child.value, str)
        yield from (
          () if key or (name in ("value", "slice") and isinstance(child, ast.Tuple)) else changes(child)
        )
        yield from mutants(child)


def choose(source: str) -> list[tuple[int, str]]:
  """Numbers of lines, and their new texts: one change in each of `COUNT` lines."""
  lines, found = source.encode().split(b"\n"), dict[int, list[bytes]]()
  for part, new in mutants(ast.parse(source)):
    if isinstance(part, (ast.expr, ast.stmt)) and part.end_lineno == part.lineno:
      old = lines[part.lineno - 1]
      line = old[: part.col_offset] + new.encode() + old[part.end_col_offset :]
      found.setdefault(part.lineno, []).append(line)
  chosen = sorted(found, key=lambda n: hashlib.sha256(lines[n - 1]).digest())[:COUNT]
  return [(n, min(found[n], key=lambda x: hashlib.sha256(x).digest()).decode()) for n in sorted(chosen)]


def killer(path: str, text: str, tests: list[str]) -> str:
  """The test that fails if the file at a path has another text; empty if none does."""
  get_code: Any = SourceFileLoader.get_code
  out, pipe = os.pipe()

  def changed(self: SourceFileLoader, fullname: str) -> Any:
    return compile(text, path, "exec", dont_inherit=True) if self.path == path else get_code(self, fullname)

  def log(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed:
      os.write(pipe, report.nodeid.rpartition("/")[2].encode())

  if not (child := os.fork()):
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    SourceFileLoader.get_code = changed
    first = {"pytest_runtest_logreport": staticmethod(log), "pytest_collectreport": staticmethod(log)}
    os._exit(
      pytest.main(["-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests], [type("First", (), first)])
    )
  os.close(pipe)
  found = os.read(out, 1000).decode() if select.select([out], [], [], LIMIT_S)[0] else "time limit"
  os.killpg(child, signal.SIGKILL)
  os.close(out)
  return found or ("no end, or no import" if os.waitpid(child, 0)[1] else "")


def judge(name: str, tests: list[str], equivalent: Sequence[tuple[str, str]] = ()) -> str:
  """Prints the fate of each change of a file; returns the row of the file for tests/MUTANTS.md."""
  path, fates, same = str(ROOT / "nnx_parallel" / name), list[str](), dict(equivalent)
  source = Path(path).read_text()
  if found := killer(path, source, tests):
    raise SystemExit(f"{name}: {found} fails without a change")
  for number, new in choose(source):
    lines = source.split("\n")
    change = f"{lines[number - 1].strip()} => {new.strip()}"
    lines[number - 1] = new
    found = same.get(change) or killer(path, "\n".join(lines), tests)
    fates.append("equivalent" if change in same else "killed" if found else "SURVIVED")
    print(f"{name}:{number}: {change}\n  {fates[-1]} {found}", flush=True)
  return f"| {name} | {len(fates)} | {' | '.join(str(fates.count(fate)) for fate in FATES)} |"


if __name__ == "__main__":
  os.chdir(ROOT)
  # The environment that tests/conftest.py sets, before jax reads it; then all runs share these imports.
  ask = "import json, os, conftest; print(json.dumps({**os.environ}))"
  where = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
  os.environ.update(json.loads(subprocess.check_output([sys.executable, "-c", ask], env=where)))
  for module in ("jax", "flax.nnx", "optax", "orbax.checkpoint"):
    importlib.import_module(module)
  files = tomllib.loads(Path("tests/mutants.toml").read_text())
  print("\n".join([judge(name, **files[name]) for name in sys.argv[1:] or files]))
