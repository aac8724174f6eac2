"""Printed plans: what a person reads, and that it fits the page."""

import sys
import types

import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.models import LM
from nnx_parallel.core.text import WIDTH
from nnx_parallel.layout.show.text import grouped

RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor", vocab="tensor")


def lm_plan(**kwargs):
  init, mesh = lambda: LM(64, 8, 3, nnx.Rngs(0)), nxp.make_mesh(data=2, fsdp=2, tensor=2)
  return nxp.plan(init, mesh, RULES, optimizer=optax.adam(1e-3), **kwargs)


TABLE = """\
mesh data=2 x fsdp=2 x tensor=2 = 8 devices (cpu, Auto axes)
  inside one host: data, fsdp, tensor
rules batch -> data+fsdp, embed -> fsdp, mlp -> tensor, vocab -> tensor

model                  n  type         array          spec               per device  why
blocks.*.down.bias     3  Param        float32[8]     replicated               96 B  no annotation
blocks.*.down.kernel   3  Param        float32[32,8]  (tensor, fsdp)          768 B  names (mlp, embed)
blocks.*.norm.scale    3  Param        float32[8]     replicated               96 B  no annotation
blocks.*.up.bias       3  Param        float32[32]    replicated              384 B  no annotation
blocks.*.up.kernel     3  Param        float32[8,32]  (fsdp, tensor)          768 B  names (embed, mlp)
embed.embedding           Param        float32[64,8]  (tensor, fsdp)          512 B  names (vocab, embed); tied to
                                                                                     head

optimizer              n  type         array          spec               per device  why
opt_state.0.count         OptArray     int32[]        replicated                4 B  not parameter state
opt_state.0.mu.*      16  OptVariable  float32        same as parameter   2.562 KiB  as its parameter
opt_state.0.nu.*      16  OptVariable  float32        same as parameter   2.562 KiB  as its parameter
step                      OptState     uint32[]       replicated                4 B  not parameter state

object     arrays  elements  total size  per device  replication
model          16     2,192   8.562 KiB   2.562 KiB         2.39
optimizer      34     4,386   17.13 KiB   5.133 KiB         2.40
total          50              25.7 KiB   7.695 KiB
layers: 3 x Block at blocks.*
note: embed.embedding: look-up table split by columns over fsdp, as the batch, so a step sends activations instead of
  weights; split the rows: names (('tensor', 'fsdp'), None)
note: in a step of your own, XLA can compute wrong gradients on this mesh (fsdp shards parameters and examples, tensor
  no examples): differentiate nxp.parallel.gather_on_read(loss, model), as nxp.train_step does by itself"""  # noqa: E501


@pytest.mark.auto_axes("what it expects is of Auto axes")
def test_the_table():
  assert str(lm_plan()) == TABLE


def test_the_table_fits_the_page_and_wraps_only_the_reasons():
  long = r"blocks\.\d+\.(up|down)\.(kernel|bias)|blocks\.\d+\.norm\.scale|embed\.embedding"
  init, rules = lambda: nnx.Dict(block=linear(6)), [nxp.PathRules([(long, None)]), nxp.fsdp(min_size=7)]
  plan = nxp.plan(init, nxp.make_mesh(fsdp=8), rules)
  lines = str(plan).splitlines()
  assert max(map(len, lines)) <= WIDTH
  assert any("block.kernel" in line and "float32[8,6]" in line for line in lines)


class Numbered(nnx.Module):
  def __init__(self, rngs):
    for i in range(12):
      setattr(self, f"layer_{i}", nnx.Linear(8, 8, rngs=rngs))


def linear(width):
  return nnx.Linear(8, width, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("init", "rows"), [
  (lambda: nnx.Dict({str(i): linear(8) for i in range(12)}), [("*.bias", 12), ("*.kernel", 12)]),
  (lambda: Numbered(nnx.Rngs(0)), [("layer_*.bias", 12), ("layer_*.kernel", 12)]),
  (lambda: nnx.List([linear(8), linear(16)]), [(f"{n}.{x}", 1) for n in "01" for x in ("bias", "kernel")]),
], ids=["keys that are numbers", "numbered by name", "layers that differ"])  # fmt: skip
def test_equal_leaves_of_repeated_layers_are_one_row(init, rows):
  plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=8))
  assert [(name, len(leaves)) for name, leaves in grouped(plan.leaves)] == rows


def test_explain_says_what_was_tried_and_what_follows():
  assert lm_plan().explain("embed.embedding") == (
    "embed.embedding: Param float32[64,8] -> P('tensor', 'fsdp')\n"
    "  tied: also at head; counted once\n"
    "  from its metadata: ('vocab', 'embed')\n"
    "  'vocab' -> 'tensor'\n"
    "  'embed' -> 'fsdp'\n"
    "  each device holds float32[32,4], 512 bytes of 2048 (2 copies on 8 devices)\n"
    "  2 optimizer arrays follow it: 1 KiB per device"
  )


NARROW = """\
model                  n  array          spec               per device
    type; why
blocks.*.down.bias     3  float32[8]     replicated               96 B
    Param; no annotation
blocks.*.down.kernel   3  float32[32,8]  (tensor, fsdp)          768 B
    Param; names (mlp, embed)
"""


def test_a_narrow_terminal_shows_the_reason_under_its_row(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "80")
  lm_plan().show()
  shown = capsys.readouterr().out
  assert shown.rstrip("\n") == str(lm_plan())
  assert NARROW in shown
  assert max(map(len, shown.splitlines())) <= 80


def test_show_hands_itself_to_a_notebook(monkeypatch):
  shown = []
  display = types.ModuleType("IPython.display")
  display.display = shown.append
  ipython = types.ModuleType("IPython")
  ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
  monkeypatch.setitem(sys.modules, "IPython", ipython)
  monkeypatch.setitem(sys.modules, "IPython.display", display)
  plan = lm_plan()
  plan.show()
  assert shown == [plan]


@pytest.mark.parametrize(("rules", "said"), [
  ({}, ["batch -> data (by the names of the axes)", "no array and no rule uses tensor=4"]),
  ({"batch": "data", "mlp": "tensor"}, ["rules batch -> data, mlp -> tensor"]),
  ({"batch": "data", "mpl": "tensor"}, ["their rules act on activations only: mpl"]),
  ({"mlp": None, "batch": ("data", "tensor")}, ["rules mlp -> replicated, batch -> data+tensor"]),
])  # fmt: skip
def test_what_splits_nothing_is_said_and_how_the_batch_is_split(rules, said):
  kernel = nnx.with_partitioning(nnx.initializers.ones, (None, "mlp"))
  rules = nxp.LogicalRules(rules, unknown="replicate")
  init = lambda: nnx.Linear(4, 8, kernel_init=kernel, rngs=nnx.Rngs(0))
  made = nxp.plan(init, nxp.make_mesh(data=2, tensor=4), rules)
  text = " ".join(str(made).split())
  assert all(one in text for one in said)
  assert len(made.notes) == sum("rules act" in one or "no array" in one for one in said)
