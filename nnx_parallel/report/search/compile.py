"""The second half of a search: the best candidates are compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from nnx_parallel.core.mesh import abstract_mesh
from nnx_parallel.layout.plan import plan as make_plan
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.estimate.roofline import program_time
from nnx_parallel.report.estimate.workload import parameter_parts
from nnx_parallel.report.tables import results_text
from nnx_parallel.report.topology import Machine, missing_compiler
from nnx_parallel.rules.ruleset import RuleSet

if TYPE_CHECKING:
  from nnx_parallel.report.search.search import Candidate


@dataclasses.dataclass(frozen=True)
class SearchInputs:
  """The arguments of `search` that a compilation needs."""

  init: Callable[[], Any]
  loss: Callable[[Any, Any], Any]
  rules: Any
  optimizer: optax.GradientTransformation
  batch: Any
  machine: Machine


def compile_candidate(inputs: SearchInputs, candidate: Candidate, topology: str) -> Candidate:
  """The candidate with the report of its compiled step, for the inputs's chip, and its time by that."""
  from nnx_parallel.train.step import train_step

  rules = RuleSet.of(inputs.rules)
  rules = rules.replace(candidate.changes) if candidate.changes else rules
  place: dict[str, Any] = {"optimizer_memory": "pinned_host"} if candidate.offload else {}
  layout = make_plan(
    inputs.init,
    abstract_mesh(dict(candidate.sizes)),
    rules,
    optimizer=inputs.optimizer,
    zero=candidate.zero,
    **place,
  )

  step = train_step(inputs.loss, remat=candidate.remat, microbatches=candidate.microbatches)
  report = compile_report(step, layout, batch=inputs.batch, topology=topology, chip=inputs.machine.chip)
  batch_axes = set(layout.batch_axes)
  splitting = {axis for part in parameter_parts(layout) for axis in part.split}
  time = program_time(report, candidate.time, inputs.machine, batch_axes & splitting)
  return dataclasses.replace(candidate, report=report, compiled=time)


def compile_best(
  inputs: SearchInputs, chosen: Sequence[Candidate], others: Sequence[Candidate]
) -> tuple[list[Candidate], Candidate | None, tuple[str, ...]]:
  """Compiles candidates for simulated devices, orders them by that, and has the first checked.

  Where the compiler of the machine is installed, it decides whether a candidate fits and computes the right
  results. Where none of the chosen ones fits, the first of the others wins if it surely fits; but not where a
  compiled one computes wrong results, because the others may too.

  Returns:
    All candidates, the compiled ones first, of these the refused ones last; the winner; and notes for
    the reader.
  """
  notes: list[str] = []
  machine, here = inputs.machine, len(jax.devices("cpu"))
  done = list(chosen)
  if machine.devices <= here:
    text = f"cpu:{machine.devices}"
    done = sorted((compile_candidate(inputs, c, text) for c in done), key=_order)
  elif machine.chip.platform != "cpu":
    notes.append(
      f"Not compiled for simulated devices: {machine.devices} are needed, and this process has {here}."
      f" Start it with XLA_FLAGS=--xla_force_host_platform_device_count={machine.devices} JAX_PLATFORMS=cpu."
    )
  best = next((c for c in done if not c.refused), None)
  if machine.chip.platform != "cpu" and best is not None:
    missing = missing_compiler(machine)
    if missing is None:
      best = _checked(inputs, done, notes)
      done.sort(key=lambda c: bool(c.refused))
    else:
      notes.append(f"Not compiled for {machine.text}: {missing}")
  wrong = [(c, c.report.faults) for c in done if c.report is not None and c.report.faults]
  notes += [f"{c.mesh_text}, microbatches={c.microbatches} is refused: {faults[0]}." for c, faults in wrong]
  if best is None and not wrong and others and others[0].fits == "surely":
    best = others[0]
    notes.append(f"None of the {len(done)} compiled layouts fits; the winner was not compiled.")
  return [*done, *others], best, tuple(notes)


def _checked(inputs: SearchInputs, done: list[Candidate], notes: list[str]) -> Candidate | None:
  """The first candidate that the machine's own compiler accepts; those that it compiles are replaced."""
  for n, candidate in enumerate(done):
    if candidate.refused:
      continue
    done[n] = compile_candidate(inputs, candidate, inputs.machine.text)
    report = done[n].report
    if report is not None and not done[n].refused:
      notes.append(
        f"The winner was compiled for {inputs.machine.text}: it fits, {results_text(report.results)}."
      )
      return done[n]
  return None


def _order(candidate: Candidate) -> tuple[bool, float]:
  return bool(candidate.refused), candidate.compiled.seconds if candidate.compiled else math.inf
