"""A training loop with checkpoints, metrics and resume, and the jobs that it runs."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from nnx_parallel.loop.early_stop import EarlyStop
  from nnx_parallel.loop.metrics import MetricsLog, read_metrics
  from nnx_parallel.loop.run import FitResult
  from nnx_parallel.loop.sums import MetricSums

__all__ = ["EarlyStop", "FitResult", "MetricSums", "MetricsLog", "read_metrics"]
