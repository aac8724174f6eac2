"""The templates for clusters, run for two nodes with stand-ins for srun, Kubernetes, Ray and gcloud."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import nnx_parallel as nxp
from nnx_parallel.hosts.launch import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRAIN = ["digits", "--mesh", "data=4", "--steps", "3", "--save-every", "2"]

# Starts a command twice, with the variables of two tasks, as `srun` does; and as `gcloud`, with those that
# stand for what a TPU's metadata say.
TWICE = """
import os, subprocess, sys
name, *words = sys.argv
kind = os.path.basename(name)
if kind == "srun":
  command = words[[word.startswith("-") for word in words].index(False):]
  def of(rank):
    # JAX's port follows from the number of the job.
    return {"SLURM_JOB_ID": os.environ["PORT"], "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
            "SLURM_PROCID": rank, "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
else:
  command = ["bash", "-c", next(word for word in words if word.startswith("--command=")).partition("=")[2]]
  def of(rank):
    return {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": os.environ["PORT"]}
tasks = [subprocess.Popen(command, env=os.environ | of(rank)) for rank in "01"]
sys.exit(max([task.wait() for task in tasks]))
"""


@pytest.fixture
def node(tmp_path):
  """The environment of a node: two simulated devices, and our programs first on the path."""
  programs = tmp_path / "bin"
  programs.mkdir()
  for name in ("srun", "gcloud"):
    (programs / name).write_text(f"#!{sys.executable}\n{TWICE}")
  (programs / "nnx-parallel").write_text(f'#!/bin/sh\nexec {sys.executable} -m nnx_parallel "$@"\n')
  for file in programs.iterdir():
    file.chmod(0o755)
  flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
  added = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
  return os.environ | added | {"XLA_FLAGS": flags, "JAX_NUM_CPU_DEVICES": "2", "PORT": str(free_port())}


def check(tmp_path, done):
  assert done.returncode == 0, done.stdout
  assert "digits, " in done.stdout
  records = nxp.loop.read_metrics(tmp_path / "out/metrics.jsonl")
  assert sum("loss" in record for record in records) == 3
  assert nxp.Checkpointer(tmp_path / "run").steps()


OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def run(command, tmp_path, environment):
  words = [*TRAIN, "--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
  return subprocess.run([*command, *words], env=environment, cwd=tmp_path, timeout=200, **OUTPUT)


@pytest.mark.slow
def test_slurm(tmp_path, node):
  file = EXAMPLES / "slurm.sh"
  asked = [line.split(maxsplit=1)[1] for line in file.read_text().splitlines() if line.startswith("#SBATCH ")]
  assert {"--ntasks-per-node=1", "--signal=TERM@300"} < set(asked)
  check(tmp_path, run(["bash", str(file)], tmp_path, node))


@pytest.mark.parametrize(("code", "queued"), [(75, "requeue 7"), (1, ""), (0, "")])
def test_slurm_queues_a_job_again_that_was_asked_to_stop(tmp_path, node, code, queued):
  for name, body in {"srun": f"exit {code}", "scontrol": 'echo "$@"'}.items():
    (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / "bin" / name).chmod(0o755)
  done = run(["bash", str(EXAMPLES / "slurm.sh")], tmp_path, node | {"SLURM_JOB_ID": "7"})
  assert (done.returncode, done.stdout.strip()) == (code, queued)


def test_the_guide_shows_the_templates():
  guide = (ROOT / "guides/44-many-processes.md").read_text()
  for file in ("slurm.sh", "kubernetes.yaml", "ray_actors.py", "cloud_tpu.sh"):
    assert f"](../examples/{file})" in guide


RAY = """
import concurrent.futures
pool = concurrent.futures.ThreadPoolExecutor()
class Method:
  def __init__(self, function): self.function = function
  def remote(self, *args): return pool.submit(self.function, *args)
class Actor:
  def __init__(self, made): self.made = made
  def __getattr__(self, name): return Method(getattr(self.made, name))
class Remote:
  def __init__(self, kind): self.kind = kind
  def options(self, num_cpus, num_gpus, scheduling_strategy): return self
  def remote(self): return Actor(self.kind())
remote = Remote
def init(): pass
def get(x): return [y.result() for y in x] if isinstance(x, list) else x.result()
"""


RAY_UTIL = 'def get_node_ip_address(): return "127.0.0.1"\n'
RAY_GROUP = """
import concurrent.futures
class Group:
  def ready(self):
    done = concurrent.futures.Future()
    done.set_result(None)
    return done
def placement_group(bundles, strategy):
  assert strategy == "STRICT_SPREAD" and len(bundles) == 2 and all(set(b) == {"CPU", "GPU"} for b in bundles)
  return Group()
"""


RAY_STRATEGY = "def PlacementGroupSchedulingStrategy(group, placement_group_bundle_index): pass\n"


@pytest.mark.nightly
@pytest.mark.slow
def test_cloud_tpu(tmp_path, node):
  variables = {"TPU": "slice", "ZONE": "here"}
  check(tmp_path, run(["bash", str(EXAMPLES / "cloud_tpu.sh")], tmp_path, node | variables))
  wrong = run(["bash", str(EXAMPLES / "cloud_tpu.sh")], tmp_path, node)
  assert "the name of the slice" in wrong.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_ray(tmp_path, node):
  package = tmp_path / "ray"
  (package / "util").mkdir(parents=True)
  (package / "__init__.py").write_text(RAY + "from ray import util\n")
  (package / "util/__init__.py").write_text(RAY_UTIL)
  (package / "util/placement_group.py").write_text(RAY_GROUP)
  (package / "util/scheduling_strategies.py").write_text(RAY_STRATEGY)
  command = [sys.executable, str(EXAMPLES / "ray_actors.py"), "--nodes", "2", "--"]
  check(tmp_path, run(command, tmp_path, node))


@pytest.mark.nightly
@pytest.mark.slow
def test_kubernetes(tmp_path, node):
  job_set = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
  assert (job_set["kind"], job_set["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
  (workers,) = job_set["spec"]["replicatedJobs"]
  job = workers["template"]["spec"]
  pod = job["template"]["spec"]
  (container,) = pod["containers"]
  variables = {item["name"]: item.get("value") for item in container["env"]}
  count = int(variables["WORLD_SIZE"])
  assert job["completionMode"] == "Indexed"
  assert count == job["completions"] == job["parallelism"] == 2
  assert variables["MASTER_ADDR"] == f"{job_set['metadata']['name']}-{workers['name']}-0-0.train"
  assert job_set["spec"]["network"]["enableDNSHostnames"]
  index = next(item for item in container["env"] if item["name"] == "RANK")["valueFrom"]["fieldRef"]
  assert index["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
  grace = int(container["command"][container["command"].index("--grace") + 1])
  assert grace < pod["terminationGracePeriodSeconds"]
  assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
  named = [word for word in container["args"] if word.startswith("--")]
  assert named == ["--mesh", "--checkpoint", "--save-every", "--resume"]
  words = [*TRAIN, "--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--resume"]
  given = node | variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": node["PORT"]}
  start = lambda rank: subprocess.Popen(command, env=given | {"RANK": str(rank)}, cwd=tmp_path, **OUTPUT)
  command = [*container["command"], *words]
  pods = [start(rank) for rank in range(count)]
  outputs = [pod.communicate(timeout=200)[0] for pod in pods]
  first = subprocess.CompletedProcess(pods[0].args, max(pod.returncode for pod in pods), "\n".join(outputs))
  check(tmp_path, first)
