"""What rules mean: candidates, what can never fire, merging, printing."""

import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel import LogicalRules, PathRules, RuleSet
from nnx_parallel.errors import ShardingError
from nnx_parallel.rules.logical import check_axes

first = LogicalRules.first


@pytest.mark.parametrize(("value", "candidates"), [
  ("fsdp", (("fsdp",),)), (None, ((),)), ((), ((),)), (first(), ((),)),
  (("data", "fsdp"), (("data", "fsdp"),)), (first("tensor", None), (("tensor",), ())),
  (first(("data", "fsdp"), "data"), (("data", "fsdp"), ("data",))), ((("tensor",), ()), (("tensor",), ())),
])  # fmt: skip
def test_ways_to_write_a_rule(value, candidates):
  assert LogicalRules(name=value)["name"] == candidates


def test_rules_read_back_as_written():
  text = "LogicalRules(batch=('data', 'fsdp'), mlp=LogicalRules.first('tensor', None), uneven={'mlp': 'pad'})"
  rules = LogicalRules(batch=("data", "fsdp"), mlp=first("tensor", None), uneven={"mlp": "pad"})
  assert repr(rules) == text
  assert eval(text) == rules


def test_equal_rules_hash_alike_whatever_their_order():
  one, other = LogicalRules(a="x", b="y"), LogicalRules(b="y", a="x")
  assert one == other
  assert hash(one) == hash(other)
  assert one != LogicalRules(a="x", b="y", unknown="replicate")
  assert one != LogicalRules(a="x", b="y", uneven={"a": "pad"})
  assert dict(one) == {"a": (("x",),), "b": (("y",),)}


KERNEL = "path rule 'kernel' has the value"
REFUSED = [
  (lambda: LogicalRules(name=first(None, "tensor")), "candidate 'tensor' can never be reached after None."),
  (lambda: LogicalRules(name=first(None, "tensor")), "None, which always fits, last"),
  (lambda: LogicalRules(name=first("tensor", "tensor")),
    "candidate 'tensor' can never be reached after 'tensor'"),
  (lambda: LogicalRules(name=first("data", ("data", "fsdp"))), "can never be reached after 'data'"),
  (lambda: LogicalRules(name=first(("data", "fsdp"), ("fsdp", "data"))),
    "('fsdp', 'data') can never be reached"),
  (lambda: LogicalRules(name=("data", "data")), "('data', 'data') is not a tuple of distinct mesh axes"),
  (lambda: LogicalRules(name=("data", 3)),
    "or several candidates: name=nxp.LogicalRules.first('tensor', None)"),
  (lambda: LogicalRules(mlp=("tensor", None)), "rule for 'mlp': ('tensor', None) is not a tuple of distinct"),
  (lambda: LogicalRules(batch=["data", "fsdp"]),
    "together.\n  Fix: batch=('data', 'fsdp') for all of them, batch=nxp.LogicalRules.first('data', 'fsdp')"),
  (lambda: LogicalRules(batch="data").replace(embed=["fsdp"]), "embed=('fsdp',) for all of them"),
  (lambda: RuleSet.of({"mlp": [("data", "fsdp"), None]}),
    "rule for 'mlp': [('data', 'fsdp'), None] is a list"),
  (lambda: LogicalRules({"col-x": []}), "{'col-x': ()} for all of them, {'col-x': nxp.LogicalRules.first()}"),
  (lambda: LogicalRules(mlp=4), "rule for 'mlp': (4,) is not"),
  (lambda: LogicalRules({"mlp": "tensor"}, mlp="fsdp"), "logical name 'mlp' has two rules.\n  Fix: keep one"),
  (lambda: LogicalRules(vocab="tensor", uneven={"vocab": "stretch"}), "does not fit these rules"),
  (lambda: LogicalRules(vocab="tensor", uneven={"words": "pad"}), "policies error, next, pad, replicate"),
  (lambda: LogicalRules(mlp="tensor", unknown="ignore"), 'use "error" or "replicate"'),
  (lambda: RuleSet.of("fsdp"),
    "'fsdp' is not a sharding rule.\n  Fix: pass nxp.LogicalRules(embed=\"fsdp\")"),
  (lambda: RuleSet.of([("embed", "fsdp")]), "through nxp.LogicalRules.from_linen(pairs)"),
  (lambda: RuleSet.of([nxp.fsdp(), nxp.replicate()]), "two fallbacks: fsdp('fsdp', "),
  (lambda: RuleSet.of([{"mlp": "tensor"}, {"mlp": "fsdp"}]), "has two rules.\n  'tensor' and 'fsdp'"),
  (lambda: nxp.fsdp(()), 'fsdp() needs a mesh axis.\n  Fix: nxp.fsdp("fsdp")'),
  (lambda: nxp.fsdp(("data", "data")), "fsdp(('data', 'data')) names an axis twice"),
  (lambda: PathRules([("(", None)]), "path rule '(' is not a regular expression: "),
  (lambda: PathRules([(("ok", "["), None)]), "path rule ('ok', '[') is not a regular expression"),
  (lambda: PathRules([("kernel", "tensor")]), f"{KERNEL} 'tensor', which is not one name for each dim"),
  (lambda: PathRules([("kernel", "tensor")]), "Fix: ('tensor', None), or None"),
  (lambda: PathRules([("kernel", 3)]), f"{KERNEL} 3"),
  (lambda: PathRules([("kernel", ("a", 3))]), f"{KERNEL} ('a', 3)"),
  (lambda: PathRules([("kernel", ("...", ..., ...))]), ", with two ...."),
  (lambda: PathRules([("kernel", None), ("kernel", ("a",))]), "'kernel' is given twice"),
  (lambda: PathRules([((), None)]), "path rule () has no pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_what_makes_no_sense_is_refused(make, text):
  with pytest.raises(ShardingError) as caught:
    make()
  assert text in str(caught.value)


def test_axes_are_checked_against_a_mesh():
  rules = LogicalRules(batch=first("data", None), heads=first("tensr", None), mlp=first("tensor", "model"))
  (note,) = check_axes(rules, {"data": 2, "tensor": 4})
  assert note == "rule 'heads': axis 'tensr' is not in the mesh (did you mean 'tensor'?)"
  text = r"can never apply: .*\n.*'fdsp': 1\}\n  Fix: did you mean 'fdsp'\?.*\(\('data', 'fsdp'\), None\)"
  with pytest.raises(ShardingError, match=text):
    check_axes(LogicalRules(batch=("data", "fsdp")), {"data": 8, "fdsp": 1})


def test_linen_pairs():
  pairs = [
    ("batch", "data"), ("batch", ("data", "fsdp")), ("embed", "fsdp"), ("embed", "data"), ("mlp", None),
  ]  # fmt: skip
  rules = LogicalRules.from_linen(pairs)
  assert dict(rules) == {"batch": (("data",), ()), "embed": (("fsdp",), ("data",), ()), "mlp": ((),)}
  assert rules.unknown == "replicate"


def test_a_tuple_with_one_absent_axis_is_not_dropped_without_a_word():
  mesh = {"data": 4, "fsdp": 2}
  pairs = LogicalRules.from_linen([("batch", ("data", "fsdp", "context")), ("mlp", "tensor")])
  text = r"splits nothing: axis 'context' of .*\n  mesh .*\n  Fix: leave it out, batch=\('data', 'fsdp'\)"
  with pytest.raises(ShardingError, match=text):
    check_axes(pairs, mesh)
  assert not check_axes(pairs, {**mesh, "context": 1})
  (note,) = check_axes(LogicalRules(batch=first(("data", "pod"), None)), mesh)
  assert note.startswith("the rule for 'batch' splits nothing: axis 'pod'")
  assert not check_axes(LogicalRules(batch=first(("data", "pod"), "data")), mesh)


def test_a_rule_set_is_read_from_anything_sensible():
  logical, paths, fallback = LogicalRules(mlp="tensor"), PathRules([("kernel", None)]), nxp.fsdp()
  wanted = RuleSet(logical, (paths,), fallback)
  assert RuleSet.of([logical, paths, fallback]) == wanted
  assert RuleSet.of((fallback, [paths, {"mlp": "tensor"}])) == wanted
  assert RuleSet.of(wanted) is wanted
  assert RuleSet.of([wanted, {"embed": None}]).logical == LogicalRules(mlp="tensor", embed=None)
  assert RuleSet.of(None) == RuleSet()


def test_path_rules_by_whole_path_and_by_window():
  attention, mlp = (r"attn", "(q|k|v)", "kernel"), ("blocks", r"\d+", "mlp", "up")
  rules = PathRules([(attention, (None, "tensor")), (r".*\.(scale|bias)", None), (mlp, ("embed", "mlp"))])

  def names(*path):
    found = rules.match(path)
    return found and found.names

  assert names("blocks", 0, "attn", "q", "kernel") == (None, "tensor")
  assert names("attn", "k", "kernel", "inner") == (None, "tensor")
  assert rules.match(("attn", "qk", "kernel")) is None
  assert rules.match(("attn", "extra", "q", "kernel")) is None
  assert rules.match(("scale",)) is None
  assert rules.match(("norm", "scale")).pattern == r".*\.(scale|bias)"
  assert names("blocks", 11, "mlp", "up", "kernel") == ("embed", "mlp")
  assert rules.match(()) is None


def test_an_ellipsis_stands_for_whole_dims():
  rule = PathRules([("kernel", ("heads", ..., "embed"))]).match(("kernel",))
  assert rule.names_for(2, where="kernel") == ("heads", "embed")
  assert rule.names_for(4, where="kernel") == ("heads", None, None, "embed")
  with pytest.raises(ShardingError, match=r"gives 2 names to out\.kernel, .* 1 dims(.|\n)*Fix: write one"):
    rule.names_for(1, where="out.kernel")


def test_replace_changes_policies_and_the_fallback_and_takes_any_name():
  rules = LogicalRules(embed="fsdp", mlp="tensor", uneven={"embed": "pad"})
  changed = rules.replace({"self": None}, unknown="replicate", uneven={"mlp": "next"})
  assert (changed.unknown, changed.uneven) == ("replicate", {"embed": "pad", "mlp": "next"})
  assert list(changed) == ["embed", "mlp", "self"]
  preset = nxp.presets.fsdp_tensor().replace(fallback=nxp.replicate(), unknown="replicate", embed="fsdp")
  assert (preset.fallback, preset.logical.unknown) == (nxp.replicate(), "replicate")
  assert preset.replace(embed=None).fallback == nxp.replicate()


def test_a_fix_is_python_whatever_the_name():
  with pytest.raises(ShardingError, match=r"LogicalRules\(\{'col-alias': 'layers'\}\), or \{'col-al"):
    nxp.resolve_spec(("col-alias",), (8,), {"layers": 2}, LogicalRules())
  with pytest.raises(ShardingError, match=r"nxp\.RuleSet\.of\(rules\)\.replace\(\{'a b': None\}\)"):
    nxp.resolve_spec(("a b",), (3,), {"x": 2}, LogicalRules({"a b": "x"}))
  with pytest.raises(ShardingError, match=r"do not split it: \{'a b': nxp.LogicalRules.first\('x', None\)\}"):
    nxp.resolve_spec((("x"), "a b"), (4, 4), {"x": 2}, LogicalRules({"a b": "x"}))
  with pytest.raises(ShardingError, match=r"Fix: nxp.PathRules\(\[\('\.\*kernel', None\)\]\)"):
    PathRules([("*kernel", None)])


def test_none_and_an_empty_spec_keep_a_parameter_whole_whatever_the_fallback():
  init, mesh = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nxp.abstract_mesh(fsdp=8)
  for value, spec in ((None, P(None, None)), (P(), P(None, None)), ((None, None), P(None, "fsdp"))):
    assert nxp.plan(init, mesh, [PathRules({"kernel": value}), nxp.fsdp(min_size=0)])["kernel"].spec == spec


def test_the_fix_for_names_that_are_none_is_a_value_that_works():
  with pytest.raises(ShardingError, match=r"value \(UNCONSTRAINED, None, \.\.\.\)") as caught:
    PathRules([("kernel", P(P.UNCONSTRAINED, None))])
  assert "Fix: (None, None, ...), or None to replicate" in str(caught.value)
  assert PathRules([("kernel", (None, None, ...))])
