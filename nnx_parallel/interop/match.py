"""A weight map guessed from shapes and names, for your own model that no table knows.

Arrays that differ only in numbers between dots form a family: `h.0.fc.weight`, `h.1.fc.weight`. A family of
the file and a family of the model form a pair if they have the same numbers and a pattern turns one shape
into the other. If a family fits several families, the names decide, then the order; the report marks such
guesses. Whether kernels are transposed is decided for the full file: the way that finds more pairs wins.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

import einops
import jax
import numpy as np

from nnx_parallel.checkpoint import encoding
from nnx_parallel.core.text import format_array, text_table
from nnx_parallel.interop.safetensors import read_tensors
from nnx_parallel.interop.weights import Rule, Shape, WeightMap, initialised, model_leaves
from nnx_parallel.layout.plan import Plan

How = Literal["by order: check", "by name", "by elimination", "unique shape"]
Arrays = dict[str, tuple[Shape, str]]  # shape and dtype, by name
SLOTS = "ijkl"
# From torch arrays to flax arrays: Linear, attention's products and biases, convolutions.
TURNED = "o i -> i o"
PATTERNS = (
  "(h d) e -> e h d",
  "e (h d) -> h d e",
  "(h d) -> h d",
  "o i w -> w i o",
  "o i h w -> h w i o",
)


@dataclasses.dataclass(frozen=True)
class Family:
  """Arrays of one shape and dtype whose names differ only in numbers.

  Attributes:
    name: the name, with `{i}`, `{j}` for the numbers.
    numbers: the numbers of each array.
    shape: the shape of each array.
    dtype: the dtype of each array.
    place: the place among the families.
  """

  name: str
  numbers: frozenset[tuple[int, ...]]
  shape: Shape
  dtype: str
  place: int


@dataclasses.dataclass(frozen=True)
class Pair:
  """A family of the file, and the family of the model that it makes.

  Attributes:
    file: the family of the file.
    model: the family of the model.
    rule: the rule that makes one from the other.
    how: how it was found.
  """

  file: Family
  model: Family
  rule: Rule
  how: How = "unique shape"


@dataclasses.dataclass(frozen=True)
class Matched:
  """A guessed weight map; prints the guesses and their reasons.

  Attributes:
    pairs: the matched families.
    unused: families of the file without a leaf.
    missing: families of the model without an array.
  """

  pairs: Sequence[Pair]
  unused: Sequence[Family]
  missing: Sequence[Family]

  @property
  def complete(self) -> bool:
    """Whether each array and each leaf has its place."""
    return not self.unused and not self.missing

  @property
  def weight_map(self) -> WeightMap:
    """For an import or export, once the report was read; arrays without a leaf are an error there."""
    return WeightMap(*(pair.rule for pair in self.pairs))

  def as_code(self) -> str:
    """A Python file with the weight map, to be corrected; `load_weight_map` and the commands read it.

    Arrays without a leaf are listed as ignored.
    """
    lines = ["from nnx_parallel.interop.weights import Rule, WeightMap", "", "WEIGHT_MAP = WeightMap("]
    for pair in self.pairs:
      rule = pair.rule
      words = [repr(rule.file), repr(rule.model[0])]
      words += [repr(rule.transform.pattern)] if rule.transform.pattern else []
      words += [f"dtype={encoding.dtype_name(rule.dtype)!r}"] if rule.dtype else []
      words += [f"{name}={size}" for name, size in rule.transform.sizes]
      lines.append(f"  Rule({', '.join(words)}),  # {pair.how}")
    lines += [f"  # no array for {one.name}" for one in self.missing]
    ignored = [re.sub(r"\{\w\}", "*", one.name) for one in self.unused]
    lines += ["  ignore=[", *(f"    {name!r}," for name in ignored), "  ],", ")"]
    return "\n".join(lines) + "\n"

  def __str__(self) -> str:
    rows = [("missing", "", "", one.name, _array(one), "") for one in self.missing]
    rows += [("unused", one.name, _array(one), "", "", "") for one in self.unused]
    doubts = get_args(How)
    for pair in sorted(self.pairs, key=lambda pair: doubts.index(pair.how)):
      pattern = pair.rule.transform.pattern
      ends = (pair.file.name, _array(pair.file), pair.model.name, _array(pair.model))
      rows.append((pair.how, *ends, pattern))
    return text_table(("found", "file", "array", "model", "leaf", "pattern"), rows)


def match_by_shape(path: str | os.PathLike[str], plan: Plan, *, skip: Iterable[str] = ()) -> Matched:
  """Guesses which arrays of safetensors files belong to which leaves of a model.

  Args:
    path: a safetensors file, or a folder of them; only the headers are read.
    plan: the plan of the model.
    skip: patterns of the paths of leaves that the files do not have.

  Returns:
    The guess. Read it, and compare the model's outputs with known outputs: arrays of the same shape may be
    swapped, and a square array may be transposed.

  Raises:
    CheckpointError: the files cannot be read, or a `skip` pattern matches nothing.

  Example:
    >>> import pathlib, tempfile
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> folder = pathlib.Path(tempfile.mkdtemp(), "model")
    >>> init = lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> _ = nxp.interop.export_safetensors(folder, init())
    >>> found = match_by_shape(folder, nxp.plan(init, nxp.abstract_mesh(fsdp=8), nxp.fsdp()))
    >>> found.complete, sorted(rule.file for rule in found.weight_map.rules)
    (True, ['bias', 'kernel'])
  """
  leaves = model_leaves(plan)
  left_out = initialised(plan, leaves, skip)
  wanted = {
    name: (leaf.shape, encoding.dtype_name(leaf.struct.dtype))
    for name, leaf in leaves.items()
    if name not in left_out
  }
  there = {name: (one.shape, encoding.dtype_name(one.dtype)) for name, one in read_tensors(path).items()}
  ways = [[*_assign(_families(there), _families(wanted), (way,))] for way in (TURNED, "")]
  pairs = max(ways, key=_found)
  there, wanted = _left(there, wanted, pairs)
  rest = [*_assign(_families(there, numbered=False), _families(wanted, numbered=False), (TURNED, ""))]
  there, wanted = _left(there, wanted, rest)
  return Matched([*pairs, *rest], _families(there), _families(wanted))


def _left(there: Arrays, wanted: Arrays, pairs: Sequence[Pair]) -> tuple[Arrays, Arrays]:
  return _without(there, [pair.file for pair in pairs]), _without(wanted, [pair.model for pair in pairs])


def _found(pairs: Sequence[Pair]) -> tuple[int, float]:
  """The number of leaves that the pairs make, and the similarity of the names."""
  likeness = sum(sum(_likeness(pair.file, pair.model)) for pair in pairs)
  return sum(len(pair.model.numbers) for pair in pairs), likeness


def _families(arrays: Arrays, numbered: bool = True) -> list[Family]:
  kinds: dict[str, set[tuple[Shape, str]]] = {}
  for name, kind in arrays.items():
    kinds.setdefault(_split(name)[0], set()).add(kind)
  found: dict[tuple[str, tuple[Shape, str]], set[tuple[int, ...]]] = {}
  for name, kind in arrays.items():
    pattern, numbers = _split(name)
    key = (pattern, numbers) if numbered and len(kinds[pattern]) == 1 else (name, ())
    found.setdefault((key[0], kind), set()).add(key[1])
  return [
    Family(name, frozenset(numbers), *kind, place)
    for place, ((name, kind), numbers) in enumerate(found.items())
  ]


def _split(name: str) -> tuple[str, tuple[int, ...]]:
  """A name with `{i}` in place of the numbers between its dots, and these."""
  parts, numbers = name.split("."), []
  for at, part in enumerate(parts):
    if part.isdecimal() and len(numbers) < len(SLOTS):
      parts[at] = f"{{{SLOTS[len(numbers)]}}}"
      numbers.append(int(part))
  return ".".join(parts), tuple(numbers)


def _without(arrays: Arrays, families: Iterable[Family]) -> Arrays:
  """The arrays that are in none of these families."""
  taken = {(one.name, numbers) for one in families for numbers in one.numbers}
  return {
    name: kind for name, kind in arrays.items() if (name, ()) not in taken and _split(name) not in taken
  }


def _assign(files: Sequence[Family], leaves: Sequence[Family], ways: Sequence[str]) -> Iterator[Pair]:
  """The pairs; `ways` are the patterns that kernels of two dims may have."""
  options = {
    (file, leaf): Pair(file, leaf, rule)
    for file in files
    for leaf in leaves
    if (rule := _rule(file, leaf, ways))
  }
  alike = {key: _likeness(*key) for key in options}
  alone = {key for key in options if not _rivals(key, options)}
  parents: dict[tuple[str, str], How] = {}
  doubtful: set[Family] = set()

  def rank(key: tuple[Family, Family]) -> tuple[float, ...]:
    return (_parents(key) in parents, *alike[key])

  def turn(key: tuple[Family, Family]) -> tuple[float, ...]:
    """Kernels come first: they tell which layer is which, and so decide on scales, then on biases."""
    file, leaf = key
    return (len(file.shape), not _is_bias(file), *rank(key), -file.place, -leaf.place)

  while options:
    best = max(options, key=turn)
    how: How = "unique shape" if best in alone else "by elimination"
    if rivals := _rivals(best, options):
      how = parents.get(_parents(best), "by name")
      doubtful |= {one for key in rivals if rank(key) >= rank(best) for one in (*key, *best)}
    if not doubtful.isdisjoint(best):
      how = "by order: check"
    yield dataclasses.replace(options.pop(best), how=how)
    parents.setdefault(_parents(best), how)
    for key in rivals:
      del options[key]


def _parents(key: tuple[Family, Family]) -> tuple[str, str]:
  """The layers of two arrays; other arrays of one layer belong to the other layer."""
  file, leaf = (one.name.rpartition(".")[0] for one in key)
  return file, leaf


def _rivals(
  key: tuple[Family, Family], options: Iterable[tuple[Family, Family]]
) -> list[tuple[Family, Family]]:
  return [other for other in options if other != key and (other[0] == key[0] or other[1] == key[1])]


def _rule(file: Family, leaf: Family, ways: Sequence[str]) -> Rule | None:
  """The rule, if the numbers are the same and a pattern fits; one number of the file may be stacked."""
  dtype = None if file.dtype == leaf.dtype else file.dtype
  if file.numbers == leaf.numbers:
    found = _pattern(file.shape, leaf.shape, leaf.name, ways)
    return found and Rule(file.name, leaf.name, found[0], dtype=dtype, **found[1])
  for at in range(file.name.count("{")):
    others = frozenset((*numbers[:at], *numbers[at + 1 :]) for numbers in file.numbers)
    if others != leaf.numbers or leaf.shape[:1] != (len(file.numbers) // len(others),):
      continue
    if found := _pattern(file.shape, leaf.shape[1:], leaf.name, ways):
      name = file.name.replace(f"{{{SLOTS[at]}}}", "{n}")
      for before, after in zip(SLOTS[at + 1 :], SLOTS[at:], strict=False):
        name = name.replace(f"{{{before}}}", f"{{{after}}}")
      stacked = " -> ".join(f"n {side}" for side in found[0].split(" -> ")) if found[0] else ""
      return Rule(name, leaf.name, stacked, dtype=dtype, **found[1])
  return None


def _pattern(
  shape: Shape, wanted: Shape, path: str, ways: Sequence[str]
) -> tuple[str, dict[str, int]] | None:
  """A pattern from one shape to the other, and the sizes that it needs."""
  if math.prod(shape) != math.prod(wanted):
    return None
  is_kernel = len(shape) == len(wanted) == 2 and not path.endswith("embedding")
  for pattern in (*ways, *PATTERNS) if is_kernel else ("", *PATTERNS):
    right = pattern.partition("-> ")[2].split()
    if not pattern:
      if shape == wanted:
        return "", {}
    elif len(right) == len(wanted):
      sizes = {"d": wanted[right.index("d")]} if "d" in right else {}
      if _result(shape, pattern, tuple(sizes.items())) == wanted:
        return pattern, sizes
  return None


@functools.lru_cache(maxsize=4096)
def _result(shape: Shape, pattern: str, sizes: tuple[tuple[str, int], ...]) -> Shape | None:
  array = jax.ShapeDtypeStruct(shape, np.float32)
  try:
    return jax.eval_shape(lambda x: einops.rearrange(x, pattern, **dict(sizes)), array).shape
  except einops.EinopsError:
    return None


def _likeness(file: Family, leaf: Family) -> tuple[bool, float]:
  """Whether both or neither are a bias, and how similar the names are; their ends count most."""
  words = [_words(one.name) for one in (file, leaf)]
  ratios = [_ratio(*("".join(one[-count:]) for one in words)) for count in (1, 2, 99)]
  return _is_bias(file) == _is_bias(leaf), round(sum(ratios), 1)


def _words(name: str) -> list[str]:
  """The parts of a name, without numbers and words that any array may have: `k_norm` as `norm_k`."""
  name = re.sub(r"\.(weight|bias|kernel|scale|embedding)$|_proj\b", "", name.lower())
  return ["_".join(sorted(part.split("_"))) for part in name.split(".") if "{" not in part]


def _is_bias(one: Family) -> bool:
  return one.name.endswith("bias")


def _ratio(one: str, other: str) -> float:
  return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


def _array(one: Family) -> str:
  array = format_array(one.dtype, one.shape)
  return f"{len(one.numbers)} x {array}" if len(one.numbers) > 1 else array
