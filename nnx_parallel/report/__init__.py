"""Reports on compiled programs, estimates of memory and time, and the search for a layout."""

from etils import epy

# The types of reports do not know their text and pages, which register themselves.
from nnx_parallel.report import html as html

with epy.lazy_api_imports(globals()):
  from nnx_parallel.report.chips import Chip, chip
  from nnx_parallel.report.compile_report import CompileReport
  from nnx_parallel.report.estimate.memory import MemoryPlan
  from nnx_parallel.report.estimate.roofline import StepTime, predict_time
  from nnx_parallel.report.html import plan_page
  from nnx_parallel.report.search.search import SearchResult
  from nnx_parallel.report.topology import topology_mesh

__all__ = [
  "Chip",
  "CompileReport",
  "MemoryPlan",
  "SearchResult",
  "StepTime",
  "chip",
  "plan_page",
  "predict_time",
  "topology_mesh",
]
