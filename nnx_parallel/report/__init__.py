"""Reports on compiled programs, the memory plan, and the search for a layout."""

from etils import epy

# The types of reports do not know their text and pages, which register themselves.
from nnx_parallel.report import html as html

with epy.lazy_api_imports(globals()):
  from nnx_parallel.report.chips import Chip, chip
  from nnx_parallel.report.compile_report import CompileReport
  from nnx_parallel.report.html import plan_page
  from nnx_parallel.report.memory import MemoryPlan
  from nnx_parallel.report.search import SearchResult
  from nnx_parallel.report.topology import topology_mesh

__all__ = ["Chip", "CompileReport", "MemoryPlan", "SearchResult", "chip", "plan_page", "topology_mesh"]
