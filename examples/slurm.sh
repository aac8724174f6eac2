#!/bin/bash
# Slurm: one process on each node, with all of its GPUs.
#
#   sbatch slurm.sh text_lm --mesh data=16 --checkpoint /shared/run --save-every 100 --resume
#
# After `slurm.sh`, pass a recipe with the arguments of `nnx-parallel train`, or a script with its own arguments.
# The checkpoints must be on a disk that all nodes can reach.
#SBATCH --job-name=nnx-parallel
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

# --signal sends SIGTERM 5 minutes before the time limit, and the step in progress is then saved. A process that
# fails is started again from the last complete checkpoint.
code=0
srun --label nnx-parallel launch --cluster --restarts 3 --hang-after 600 --grace 240 -- "$@" || code=$?
# Exit code 75: the job was asked to stop, and has saved its state. It continues from there when it runs again.
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
