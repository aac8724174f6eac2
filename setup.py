"""The description on the package index: README.md, with absolute links to files of the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
text = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
  long_description=re.sub(r"\]\((?!https?:|#)", f"]({project['urls']['Repository']}/blob/main/", text),
  long_description_content_type="text/markdown",
)
