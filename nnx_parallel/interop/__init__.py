"""Imports and exports weights (safetensors, Hugging Face, PEFT, Orbax, Linen) and compiled programs."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from nnx_parallel.interop.adapters import add_lora, merge_adapters
  from nnx_parallel.interop.families import from_config, load_huggingface
  from nnx_parallel.interop.huggingface import weight_map_of
  from nnx_parallel.interop.linen import export_linen, import_linen, linen_names
  from nnx_parallel.interop.orbax import restore_orbax
  from nnx_parallel.interop.peft import export_peft, import_peft
  from nnx_parallel.interop.program import export_program, load_program
  from nnx_parallel.interop.safetensors import (
    dry_run_export,
    dry_run_import,
    export_safetensors,
    import_safetensors,
  )
  from nnx_parallel.interop.weights import Rule, WeightMap, load_weight_map

__all__ = [
  "Rule",
  "WeightMap",
  "add_lora",
  "dry_run_export",
  "dry_run_import",
  "export_linen",
  "export_peft",
  "export_program",
  "export_safetensors",
  "from_config",
  "import_linen",
  "import_peft",
  "import_safetensors",
  "linen_names",
  "load_huggingface",
  "load_program",
  "load_weight_map",
  "merge_adapters",
  "restore_orbax",
  "weight_map_of",
]
