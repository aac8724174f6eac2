"""Functions for jobs of several processes: start-up, communication, data, and signals to stop."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from nnx_parallel.hosts.agree import barrier, main_process, to_host
  from nnx_parallel.hosts.bringup import Processes
  from nnx_parallel.hosts.stop import StopSignals

__all__ = ["Processes", "StopSignals", "barrier", "main_process", "to_host"]
