"""Writes `benchmarks/README.md`: the figures that people look for, read from the records.

    python -m benchmarks.headlines

Each record in `benchmarks/results` has all figures of one benchmark, its notes, hardware, date and versions.
This page has a few of them, as tables; nothing is measured here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import RESULTS, ROOT, figure_text, ratio_text, table

PAGE = ROOT / "benchmarks" / "README.md"
HAND = "by hand"

HEAD = """# Measured

`python -m benchmarks.headlines` writes this page from the records in `benchmarks/results`. These files have
all figures, with quartiles, and the notes, command, hardware, date and versions of each measurement. One GPU
was timed (the first table). All other machines were virtual, with two CPU cores and simulated devices.
Programs for TPUs and several GPUs were compiled by the compilers of these devices and did not run. A ratio
compares two cases that ran alternately in one process. This page shows medians, with three significant
digits."""


class Row(NamedTuple):
  """A row of a table: what it is, and a figure for each column."""

  name: str
  figures: tuple[str, ...]


class Headline(NamedTuple):
  """A table, with what it shows and the record that it is from."""

  title: str
  text: str
  record: str
  columns: tuple[str, ...]
  rows: Callable[[], Sequence[Row]]


@functools.cache
def record(name: str) -> Mapping[str, Any]:
  """A record, as JSON."""
  return json.loads((RESULTS / f"{name}.json").read_text())


def figure(name: str, group: str, case: str) -> str:
  """One figure of a record: a value, a ratio, or the time of a baseline."""
  found = [row for row in record(name)["rows"] if (row["group"], row["case"]) == (group, case)]
  if not found:
    raise KeyError(f"{name}: no row {group!r}, {case!r}")
  return figure_text(found[0]) if "value" in found[0] else ratio_text(found[0]).split(" (")[0]


def rows_of(name: str, groups: Mapping[str, str], cases: Sequence[str]) -> list[Row]:
  """A row for each group of a record, with the same cases; `groups` maps the text of a row to its group."""
  return [Row(text, tuple(figure(name, group, case) for case in cases)) for text, group in groups.items()]


def accelerator() -> list[Row]:
  """Times on one GPU."""
  groups = {
    "as written": "step, as written",
    "fused attention": "step, attention='fused'",
    "fused attention, loss in 8 chunks": "step, attention='fused', loss_chunks=8",
    "fused attention, 2 microbatches": "step, attention='fused', 2 microbatches",
    "fused attention, rematerialized and scanned": "step, attention='fused', remat='full', scan_layers",
    "fused attention, Adam moments in host memory": "step, attention='fused', moments in host memory",
  }
  cases = (HAND, "nxp.train_step", "nxp.train_step: MFU", "memory, report", "memory, measured")
  return rows_of("one_gpu", groups, cases)


def steps() -> list[Row]:
  """Host time of one step."""
  name, flat = "step_host", "jax.jit, flat list"
  ours = ("by hand, live", "nxp.train_step")
  flax = ("nnx.jit_partial", "nnx.cached_partial", "nnx.jit")
  groups = [f"{n} Variables, {on}" for on in ("1 device", "8 devices") for n in (100, 1000)]
  return [
    Row(
      group,
      (
        figure(name, group, flat),
        *(figure(name, group, case) for case in ours),
        *(figure(name, f"{group}: flax", case) for case in flax),
      ),
    )
    for group in groups
  ]


def whole_steps() -> list[Row]:
  """Time of whole steps."""
  groups = [f"4-layer transformer, {layout}" for layout in ("dp", "ZeRO-1", "fsdp", "tp", "fsdp x tp")]
  cases = ("by hand", "nxp.train_step")
  return rows_of("step_whole", {group: group for group in groups}, cases)


def creation() -> list[Row]:
  """Time until a model's arrays are there."""
  cases = ("nnx.jit constructor", "jax.jit, out_shardings", "create_sharded_model",
           "create_sharded_model, second start")  # fmt: skip
  groups = ("auto axes, 4 blocks", "auto axes, 12 blocks", "auto axes, 24 blocks")
  return rows_of("creation", {group: group for group in groups}, cases)


def decoder() -> list[Row]:
  """Memory and bytes of an 8B decoder."""
  where = "tpu:v5e:4x4, fsdp 16, depth 32, "
  cases = {
    "written by hand for this machine": "by hand",
    "plain, unchanged": "plain",
    "plain, blockwise attention": "plain, blocks",
    "plain, blockwise attention, chunked loss": "plain, blocks and parts",
  }
  figures = ("need per device", "temporaries", "sent", "matrix FLOPs per device")
  rows = rows_of("plain_8b", {name: where + case for name, case in cases.items()}, figures)
  maxtext = "tpu:v5e:4x4, fsdp 16, MaxText defaults"
  return [
    *rows,
    Row("MaxText, defaults", (figure("report_8b", maxtext, "need per device, fits"), "", "", "")),
  ]


def large() -> list[Row]:
  """Memory and bytes of models of 70B and more."""
  cases = {
    "decoder of 70B, MaxText's own": "decoder of MaxText, fsdp 256, no option",
    "decoder of 70B, MaxText's own, SparseCores": "decoder of MaxText, fsdp 256, SparseCore",
    "decoder of 70B, written by hand": "decoder by hand, fsdp 256, no option",
    "decoder of 70B, unedited": "decoder, fsdp 256, no option",
    "decoder of 70B, unedited, SparseCores": "decoder, fsdp 256, SparseCore",
    "mixture of 141B, MaxText's own": "mixture of 8 of MaxText, fsdp 32 x expert 8, no option",
    "mixture of 141B, MaxText's own, SparseCores": "mixture of 8 of MaxText, fsdp 32 x expert 8, SparseCore",
    "mixture of 141B": "mixture of 8, fsdp 32 x expert 8, no option",
    "mixture of 141B, SparseCores": "mixture of 8, fsdp 32 x expert 8, SparseCore",
    "mixture of 107B": "mixture, fsdp 32 x expert 8, no option",
    "mixture of 107B, SparseCores": "mixture, fsdp 32 x expert 8, SparseCore",
  }
  return rows_of("large", cases, ("need per device", "sent", "exposed"))


def checkpoints() -> list[Row]:
  """Times of saves and restores."""
  rows = {
    "save": ("write", "raw write"),
    "background save": ("wait for a background save", "copy to the host"),
    "restore, same mesh": ("read", "raw read"),
    "restore, columns, 8 devices": ("read", "raw read"),
    "import of safetensors": ("read", "raw read"),
  }
  return [
    Row(
      name,
      (
        baseline,
        *(figure("checkpoint", group, case) for case in (baseline, f"{name}, Orbax", f"{name}, ours")),
        figure("checkpoint", group, "save, Orbax as it comes") if name == "save" else "",
      ),
    )
    for name, (group, baseline) in rows.items()
  ]


def pipelines() -> list[Row]:
  """Time and memory of a pipeline, by the number of its stages."""
  names = ("no pipeline", "2 stages", "4 stages", "8 stages")
  cases = ("", ": arguments of a device", ": temporaries of a device", ": bubble")
  return [
    Row(name, tuple(figure("pipeline", "", name + case) if (name, case) != (names[0], cases[3]) else ""
                    for case in cases))
    for name in names
  ]  # fmt: skip


def experts() -> list[Row]:
  """Time and memory of experts over a mesh axis."""
  cases = (
    "dense",
    "capacity",
    "dropless",
    *(f"{kind}: temporaries of a device" for kind in ("dense", "dropless")),
  )
  groups = [f"{n} experts" for n in (4, 8, 16, 32)]
  return rows_of("experts", {group: group for group in groups}, cases)


def searches() -> list[Row]:
  """How often something was wrong."""
  fuzz, seams, torture, soak = (
    {(r["group"], r["case"]): r["value"] for r in record(n)["rows"]} for n in SEARCHES
  )

  def total(group: str, *cases: str) -> str:
    return str(sum(n for (g, case), n in torture.items() if g == group and (not cases or case in cases)))

  way = "jax 0.12.0.1, Shardy, Auto"
  return [
    Row(
      f"random models and layouts, with a {how}",
      (str(fuzz[key, "tried"]), str(fuzz.get((key, "wrong"), 0))),
    )
    for how, key in (("plain jax.jit step", f"plain, {way}"), ("step of nxp.train_step", f"toolkit, {way}"))
  ] + [
    Row(
      "combinations of features on random layouts, refused or as on one device",
      (str(seams["", "tried"]), str(seams.get(("", "WRONG"), 0))),
    ),
    Row(
      "runs killed at a random moment, last checkpoint restored",
      (total("kills"), total("kills", "lost or wrong")),
    ),
    Row(
      "checkpoints with damaged or swapped files, restored",
      (total("corruptions"), total("corruptions", "wrong", "unnamed")),
    ),
    Row(
      "kills, bad disks and other troubles of a supervised run",
      (str(soak["troubles", "all"]), str(soak["run", "problems"])),
    ),
  ]


PARITY = "Float32 training on every layout against one device, 100 steps"
SEARCHES = ("fuzz", "seams", "torture", "soak")


HEADLINES = (
  Headline(
    "One H100",
    "The table shows steps of a decoder of 1.04B parameters (2 sequences of 2048 tokens, AdamW, bfloat16"
    " compute). The step by hand is plain JAX with the same attention and rematerialization, but without"
    " chunks, microbatches, a scan or host memory; the second column is the ratio to it. The last two columns"
    " compare the memory that `compile_report` reports with the peak of the allocator of the GPU.",
    "one_gpu",
    ("", "by hand", "nxp.train_step", "MFU", "memory, reported", "memory, measured"),
    accelerator,
  ),
  Headline(
    "What a step adds on the host",
    "The table shows the time until the call of a step returns, for a model of many small Variables. The"
    " first column is the time of `jax.jit` on a flat list of arrays, and the other columns are ratios to"
    " `jax.jit`. The three columns of `nnx` come from a run of their own, with its own baseline. The step"
    " `by hand` also reads and writes live Variables.",
    "step_host",
    ("", "jax.jit", "by hand", "nxp.train_step", "nnx.jit_partial", "nnx.cached_partial", "nnx.jit"),
    steps,
  ),
  Headline(
    "Whole steps",
    "The table shows the time of complete steps with AdamW on 8 simulated devices. The step `by hand`"
    " does not use Flax; it pins the same layouts and donates the same arrays. The last column is the"
    " ratio to it.",
    "step_whole",
    ("", "by hand", "nxp.train_step"),
    whole_steps,
  ),
  Headline(
    "Creating a model in shards",
    "The table shows the time to create a transformer with blocks of width 256 on `fsdp=4, tensor=2`,"
    " compilation included. The last three columns are ratios to `nnx.jit`. A second start finds its"
    " programs in the compilation cache of JAX.",
    "creation",
    ("", "nnx.jit", "jax.jit, out_shardings", "create_sharded_model", "second start"),
    creation,
  ),
  Headline(
    "A decoder of 8B parameters, compiled for 16 TPU v5e",
    "The batch has 16 sequences of 4096 tokens. All programs use AdamW, float32 state, bfloat16 compute"
    " and rematerialized layers. The case `plain` is an unedited decoder with a loop over an `nnx.List`,"
    " whose layers `nxp.train_step` finds. The figure of MaxText is from [another"
    " record](results/report_8b.json).",
    "plain_8b",
    ("", "memory per chip", "temporaries", "sent per chip and step", "matrix FLOPs per chip"),
    decoder,
  ),
  Headline(
    "Models of 70B to 141B parameters, compiled for 256 TPU v5p",
    "Each chip computes one sequence of 4096 tokens, with rematerialized layers. The column `exposed` shows"
    " the bytes that a chip sends while it computes nothing, according to the schedule of the compiler."
    " [A guide](../guides/27-overlap-communication.md) shows the options for the"
    " SparseCores.",
    "large",
    ("", "memory per chip", "sent per chip and step", "exposed"),
    large,
  ),
  Headline(
    "Checkpoints",
    "Each case saves or restores 2 GB of parameters and Adam moments on 8 simulated devices. The baseline"
    " only moves the same bytes, and the last three columns are ratios to its time: Orbax without compression"
    " and without checksums, ours, which has no compression and compares a checksum of each chunk when it"
    " restores, and Orbax with its own defaults, which compress.",
    "checkpoint",
    ("", "baseline", "its time", "Orbax", "nxp.Checkpointer", "Orbax as it comes"),
    checkpoints,
  ),
  Headline(
    "Pipelines",
    "The table shows the step of a stack of layers as a pipeline on 8 simulated devices, against the same"
    " microbatches without one: time (the ratio to no pipeline), memory of a device, and the part of the time"
    " in which a stage waits, by theory.",
    "pipeline",
    ("", "time", "arguments", "temporaries", "bubble"),
    pipelines,
  ),
  Headline(
    "Experts over a mesh axis",
    "The table shows the time of a layer whose experts lie on 8 simulated devices, as a ratio to all experts"
    " on all tokens (`dense`), and temporaries of a device.",
    "experts",
    ("", "dense", "with a capacity", "dropless", "temporaries, dense", "temporaries, dropless"),
    experts,
  ),
  Headline(
    "Searches for what is wrong",
    "A program counts as wrong if its loss or its gradients differ from the results of one device by more"
    " than rounding explains. An hour of random models at an earlier commit (eb9fbd18) found 1 wrong of 1616:"
    " a look-up in a sharded table, which a step computes right since then. The row of plain jax.jit is of"
    " 2026-11-22.",
    "fuzz",
    ("", "tried", "wrong or lost"),
    searches,
  ),
)


def origin(name: str) -> str:
  """When, on what and how a record was measured."""
  made = record(name)
  where = made["environment"]
  return (
    f"[{where['date']}, {where['devices']}, jax {where['jax']}: `{made['command']}`](results/{name}.json)"
  )


def page() -> str:
  """The page."""
  parts = [HEAD]
  for headline in HEADLINES:
    rows = [(row.name, *row.figures) for row in headline.rows()]
    names = SEARCHES if headline.record == "fuzz" else (headline.record,)
    parts += [
      f"## {headline.title}",
      headline.text,
      table(headline.columns, rows),
      "\\\n".join(origin(name) for name in names),
    ]
  titles = {
    path.stem: json.loads(path.read_text()).get("title", PARITY) for path in sorted(RESULTS.glob("*.json"))
  }
  parts += [
    "## All records",
    "\n".join(f"- [{stem}](results/{stem}.json): {t}" for stem, t in titles.items()),
  ]
  return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
  PAGE.write_text(page())
  print(PAGE)
