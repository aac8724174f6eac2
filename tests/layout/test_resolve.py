"""Names -> spec: candidates, conflicts, uneven dims, and what is recorded."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel import LogicalRules
from nnx_parallel.errors import ShardingError
from nnx_parallel.layout.resolve import extend_spec, shard_counts

MESH = {"data": 2, "fsdp": 4, "tensor": 2}


def resolve(names, shape, /, uneven="error", mesh=None, **rules):
  rules = LogicalRules(rules) if "unknown" not in rules else LogicalRules(**rules)
  return nxp.resolve_spec(names, shape, mesh or MESH, rules, path="mlp.up.kernel", uneven=uneven)


def test_names_of_mesh_axes_need_no_rule():
  found = resolve(("fsdp", None, ("data", "tensor")), (8, 3, 4))
  assert found.spec == P("fsdp", None, ("data", "tensor"))
  assert found.padding == (0, 0, 0)


def test_a_mesh_is_as_good_as_its_sizes():
  found = nxp.resolve_spec(("mlp",), (8,), nxp.abstract_mesh(tensor=4), LogicalRules(mlp="tensor"))
  assert found.spec == P("tensor")


def test_a_rule_wins_over_an_axis_of_the_same_name():
  assert resolve(("data",), (8,), data="fsdp").spec == P("fsdp")


def test_several_axes_cut_one_dim():
  found = resolve(("batch", "embed"), (16, 6), batch=("data", "fsdp"), embed=None)
  assert found.spec == P(("data", "fsdp"), None)
  assert found.steps == ("'batch' -> ('data', 'fsdp')", "'embed' -> None")


def test_an_axis_that_is_taken_sends_the_name_to_its_next_candidate():
  found = resolve(("heads", "mlp"), (8, 8), heads="tensor", mlp=["tensor", "fsdp", None])
  assert found.spec == P("tensor", "fsdp")
  assert found.steps[1] == (
    "'mlp' -> 'fsdp'; not 'tensor': axis 'tensor' is already used by dim 0 ('heads' -> 'tensor')"
  )


def test_an_axis_that_the_mesh_lacks_sends_the_name_to_its_next_candidate():
  found = resolve(("mlp",), (8,), mlp=["tensr", None])
  assert found.spec == P(None)
  assert found.steps == (
    "'mlp' -> None; not 'tensr': axis 'tensr' is not in the mesh (did you mean 'tensor'?)",
  )


def test_an_uneven_dim_goes_to_its_next_candidate():
  found = resolve(("vocab",), (6,), vocab=["fsdp", "tensor"])
  assert found.spec == P("tensor")
  assert found.steps == ("'vocab' -> 'tensor'; not 'fsdp': 4 does not divide 6",)


def test_two_names_in_one_dim():
  rules = {"heads": ["tensor", None], "kv": ["fsdp", "data"]}
  assert resolve((("heads", "kv"),), (8,), **rules).spec == P(("tensor", "fsdp"))
  # fsdp is taken, so the last name moves on first.
  assert resolve(("fsdp", ("heads", "kv")), (4, 8), **rules).spec == P("fsdp", ("tensor", "data"))
  assert resolve(("tensor", ("heads", "kv")), (4, 8), **rules).spec == P("tensor", "fsdp")


def test_unknown_names_may_be_whole_as_in_linen():
  found = resolve(("embed", "mlp"), (4, 4), unknown="replicate", mlp="tensor")
  assert found.spec == P(None, "tensor")
  assert found.steps[0] == "'embed' has no rule: replicated"


def test_an_unknown_name_is_an_error_with_the_nearest_one():
  with pytest.raises(ShardingError) as caught:
    resolve(("embd", "mlp"), (8, 8), embed="fsdp", mlp="tensor")
  assert str(caught.value) == (
    "cannot shard mlp.up.kernel: dim 0 is named 'embd', which is neither a rule nor a mesh axis.\n"
    "  rules embed, mlp; mesh {'data': 2, 'fsdp': 4, 'tensor': 2}\n"
    "  Fix: did you mean 'embed'? Add a rule, LogicalRules(embd='data'), or embd=None not to split it."
  )


def test_two_dims_on_one_axis_names_both_rules():
  with pytest.raises(ShardingError) as caught:
    resolve(("embed", "mlp"), (8, 8), embed="tensor", mlp="tensor")
  assert str(caught.value) == (
    "cannot shard mlp.up.kernel: no candidate for dim 1 ('mlp') fits: 'tensor': axis 'tensor' is already used"
    " by dim 0 ('embed' -> 'tensor').\n"
    "  shape (8, 8), names ('embed', 'mlp'), rule 'mlp' -> 'tensor',"
    " mesh {'data': 2, 'fsdp': 4, 'tensor': 2}\n"
    "  Fix: give 'mlp' another candidate, or do not split it: mlp=['tensor', None]."
  )


def test_the_same_name_in_two_dims():
  with pytest.raises(
    ShardingError, match=r"dim 1 \('embed'\) fits: 'fsdp': .* by dim 0 \('embed' -> 'fsdp'\)"
  ):
    resolve(("embed", "embed"), (8, 8), embed="fsdp")
  assert resolve(("embed", "embed"), (8, 8), embed=["fsdp", None]).spec == P("fsdp", None)


def test_two_names_in_one_dim_on_one_axis():
  with pytest.raises(
    ShardingError, match=r"dim 0 \('a\+b'\) fits: \('fsdp', 'fsdp'\): .* names an axis twice"
  ):
    resolve((("a", "b"),), (8,), a="fsdp", b="fsdp")


def test_a_rule_without_an_axis_of_this_mesh():
  with pytest.raises(ShardingError) as caught:
    resolve(("mlp",), (8,), mlp=["model", "experts"])
  assert "no candidate for dim 0 ('mlp') fits: 'model': axis 'model' is not in the mesh; 'experts'" in str(
    caught.value
  )
  assert caught.value.fix == (
    "add the axis to the mesh (size 1 is fine), or do not split the dim: mlp=['model', 'experts', None]."
  )


def test_names_must_fit_the_rank():
  with pytest.raises(
    ShardingError, match=r"2 names for an array of 3 dims[\s\S]*None for a dim that is not split"
  ):
    resolve(("embed", "mlp"), (8, 8, 8), embed=None, mlp=None)


def test_a_policy_that_does_not_exist_is_an_error():
  with pytest.raises(nxp.errors.ShardingError, match=r"uneven='padd' is not a policy[\s\S]*error, next, pad"):
    resolve(("embed",), (8,), uneven="padd", embed="fsdp")


def test_an_uneven_dim_is_an_error_with_the_next_size():
  with pytest.raises(ShardingError) as caught:
    resolve(("embed", "mlp"), (8, 30), embed=None, mlp="fsdp")
  assert str(caught.value) == (
    "cannot shard mlp.up.kernel: dim 1 ('mlp') has length 30, which 4 shards cannot split evenly.\n"
    "  shape (8, 30), names ('embed', 'mlp'), rule 'mlp' -> ('fsdp',),"
    " mesh {'data': 2, 'fsdp': 4, 'tensor': 2}\n"
    '  Fix: pad it (uneven="pad", to 32), or replicate it with rules.replace(mlp=None).'
  )


@pytest.mark.parametrize(
  ("policy", "spec", "padding", "step"),
  [
    ("next", P("tensor"), 0, "'vocab' -> 'tensor'; not 'fsdp': 4 does not divide 30"),
    ("pad", P("tensor"), 0, "'vocab' -> 'tensor'; not 'fsdp': 4 does not divide 30"),
    ("replicate", P(None), 0, "'vocab' -> replicated: 4 does not divide 30 (uneven='replicate')"),
    ("error", P("tensor"), 0, "'vocab' -> 'tensor'; not 'fsdp': 4 does not divide 30"),
  ],
)
def test_uneven_policies_with_candidates_left(policy, spec, padding, step):
  found = resolve(("vocab",), (30,), uneven=policy, vocab=["fsdp", "tensor"])
  assert (found.spec, found.padding, found.steps) == (spec, (padding,), (step,))


def test_next_keeps_a_dim_whole_when_no_candidate_is_left():
  found = resolve(("vocab",), (31,), uneven="next", vocab=["fsdp", "tensor"])
  assert found.spec == P(None)
  why = "'vocab' -> replicated: 2 does not divide 31, and no candidate is left (uneven='next')"
  assert found.steps == (why,)


def test_pad_rounds_up_for_the_first_candidate_when_none_divides():
  found = resolve(("vocab",), (31,), uneven="pad", vocab=["fsdp", "tensor"])
  assert (found.spec, found.padding) == (P("fsdp"), (1,))
  assert found.steps == ("'vocab' -> 'fsdp': 31 is padded to 32",)
  whole = resolve(("vocab",), (31,), uneven="pad", vocab=["fsdp", None])
  assert (whole.spec, whole.padding) == (P(None), (0,))


def test_a_rule_may_have_its_own_policy():
  rules = LogicalRules(vocab="fsdp", mlp="tensor", uneven={"vocab": "pad"})
  found = nxp.resolve_spec(("vocab", None), (30, 4), MESH, rules)
  assert (found.spec, found.padding) == (P("fsdp", None), (2, 0))
  with pytest.raises(ShardingError, match=r"dim 1 \('mlp'\) has length 3"):
    nxp.resolve_spec(("vocab", "mlp"), (30, 3), MESH, rules)


def test_a_padded_dim_counts_as_used():
  with pytest.raises(ShardingError, match="already used by dim 0"):
    resolve(("a", "b"), (30, 8), uneven="pad", a="fsdp", b="fsdp")


def test_scalars_and_empty_dims():
  assert resolve((), ()).spec == P()
  assert resolve(("fsdp", None), (0, 3)).spec == P("fsdp", None)


@pytest.mark.parametrize(
  ("spec", "shape", "options", "expected", "why"),
  [
    (
      P(None, None),
      (16, 32),
      {},
      P(None, "fsdp"),
      "'fsdp' on dim 1 (32), the largest free dim that 4 divides",
    ),
    (
      P(None, None),
      (32, 16),
      {},
      P("fsdp", None),
      "'fsdp' on dim 0 (32), the largest free dim that 4 divides",
    ),
    (
      P(None, None),
      (16, 16),
      {},
      P(None, "fsdp"),
      "'fsdp' on dim 1 (16), the largest free dim that 4 divides",
    ),
    (
      P(None, "tensor"),
      (16, 32),
      {},
      P("fsdp", "tensor"),
      "'fsdp' on dim 0 (16), the largest free dim that 4 divides",
    ),
    (P(None, None), (30, 8), {}, P(None, "fsdp"), "'fsdp' on dim 1 (8), the largest free dim that 4 divides"),
    (P(None, None), (30, 6), {}, P(None, None), "no dim of (30, 6) divides by 4 ('fsdp')"),
    (P("fsdp", None), (16, 32), {}, P("fsdp", None), "axis 'fsdp' is already used"),
    (
      P(None, "fsdp"),
      (16, 32),
      {"axis": ("data", "fsdp")},
      P("data", "fsdp"),
      "'data' on dim 0 (16), the largest free dim that 2 divides",
    ),
    (
      P(None, "tensor"),
      (30, 32),
      {},
      P(None, ("tensor", "fsdp")),
      "'fsdp' behind 'tensor' on dim 1 (32), the largest dim that 4 divides",
    ),
    (
      P(None, None),
      (9, 12),
      {"axis": ("data", "fsdp")},
      P(None, "fsdp"),
      "'fsdp' on dim 1 (12), the largest free dim that 4 divides; no dim of (9, 12) divides by all 8",
    ),
    (
      P(None, None),
      (6, 20),
      {"axis": ("data", "fsdp")},
      P("data", "fsdp"),
      "'fsdp' on dim 1 (20), the largest free dim that 4 divides; 'data' on dim 0 (6), the largest free"
      " dim that 2 divides; no dim of (6, 20) divides by all 8",
    ),
    (P(("data", "fsdp"), None), (16, 32), {}, P(("data", "fsdp"), None), "axis 'fsdp' is already used"),
    (P(None), (16,), {"min_size": 16}, P(None), "16 elements, at most min_size=16"),
    (P(), (), {}, P(), "1 elements, at most min_size=1"),
    (
      P(None, None),
      (16, 32),
      {"axis": ("data", "fsdp")},
      P(None, ("data", "fsdp")),
      "('data', 'fsdp') on dim 1 (32), the largest free dim that 8 divides",
    ),
  ],
)
def test_extending_a_spec(spec, shape, options, expected, why):
  fallback = nxp.fsdp(**{"min_size": 1, **options})
  found, said = extend_spec(spec, shape, MESH, fallback)
  assert (found.spec, found.padding, said) == (expected, (0,) * len(shape), why)


@pytest.mark.parametrize(
  ("spec", "shape", "expected", "why"),
  [
    (P(None, None), (16, 32), P("fsdp", None), "'fsdp' on dim 0 (16), the rows of a look-up table"),
    (
      P("tensor", None),
      (16, 32),
      P(("tensor", "fsdp"), None),
      "'fsdp' behind 'tensor' on dim 0 (16), the rows of a look-up table",
    ),
    (P(None, "tensor"), (16, 32), P("fsdp", "tensor"), "'fsdp' on dim 0 (16), the rows of a look-up table"),
    (
      P("tensor", None),
      (12, 32),
      P("tensor", "fsdp"),
      "'fsdp' on dim 1 (32), the largest free dim that 4 divides; not the rows of this look-up table: 8 does"
      " not divide 12",
    ),
    (
      P(None, None),
      (30, 6),
      P(None, None),
      "no dim of (30, 6) divides by 4 ('fsdp'); not the rows of this look-up table: 4 does not divide 30",
    ),
    (P(None, "fsdp"), (16, 32), P(None, "fsdp"), "axis 'fsdp' is already used"),
  ],
)
def test_extending_the_spec_of_a_look_up_table(spec, shape, expected, why):
  found, said = extend_spec(spec, shape, MESH, nxp.fsdp(min_size=1), rows=0)
  assert (found.spec, found.padding, said) == (expected, (0, 0), why)


@pytest.mark.parametrize(
  ("shape", "options", "expected", "padding", "why"),
  [
    ((30, 7), {}, P("fsdp", None), (2, 0), "'fsdp' on dim 0 (30), padded to 32"),
    ((30, 8), {}, P(None, "fsdp"), (0, 0), "'fsdp' on dim 1 (8), the largest free dim that 4 divides"),
    (
      (30, 8),
      {"rows": 0},
      P("fsdp", None),
      (2, 0),
      "'fsdp' on dim 0 (30), padded to 32, the rows of a look-up table",
    ),
    ((1, 1), {}, P(None, None), (0, 0), "no dim of (1, 1) divides by 4 ('fsdp')"),
  ],
)
def test_extending_a_spec_with_padding(shape, options, expected, padding, why):
  found, said = extend_spec(P(None, None), shape, MESH, nxp.fsdp(min_size=0), pad=True, **options)
  assert (found.spec, found.padding, said) == (expected, padding, why)


def test_extending_over_an_axis_that_the_mesh_lacks():
  with pytest.raises(ShardingError, match=r"needs the mesh axis 'shard'[\s\S]*fsdp\('data'\), or add shard="):
    extend_spec(P(None), (16,), MESH, nxp.fsdp("shard"))


def test_shards_of_each_dim():
  assert shard_counts(P(("data", "fsdp"), None), 3, MESH) == (8, 1, 1)


def test_an_empty_tuple_is_a_whole_dim():
  assert nxp.resolve_spec(((), "fsdp"), (3, 8), MESH).spec == P(None, "fsdp")
