"""Every preset on a model of ours: each parameter named, the expected layout, and the same numbers."""

import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from layout.families import GPT, T5, Llama, ViT
from nnx_parallel import LogicalRules, PathRules, presets
from training import other_notes

MODELS = {"t5": T5, "llama": Llama, "gpt": GPT, "vit": ViT}
LAYOUTS = {
  "data_parallel": {"data": 8}, "fsdp": {"fsdp": 8}, "fsdp_tensor": {"data": 2, "fsdp": 2, "tensor": 2},
  "context": {"data": 4, "context": 2}, "expert": {"data": 4, "expert": 2},
}  # fmt: skip


def build(name, **options):
  return lambda: MODELS[name](nnx.Rngs(0), **options)


def table(plan):
  """Path with list indices as * -> spec; a spec that differs between layers would show as two."""
  specs: dict[str, set] = {}
  for leaf in plan.leaves:
    specs.setdefault(".".join("*" if isinstance(p, int) else str(p) for p in leaf.path), set()).add(leaf.spec)
  assert all(len(found) == 1 for found in specs.values())
  return {path: found.pop() for path, found in specs.items()}


# What splits by tensor, and on which dim. All else is whole.
EXPECTED = {
  "llama": {
    "embed_tokens.embedding": 0, "lm_head.kernel": 1, "layers.*.self_attn.o_proj.kernel": 0,
    **{f"layers.*.self_attn.{name}_proj.kernel": 1 for name in "qkv"},
    "layers.*.mlp.gate_proj.kernel": 1, "layers.*.mlp.up_proj.kernel": 1, "layers.*.mlp.down_proj.kernel": 0,
  },
  "gpt": {
    "wte.embedding": 0, "h.*.attn.c_attn.kernel": 1, "h.*.attn.c_attn.bias": 0, "h.*.attn.c_proj.kernel": 0,
    "h.*.mlp.c_fc.kernel": 1, "h.*.mlp.c_fc.bias": 0, "h.*.mlp.c_proj.kernel": 0,
  },
  "vit": {
    **{f"blocks.*.attn.{name}.kernel": 1 for name in ("query", "key", "value")},
    **{f"blocks.*.attn.{name}.bias": 0 for name in ("query", "key", "value")},
    "blocks.*.attn.out.kernel": 0, "blocks.*.fc1.kernel": 1, "blocks.*.fc1.bias": 0, "blocks.*.fc2.kernel": 0,
  },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_the_table_of_a_family(name):
  rules = [getattr(presets, name)(), presets.fsdp_tensor()]
  plan = nxp.plan(build(name), nxp.abstract_mesh(fsdp=2, tensor=2), rules)
  found = table(plan)
  assert {name: spec.index("tensor") for name, spec in found.items() if any(spec)} == EXPECTED[name]
  assert {axis for spec in found.values() for axis in spec} == {"tensor", None}
  assert {leaf.decision.source for leaf in plan.leaves} == {"path rule"}
  assert other_notes(plan) == ()


@pytest.mark.parametrize("name", MODELS)
def test_a_family_without_a_fallback_leaves_nothing_unmatched(name):
  logical = LogicalRules(embed=None, mlp="tensor", heads="tensor", kv_heads="tensor", vocab="tensor")
  nxp.plan(build(name), nxp.abstract_mesh(tensor=2), [getattr(presets, name)(), logical])


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_on_their_mesh(name):
  rules = getattr(presets, name)(**({} if name == "data_parallel" else {"min_size": 64}))
  plan = nxp.plan(build("llama"), nxp.abstract_mesh(**LAYOUTS[name]), [presets.llama(), rules])
  split = plan.bytes_per_device() / sum(leaf.bytes for leaf in plan.leaves)
  ideal = {"data_parallel": 1, "fsdp": 8, "fsdp_tensor": 4, "context": 4, "expert": 4}
  # The norms stay whole: 320 of 27 968 bytes.
  assert 1 / ideal[name] <= split < 1 / ideal[name] + 0.02
  batch = [axis for axis in ("data", "replica", "fsdp", "expert") if axis in LAYOUTS[name]]
  assert plan.batch_spec(1) == P(tuple(batch) if len(batch) > 1 else batch[0])


def test_dims_that_a_layout_is_about():
  def spec(rules, names, shape, **axes):
    return tuple(nxp.resolve_spec(names.split(), shape, axes, rules.logical).spec)

  cube = (4, 8, 8)
  assert spec(presets.expert(), "expert embed mlp", cube, data=2, expert=4) == ("expert", None, None)
  assert spec(presets.context(), "batch seq embed", cube, data=2, context=4) == ("data", "context", None)
  tensor, piped = presets.context(tensor="tensor"), presets.pipeline(tensor="tensor")
  assert spec(tensor, "embed mlp", (8, 8), data=2, context=2, tensor=2) == (None, "tensor")
  assert spec(piped, "layers embed mlp", cube, data=2, stage=2, tensor=2) == ("stage", None, "tensor")
  # Three key-value heads do not fit four shards: whole, and recorded.
  assert spec(presets.fsdp_tensor(), "embed kv_heads", (8, 3), fsdp=2, tensor=4) == (None, None)


def test_a_preset_is_edited_by_name():
  rules = presets.fsdp_tensor().replace(vocab=None, kv_heads=None)
  assert rules.logical["vocab"] == ((),)
  assert rules.logical["mlp"] == (("tensor",),)
  assert presets.fsdp_tensor().logical["vocab"] == (("tensor",), ())


class Grouped(nnx.Module):
  """Attention with few key-value heads and no names; kernels of three dims, or of two."""

  def __init__(self, rngs, heads, kv_heads, flat):
    shapes = {"q": (heads, 8), "k": (kv_heads, 8), "v": (kv_heads, 8)}
    for name, shape in shapes.items():
      setattr(self, name, nnx.LinearGeneral(16, shape[0] * 8 if flat else shape, rngs=rngs))
    shape, axis = (heads * 8, -1) if flat else ((heads, 8), (-2, -1))
    self.o = nnx.LinearGeneral(shape, 16, axis=axis, rngs=rngs)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("kv_heads", "kv_axis"), [(4, "tensor"), (1, None)])
def test_attention_without_names_is_split_by_heads_and_never_along_the_head_dim(flat, kv_heads, kv_axis):
  rules = [presets.layers(), presets.fsdp_tensor(min_size=10**6)]
  plan = nxp.plan(lambda: Grouped(nnx.Rngs(0), 4, kv_heads, flat), nxp.abstract_mesh(fsdp=2, tensor=4), rules)
  specs = {leaf.name: leaf.spec for leaf in plan.leaves}
  rest = () if flat else (None,)
  kv_axis = "tensor" if flat else kv_axis  # a flat dim has the size of all heads
  assert specs["q.kernel"] == P(None, "tensor", *rest)
  assert specs["k.kernel"] == specs["v.kernel"] == P(None, kv_axis, *rest)
  assert specs["v.bias"] == P(kv_axis, *rest)
  assert specs["o.kernel"] == P("tensor", *rest, None)


def test_unmatched_parameters_are_all_listed_with_the_nearest_rule():
  rules = PathRules([(("self_attn", "q_proj", "weight"), None), (r"lm_head\.kernel", (None, None))])
  with pytest.raises(nxp.errors.ShardingError) as caught:
    nxp.plan(build("llama"), nxp.abstract_mesh(tensor=2), rules)
  text = str(caught.value)
  assert "incomplete partition spec: 20 parameters have no annotation and match no rule." in text
  assert "layers.0.self_attn.q_proj.kernel   (nearest rule: ('self_attn', 'q_proj', 'weight'))" in text
  assert "embed_tokens.embedding" in text
  assert "\n    lm_head.kernel" not in text
  assert "None replicates an array" in text


def test_rules_that_never_fire_are_noted_unless_the_table_is_for_a_family():
  rules = [(("q_proj",), None), (r".*", None)]
  pairs = [(("q_prj", "kernel"), None), *rules]
  make = lambda **options: nxp.plan(build("llama"), nxp.abstract_mesh(tensor=2), PathRules(pairs, **options))
  assert "path rule ('q_prj', 'kernel') matches nothing" in make().notes
  assert not [note for note in make(optional=True).notes if "matches nothing" in note]


class Beside(nnx.Module):  # A block with the layers of its MLP beside the attention, and a table
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.blocks = nnx.List([nnx.Dict(attn=nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs))])
    self.blocks[0].fc, self.blocks[0].out = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
    self.embed = nnx.Embed(64, 32, rngs=rngs)


def specs_of(rules, **sizes):
  plan = nxp.plan(Beside, nxp.make_mesh(**sizes), rules)
  return {leaf.name: leaf.spec for leaf in plan.leaves}, plan.notes


def test_rules_of_a_preset_for_axes_that_the_mesh_lacks_are_left_out_with_a_note():
  specs, notes = specs_of([presets.gpt(), presets.fsdp_tensor(min_size=0)], fsdp=8)
  assert specs["blocks.0.fc.kernel"] == P(None, "fsdp")
  assert notes == ("the mesh has no axis 'tensor', so rules of the preset are left out: mlp, heads",)
  specs, notes = specs_of([presets.llama(), nxp.fsdp(min_size=0)], fsdp=8)
  assert specs["embed.embedding"] == P("fsdp", None)
  text = "no rule for names of the path rules, so they split nothing: embed, kv_heads, heads and 1 more"
  assert text in notes


def test_rules_of_ones_own_for_axes_that_the_mesh_lacks_are_an_error():
  edited = presets.fsdp_tensor().replace(mlp="tensr")
  with pytest.raises(nxp.errors.ShardingError, match=r"'mlp' can never apply.*\n.*\n.*did you mean 'tensor'"):
    specs_of([presets.gpt(), edited], data=2, tensor=4)
  with pytest.raises(nxp.errors.ShardingError, match="rule for 'batch' can never apply"):
    specs_of([presets.gpt(), presets.fsdp_tensor()], tensor=8)
  with pytest.raises(nxp.errors.ShardingError, match="dim 0 is named 'vocab', which is neither a rule nor"):
    specs_of([nxp.PathRules([(r".*embedding", ("vocab", None)), (".*", None)])], fsdp=8)
