"""Plain modules of Hugging Face's families, whose weights `nnx_parallel.interop.huggingface` maps.

Copy a module to change it. They hold no annotations: `nxp.presets.llama()` and similar presets name their
dims.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from nnx_parallel.core.checked import check_arguments, is_dtype
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.nodes import path_str, variables
from nnx_parallel.errors import CheckpointError, RecipeError
from nnx_parallel.interop.families.decoder import Config, Decoder
from nnx_parallel.interop.families.t5 import T5
from nnx_parallel.interop.huggingface import Folder
from nnx_parallel.interop.weights import import_arrays
from nnx_parallel.layout.planning import plan as make_plan

DECODERS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma3_text")


@check_arguments(CheckpointError)
def from_config(
  folder: str | os.PathLike[str], rngs: nnx.Rngs, *, param_dtype: str = "float32", ignore: Sequence[str] = ()
) -> nnx.Module:
  """Makes the module that a folder's `config.json` describes, with random weights.

  If the folder also contains the weights, they decide whether the head is tied to the embedding, as in
  transformers.

  Args:
    folder: the folder of a model in the format of Hugging Face.
    rngs: the random numbers for the weights.
    param_dtype: the dtype of all parameters.
    ignore: keys of `config.json` that this function does not know and that may be ignored, because they have
      no effect.

  Returns:
    A plain module: a `Decoder` or a `T5`.

  Raises:
    CheckpointError: the files cannot be read.
    RecipeError: the family of models, or a setting in `config.json`, is not supported.

  Example:
    >>> import nnx_parallel as nxp
    >>> plan = nxp.plan(lambda: from_config("Qwen3-0.6B", nnx.Rngs(0)), mesh, nxp.fsdp())  # doctest: +SKIP
  """
  return _module_of(Folder(folder), rngs, param_dtype, ignore)


def _module_of(folder: Folder, rngs: nnx.Rngs, param_dtype: str, ignore: Sequence[str]) -> nnx.Module:
  """See `from_config`."""
  if not is_dtype(param_dtype):
    raise CheckpointError(f"param_dtype={param_dtype!r} is no dtype.", fix='param_dtype="bfloat16"')
  found = {key: value for key, value in folder.config.items() if key not in ignore}
  family, tied = found.get("model_type"), found.get("tie_word_embeddings", True)
  if family in DECODERS:
    if folder.has_own_head:
      found["tie_word_embeddings"] = False
    return Decoder(Config.from_json(found, param_dtype), rngs)
  if family == "t5":
    found["scale_decoder_outputs"] = found.get("scale_decoder_outputs", tied)
    found["tie_word_embeddings"] = tied if folder.has_own_head is None else not folder.has_own_head
    return T5(found, rngs, param_dtype)
  raise RecipeError(
    f"there is no module here for the family {family!r}, which {folder.path} is of.",
    fix=f"one of {', '.join([*DECODERS, 't5'])}, or your own module.",
  )


@check_arguments(CheckpointError)
def load_huggingface(
  folder: str | os.PathLike[str],
  mesh: AnyMesh,
  rules: Any = None,
  *,
  param_dtype: str = "float32",
  skip: Sequence[str] = (),
  ignore: Sequence[str] = (),
  edit: Callable[[Any], Any] | None = None,
  **options: Any,
) -> Any:
  """Loads a Hugging Face model into its shards: makes the module, plan and weight map, and reads the weights.

  Args:
    folder: a folder with `config.json` and safetensors files.
    mesh: a mesh of real devices.
    rules: as for `nxp.plan`; `nxp.presets.llama()` and similar presets name the dims.
    param_dtype: the dtype of all parameters; the import casts to it.
    skip: patterns of the paths of leaves that the files do not have; these leaves are initialised.
    ignore: keys of `config.json` that this function does not know and that may be ignored, because they have
      no effect.
    edit: a function that edits the module before it is planned, such as `lambda model: add_lora(model, ...)`.
      Adapters are initialised, and not read from the files.
    **options: more arguments of `nxp.plan`. With `optimizer=`, the call also creates the optimizer.

  Returns:
    The module, or (module, optimizer).

  Raises:
    CheckpointError: the files cannot be read, or the weights do not fit the module.
    RecipeError: the family of models, or a setting in `config.json`, is not supported.
    ShardingError: as for `nxp.plan`.

  Example:
    >>> import nnx_parallel as nxp
    >>> mesh = nxp.make_mesh(fsdp=8)
    >>> model = nxp.interop.load_huggingface("Qwen3-0.6B", mesh, nxp.fsdp())  # doctest: +SKIP
  """
  found = Folder(folder)

  def init() -> nnx.Module:
    model = _module_of(found, nnx.Rngs(0), param_dtype, ignore)
    if edit is not None:
      edit(model)
    return model

  plan = make_plan(init, mesh, rules, **options)
  added = [
    path_str(path) for path, x in variables(plan.abstract_model).items() if isinstance(x, nnx.LoRAParam)
  ]
  return import_arrays(folder, lambda: found.tensors, plan, found.weight_map(), [*skip, *added])
