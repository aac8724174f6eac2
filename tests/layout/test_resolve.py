"""Names -> spec: candidates, conflicts, uneven dims, and what is recorded."""

import pytest
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel import LogicalRules
from nnx_parallel.errors import ShardingError
from nnx_parallel.layout.resolve import extend_spec

MESH = {"data": 2, "fsdp": 4, "tensor": 2}
first = LogicalRules.first


def resolve(names, shape, /, uneven="error", mesh=None, **rules):
  rules = LogicalRules(rules) if "unknown" not in rules else LogicalRules(**rules)
  return nxp.resolve_spec(names, shape, mesh or MESH, rules, path="mlp.up.kernel", uneven=uneven)


FSDP_OR_TENSOR = {"vocab": first("fsdp", "tensor")}
PAIR = {"heads": first("tensor", None), "kv": first("fsdp", "data")}
TENSOR_FIRST = "'vocab' -> 'tensor'; not 'fsdp': 4 does not divide 30"
FOUND = {
  "axes need no rule": (("fsdp", None, ("data", "tensor")), (8, 3, 4), {},
    P("fsdp", None, ("data", "tensor")), None),
  "a rule before an axis": (("data",), (8,), {"data": "fsdp"}, P("fsdp"), ("'data' -> 'fsdp'",)),
  "several axes": (("batch", "embed"), (16, 6), {"batch": ("data", "fsdp"), "embed": None},
    P(("data", "fsdp"), None), ("'batch' -> ('data', 'fsdp')", "'embed' -> None")),
  "an axis that is taken": (
    ("heads", "mlp"), (8, 8), {"heads": "tensor", "mlp": first("tensor", "fsdp", None)}, P("tensor", "fsdp"),
    ("'heads' -> 'tensor'",
     "'mlp' -> 'fsdp'; not 'tensor': axis 'tensor' is already used by dim 0 ('heads' -> 'tensor')"),
  ),
  "an axis that the mesh lacks": (("mlp",), (8,), {"mlp": first("tensr", None)}, P(None),
    ("'mlp' -> None; not 'tensr': axis 'tensr' is not in the mesh (did you mean 'tensor'?)",)),
  "an axis that does not divide": (("vocab",), (6,), FSDP_OR_TENSOR, P("tensor"),
    ("'vocab' -> 'tensor'; not 'fsdp': 4 does not divide 6",)),
  "two names in one dim": ((("heads", "kv"),), (8,), PAIR, P(("tensor", "fsdp")), None),
  "the last name moves on first": (("fsdp", ("heads", "kv")), (4, 8), PAIR, P("fsdp", ("tensor", "data")),
    None),
  "then the first": (("tensor", ("heads", "kv")), (4, 8), PAIR, P("tensor", "fsdp"), None),
  "unknown names, as in Linen": (("embed", "mlp"), (4, 4), {"unknown": "replicate", "mlp": "tensor"},
    P(None, "tensor"), ("'embed' has no rule: replicated", "'embed' -> None", "'mlp' -> 'tensor'")),
  "one name twice": (("embed", "embed"), (8, 8), {"embed": first("fsdp", None)}, P("fsdp", None), None),
  "a scalar": ((), (), {}, P(), ()),
  "an empty dim": (("fsdp", None), (0, 3), {}, P("fsdp", None), ()),
  "an empty tuple": (((), "fsdp"), (3, 8), {}, P(None, "fsdp"), ()),
}  # fmt: skip


@pytest.mark.parametrize(("names", "shape", "rules", "spec", "steps"), FOUND.values(), ids=FOUND)
def test_names_become_a_spec_and_the_steps_are_written_down(names, shape, rules, spec, steps):
  found = resolve(names, shape, **rules)
  assert (found.spec, found.padding) == (spec, (0,) * len(shape))
  assert steps is None or found.steps == steps


REFUSED = {
  "an unknown name": (
    ("embd", "mlp"), (8, 8), {"embed": "fsdp", "mlp": "tensor"},
    "cannot shard mlp.up.kernel: dim 0 is named 'embd', which is neither a rule nor a mesh axis.\n"
    "  rules embed, mlp; mesh {'data': 2, 'fsdp': 4, 'tensor': 2}\n"
    "  Fix: did you mean 'embed'? Add a rule, nxp.LogicalRules(embd='data'), or embd=None not to split it.",
  ),
  "two dims on one axis": (
    ("embed", "mlp"), (8, 8), {"embed": "tensor", "mlp": "tensor"},
    "cannot shard mlp.up.kernel: no candidate for dim 1 ('mlp') fits: 'tensor': axis 'tensor' is already used"
    " by dim 0 ('embed' -> 'tensor').\n"
    "  shape (8, 8), names ('embed', 'mlp'), rule 'mlp' -> 'tensor',"
    " mesh {'data': 2, 'fsdp': 4, 'tensor': 2}\n"
    "  Fix: give 'mlp' another candidate, or do not split it: mlp=nxp.LogicalRules.first('tensor', None).",
  ),
  "two names in one dim on one axis": ((("a", "b"),), (8,), {"a": "fsdp", "b": "fsdp"},
    "dim 0 ('a+b') fits: ('fsdp', 'fsdp'): ('fsdp', 'fsdp') names an axis twice"),
  "axes that the mesh lacks": (
    ("mlp",), (8,), {"mlp": first("model", "experts")},
    "add the axis to the mesh (size 1 is fine), or do not split the dim:"
    " mlp=nxp.LogicalRules.first('model', 'experts', None).",
  ),
  "another rank": (("embed", "mlp"), (8, 8, 8), {"embed": None, "mlp": None},
    "2 names for an array of 3 dims"),
  "no policy": (
    ("embed",), (8,), {"uneven": "padd", "embed": "fsdp"},
    "resolve_spec got uneven='padd' (a str).\n  uneven: 'error' or 'next' or 'pad' or 'replicate'\n"
    "  Fix: uneven: what to do with a dim that",
  ),
  "an uneven dim": (
    ("embed", "mlp"), (8, 30), {"embed": None, "mlp": "fsdp"},
    "cannot shard mlp.up.kernel: dim 1 ('mlp') has length 30, which 4 shards cannot split evenly.\n"
    "  shape (8, 30), names ('embed', 'mlp'), rule 'mlp' -> ('fsdp',),"
    " mesh {'data': 2, 'fsdp': 4, 'tensor': 2}\n"
    '  Fix: pad it (uneven="pad", to 32), or replicate it with nxp.RuleSet.of(rules).replace(mlp=None).',
  ),
  "an uneven dim of a path rule": (("fsdp",), (30,), {"fsdp": "fsdp"},
    "or replicate it with None in its rule."),
  "a padded dim counts as used": (("a", "b"), (30, 8), {"uneven": "pad", "a": "fsdp", "b": "fsdp"},
    "already used by dim 0"),
}  # fmt: skip


@pytest.mark.parametrize(("names", "shape", "rules", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_resolved_says_what_and_the_rule_that_works(names, shape, rules, text):
  with pytest.raises(ShardingError) as caught:
    resolve(names, shape, **rules)
  assert text in str(caught.value)


@pytest.mark.parametrize(
  ("policy", "size", "candidates", "spec", "padding", "step"),
  [
    ("next", 30, first("fsdp", "tensor"), P("tensor"), 0, TENSOR_FIRST),
    ("pad", 30, first("fsdp", "tensor"), P("tensor"), 0, TENSOR_FIRST),
    ("error", 30, first("fsdp", "tensor"), P("tensor"), 0, TENSOR_FIRST),
    ("replicate", 30, first("fsdp", "tensor"), P(None), 0,
     "'vocab' -> replicated: 4 does not divide 30 (uneven='replicate')"),
    ("next", 31, first("fsdp", "tensor"), P(None), 0,
     "'vocab' -> replicated: 2 does not divide 31, and no candidate is left (uneven='next')"),
    ("pad", 31, first("fsdp", "tensor"), P("fsdp"), 1, "'vocab' -> 'fsdp': 31 is padded to 32"),
    ("pad", 31, first("fsdp", None), P(None), 0, "'vocab' -> None; not 'fsdp': 4 does not divide 31"),
  ],
)  # fmt: skip
def test_policies_for_a_dim_that_does_not_divide(policy, size, candidates, spec, padding, step):
  found = resolve(("vocab",), (size,), uneven=policy, vocab=candidates)
  assert (found.spec, found.padding, found.steps) == (spec, (padding,), (step,))


BOTH = {"axis": ("data", "fsdp")}
FREE, ROWS = "the largest free dim that 4 divides", "the rows of a look-up table"
EXTENDED = [
  (P(None, None), (16, 32), {}, P(None, "fsdp"), f"'fsdp' on dim 1 (32), {FREE}"),
  (P(None, None), (32, 16), {}, P("fsdp", None), f"'fsdp' on dim 0 (32), {FREE}"),
  (P(None, None), (16, 16), {}, P(None, "fsdp"), f"'fsdp' on dim 1 (16), {FREE}"),
  (P(None, "tensor"), (16, 32), {}, P("fsdp", "tensor"), f"'fsdp' on dim 0 (16), {FREE}"),
  (P(None, None), (30, 8), {}, P(None, "fsdp"), f"'fsdp' on dim 1 (8), {FREE}"),
  (P(None, None), (30, 6), {}, P(None, None), "no dim of (30, 6) divides by 4 ('fsdp')"),
  (P("fsdp", None), (16, 32), {}, P("fsdp", None), "axis 'fsdp' is already used"),
  (P(None, "fsdp"), (16, 32), BOTH, P("data", "fsdp"),
   "'data' on dim 0 (16), the largest free dim that 2 divides"),
  (P(None, "tensor"), (30, 32), {}, P(None, ("tensor", "fsdp")),
   "'fsdp' behind 'tensor' on dim 1 (32), the largest dim that 4 divides"),
  (P(None, None), (9, 12), BOTH, P(None, "fsdp"),
   f"'fsdp' on dim 1 (12), {FREE}; no dim of (9, 12) divides by all 8"),
  (P(None, None), (6, 20), BOTH, P("data", "fsdp"),
   f"'fsdp' on dim 1 (20), {FREE}; 'data' on dim 0 (6), the largest free dim that 2 divides;"
   " no dim of (6, 20) divides by all 8"),
  (P(("data", "fsdp"), None), (16, 32), {}, P(("data", "fsdp"), None), "axis 'fsdp' is already used"),
  (P(None), (16,), {"min_size": 16}, P(None), "16 elements, at most min_size=16"),
  (P(), (), {}, P(), "1 elements, at most min_size=1"),
  (P(None, None), (16, 32), BOTH, P(None, ("data", "fsdp")),
   "('data', 'fsdp') on dim 1 (32), the largest free dim that 8 divides"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "shape", "options", "expected", "why"), EXTENDED)
def test_extending_a_spec(spec, shape, options, expected, why):
  fallback = nxp.fsdp(**{"min_size": 1, **options})
  found, said = extend_spec(spec, shape, MESH, fallback)
  assert (found.spec, found.padding, said) == (expected, (0,) * len(shape), why)
