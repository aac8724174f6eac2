"""Checks of a step: its gradients against its derivatives, and one layout against another."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from nnx_parallel.train.mend import with_correct_convolutions
  from nnx_parallel.verify.check_step import StepCheck, StepDifference
  from nnx_parallel.verify.gradient_check import GradientCheck, GradientComparison

__all__ = ["GradientCheck", "GradientComparison", "StepCheck", "StepDifference", "with_correct_convolutions"]
