"""The description on the package index: README.md, with absolute links to files of the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
text = (ROOT / "README.md").read_text()
setup(
  long_description=re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/main/", text),
  long_description_content_type="text/markdown",
)
