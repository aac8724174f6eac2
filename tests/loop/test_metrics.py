"""The metrics file holds each step once, whatever happened to the run; the picture is a picture."""

import json
import math

import pytest

from nnx_parallel.errors import TrainError
from nnx_parallel.loop.metrics import MetricsLog, read_metrics
from nnx_parallel.loop.progress import StepClock


@pytest.fixture
def path(tmp_path):
  with MetricsLog(tmp_path / "deep" / "metrics.jsonl") as log:
    for step in range(1, 6):
      log.write(step, {"loss": 6.0 / step, "seconds": 0.5})
  return log.path


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(path):
  with path.open("a") as file:
    file.write('{"step": 6, "lo')  # killed in the middle of a line
  with MetricsLog(path, after=3) as log:
    log.write(4, {"loss": 0.25})
  assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 6.0), (2, 3.0), (3, 2.0), (4, 0.25)]


def test_the_history_is_in_the_file_before_the_first_step_of_a_resumed_run(path):
  log = MetricsLog(path, after=3)  # a kill comes now, during the compilation
  assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
  log.close()


def test_a_new_run_starts_a_new_file_and_keeps_the_earlier_one(path):
  for number, loss in ((1, 9.0), (2, 8.0)):
    with MetricsLog(path) as log:
      log.write(1, {"loss": loss})
    assert log.earlier == path.with_name(f"metrics-{number}.jsonl")
  assert read_metrics(path) == [{"step": 1, "loss": 8.0}]
  assert [len(read_metrics(path.with_name(f"metrics-{number}.jsonl"))) for number in (1, 2)] == [5, 1]


def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path):
  with MetricsLog(tmp_path / "m.jsonl") as log:
    log.write(1, {"loss": math.inf})
  assert json.loads(log.path.read_text()) == {"step": 1, "loss": None}
  assert math.isnan(read_metrics(log.path)[0]["loss"])


@pytest.mark.parametrize(
  "line", ["not json", "[1, 2]", '{"loss": 1.0}', '{"step": "one"}', '{"step": null}', "\udcff"]
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, line):
  path, text = tmp_path / "other.jsonl", f'{{"step": 1}}\n{line}\n'.encode(errors="surrogateescape")
  path.write_bytes(text)
  with pytest.raises(TrainError, match=r"other\.jsonl is not a metrics file: line 2"):
    MetricsLog(path, after=1)
  assert path.read_bytes() == text


def test_a_step_that_compiles_is_kept_out_of_the_mean(monkeypatch):
  now = iter([0.0, 10.0, 10.5, 11.5, 100.0, 101.5])
  monkeypatch.setattr("time.perf_counter", lambda: next(now))
  clock = StepClock()
  clock.start()
  assert clock.tick(100, compiled=True) == {"seconds": 10.0}
  assert clock.tick(100) == {"seconds": 0.5, "tokens_per_second": 200.0}
  assert clock.tick(200) == {"seconds": 1.0, "tokens_per_second": 200.0}
  clock.start()  # a checkpoint was saved in between: not the steps' time
  assert clock.tick(300) == {"seconds": 1.5, "tokens_per_second": 200.0}
  assert clock.step_seconds == 1.0
