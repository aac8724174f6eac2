"""Sphinx builds the site from this: the guides, the records of the benchmarks, and each public name.

`make site` writes build/site/guides/index.html. The source folder is the root of the repository, so that the
links of the guides to other files work here as they do in the repository.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "nnx-parallel"
author = "the authors of nnx-parallel"
root_doc = "guides/index"
include_patterns = [
  "guides/index.rst", "guides/*.md", "guides/api/*.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md",
  "benchmarks/README.md", "examples/README.md",
]  # fmt: skip
extensions = [
  "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx", "sphinx_copybutton",
]  # fmt: skip
# Inventories of other projects are fetched where there is a network to fetch them from.
intersphinx_mapping = (
  {
    "python": ("https://docs.python.org/3", None),
    "jax": ("https://docs.jax.dev/en/latest", None),
    "flax": ("https://flax.readthedocs.io/en/latest", None),
    "optax": ("https://optax.readthedocs.io/en/latest", None),
    "orbax": ("https://orbax.readthedocs.io/en/latest", None),
  }
  if os.environ.get("NXP_SITE_ONLINE")
  else {}
)
default_role = "code"  # the docstrings write `names` as Markdown does
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# `bytes` in a signature is Python's, and two types of results have a field of that name.
suppress_warnings = ["ref.python"]
autodoc_member_order = "bysource"
napoleon_use_ivar = True
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 88
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_theme = "furo"
html_title = "nnx-parallel"
html_favicon = "icon.svg"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = False


def write_api(_: Sphinx) -> None:
  """Writes a page for each public module, with all its names, and one for the types of their results."""
  folder = ROOT / "guides" / "api"
  folder.mkdir(exist_ok=True)
  package = importlib.import_module("nnx_parallel")
  public: list[Any] = []
  for space in ("", *(name for name in package.__all__ if inspect.ismodule(getattr(package, name)))):
    module = getattr(package, space) if space else package
    shown = "nxp." + space if space else "nxp"
    lines = [f"# {shown}", "", f"```py\nimport nnx_parallel as nxp  # {shown}\n```", "", "```{eval-rst}"]
    for name in sorted(module.__all__, key=str.lower):
      value = getattr(module, name)
      if inspect.ismodule(value):
        continue
      public.append(value)
      kind = "autoclass" if inspect.isclass(value) else "autofunction" if callable(value) else "autodata"
      lines += [f".. {kind}:: {module.__name__}.{name}", "   :members:" if kind == "autoclass" else "", ""]
    (folder / f"{space or 'nxp'}.md").write_text("\n".join([*lines, "```", ""]))
  lines = ["# Types of results", "", "Calls return these types. You do not create them.", "", "```{eval-rst}"]
  for kind in results_of(public):
    lines += [f".. autoclass:: {kind.__module__}.{kind.__qualname__}()", "   :members:", ""]
  (folder / "results.md").write_text("\n".join([*lines, "```", ""]))


def results_of(public: list[Any]) -> list[type]:
  """The classes without a public name that some names return or have as attributes."""
  modules = [m for name, m in sys.modules.items() if name.startswith("nnx_parallel.")]
  classes = {
    name: value for m in modules for name, value in vars(m).items()
    if inspect.isclass(value) and value.__doc__
    and re.match(r"nnx_parallel\.(?!core|report\.program\.hlo)", value.__module__)
  }  # fmt: skip
  found: dict[str, type] = {}
  queue = [*public]
  while queue:
    value = queue.pop()
    attributes = (
      [v for name, v in vars(value).items() if name[0] != "_"] if inspect.isclass(value) else [value]
    )
    calls = [getattr(v, "fget", None) or getattr(v, "__func__", v) for v in attributes]
    texts = [str(inspect.get_annotations(call).get("return")) for call in calls if inspect.isfunction(call)]
    if inspect.isclass(value):
      texts += [
        str(text) for name, text in inspect.get_annotations(value).items() if not name.startswith("_")
      ]
    for name in re.findall(r"\b[A-Z]\w+", " ".join(texts)):
      if (kind := classes.get(name)) is not None and kind not in public and name not in found:
        found[name] = kind
        queue.append(kind)
  return sorted(found.values(), key=lambda kind: kind.__name__)


def cells(text: str) -> list[dict[str, Any]]:
  """The cells of a guide's notebook: code where it has a ```python block, Markdown elsewhere."""
  made = []
  for n, part in enumerate(re.split(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)):
    code = {"execution_count": None, "outputs": []} if n % 2 else {}
    cell = {"cell_type": "code" if n % 2 else "markdown", "metadata": {}, "source": part.strip("\n"), **code}
    made += [cell] if part.strip() else []
  return made


DEVICES = """```python
import jax

jax.config.update("jax_num_cpu_devices", 8)  # simulates 8 devices; leave it out on accelerators
```
"""


def link_notebook(app: Sphinx, name: str, source: list[str]) -> None:
  """Writes the notebook of a guide beside its page, and a link to it under the title."""
  if "```python\n" not in source[0] or not re.match(r"guides/\d", name):
    return
  first = "" if "jax_num_cpu_devices" in source[0] else DEVICES
  made = {"cells": cells(first + source[0]), "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
  file = Path(app.outdir, f"{name}.ipynb")
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(json.dumps(made, indent=1))
  title, rest = source[0].split("\n", 1)
  note = "; the notebook simulates the 8 devices that the code needs" if first else ""
  link = f'```{{raw}} html\n<p><a href="{file.name}" download>This page as a notebook</a>{note}</p>\n```'
  source[0] = f"{title}\n\n{link}\n{rest}"


def plurals(
  _app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
  """Writes `Array`s as reStructuredText wants it."""
  lines[:] = [re.sub(r"(`[^`]+`)s\b", r"\1\\ s", line) for line in lines]


def setup(app: Sphinx) -> None:
  """Hooks all in; the pages of names are written before Sphinx looks for files."""
  app.connect("builder-inited", write_api)
  app.connect("source-read", link_notebook)
  app.connect("autodoc-process-docstring", plurals)
