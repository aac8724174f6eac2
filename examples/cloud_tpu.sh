#!/bin/bash
# Cloud TPU: one process on each host of a slice, with all of its chips.
#
#   TPU=my-slice ZONE=us-central2-b ./cloud_tpu.sh text_lm --mesh data=16 --checkpoint gs://bucket/run --save-every 100
#
# The package must be installed on every host. JAX finds the other processes through the metadata of the TPU.
set -euo pipefail

words=$(printf ' %q' "$@")
gcloud compute tpus tpu-vm ssh "${TPU:?the name of the slice}" --zone="${ZONE:?its zone}" --worker=all \
  --command="nnx-parallel launch --cluster --restarts 3 --hang-after 600 --$words"
