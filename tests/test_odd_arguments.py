"""Wrong and odd arguments of public functions: each exception is one of this package."""

import io
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import NnxParallelError


def closed():
  file = io.StringIO("text")
  file.close()
  return file


class Odd:
  def __repr__(self):
    return "<odd>"


VALUES = {
  "None": None,
  "True": True,
  "zero": 0,
  "negative": -3,
  "large": 2**40,
  "float": 1.5,
  "nan": float("nan"),
  "text": "data",
  "no text": "",
  "bytes": b"data",
  "tuple": (),
  "list": [],
  "list of texts": ["data"],
  "list of numbers": [1, -2],
  "dict": {},
  "dict of odds": {"data": Odd()},
  "dict of numbers": {1: 2},
  "set": {"data"},
  "numpy int": np.int64(3),
  "numpy float": np.float32(1.5),
  "numpy bool": np.bool_(True),
  "numpy array": np.ones((3, 2)),
  "texts of numpy": np.array(["a", "b"]),
  "jax array": jnp.ones(3),
  "dtype": jnp.dtype("int8"),
  "a function": len,
  "a class": int,
  "closed file": closed(),
  "object": Odd(),
}


def linear():
  return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


MESH = nxp.abstract_mesh(data=4, tensor=2)
PLAN = nxp.plan(
  linear, nxp.make_mesh(data=4, tensor=2), nxp.fsdp("data", min_size=0), optimizer=optax.sgd(0.1)
)


def calls() -> dict[str, tuple[Any, dict[str, Any]]]:
  """By name, a function and arguments of a call that works; each is replaced by each odd value in turn."""
  rules = nxp.LogicalRules(embed="data")
  loss = lambda model, x: model(x).mean()
  return {
    "make_mesh": (
      lambda axes, **k: nxp.make_mesh(axes, **k),
      {"axes": {"data": 8}, "devices": None, "explicit": False, "dcn": None},
    ),
    "abstract_mesh": (
      lambda axes, **k: nxp.abstract_mesh(axes, **k),
      {"axes": {"data": 8}, "explicit": False},
    ),
    "describe_mesh": (nxp.describe_mesh, {"mesh": MESH}),
    "LogicalRules": (
      lambda embed, unknown, uneven: nxp.LogicalRules(embed=embed, unknown=unknown, uneven=uneven),
      {"embed": "data", "unknown": "error", "uneven": None},
    ),
    "LogicalRules.replace": (rules.replace, {"embed": "data"}),
    "LogicalRules.from_linen": (nxp.LogicalRules.from_linen, {"rules": [("embed", "data")]}),
    "PathRules": (nxp.PathRules, {"rules": [("kernel", (None, "data"))]}),
    "PathRules pattern": (
      lambda pattern, names: nxp.PathRules([(pattern, names)]),
      {"pattern": "kernel", "names": ("data", None)},
    ),
    "fsdp": (
      lambda axis, min_size, extend: nxp.fsdp(axis, min_size=min_size, extend=extend),
      {"axis": "data", "min_size": 0, "extend": True},
    ),
    "plan": (
      nxp.plan,
      {
        "init": linear,
        "mesh": MESH,
        "rules": rules,
        "optimizer": optax.sgd(0.1),
        "wrt": nnx.Param,
        "uneven": "error",
        "zero": 0,
        "zero_axes": None,
        "optimizer_memory": None,
      },
    ),
    "infer_rules": (
      lambda init, mesh, **k: nxp.infer_rules(init, mesh, jax.ShapeDtypeStruct((8, 8), "float32"), **k),
      {
        "init": linear,
        "mesh": MESH,
        "tensor_axis": None,
        "fsdp_axis": None,
        "min_size": 0,
      },
    ),
    "train_step": (
      nxp.train_step,
      {
        "loss_fn": loss,
        "microbatches": 1,
        "remat": None,
        "scan_layers": "auto",
        "layers": None,
        "attention": None,
        "loss_chunks": None,
        "pipeline": None,
        "outputs": (),
        "gradients": None,
        "reduction": None,
        "compiler_options": None,
      },
    ),
    "eval_step": (
      nxp.eval_step,
      {
        "loss_fn": loss,
        "microbatches": 1,
        "layers": None,
        "attention": None,
        "loss_chunks": None,
        "pipeline": None,
        "outputs": (),
        "compiler_options": None,
      },
    ),
    "shard_batch": (nxp.shard_batch, {"batch": {"x": np.ones((8, 8))}, "plan": PLAN}),
  }


CODE_OF_USERS = ("wrt=a function",)
"""Calls in which a function of the user raises: Python's own error says more."""


def outcome(function, arguments) -> str:
  """How a call ended: "works", "ours", or the exception that it should not raise."""
  try:
    function(**arguments)
  except NnxParallelError:
    return "ours"
  except Exception as error:  # noqa: BLE001
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
  return "works"


@pytest.mark.parametrize("name", calls())
def test_a_wrong_argument_is_an_error_of_this_package(name):
  function, right = calls()[name]
  assert outcome(function, right) == "works"
  found = {
    f"{argument}={value}": outcome(function, {**right, argument: VALUES[value]})
    for argument, value in itertools.product(right, VALUES)
  }
  raw = {
    call: how for call, how in found.items() if how not in ("works", "ours") and call not in CODE_OF_USERS
  }
  assert not raw, "\n".join(f"{call}: {how}" for call, how in raw.items())
  assert "ours" in found.values()
