#!/usr/bin/env bash
# One row on GKE, over one or more slices, as a JobSet that xpk makes (pip install xpk; a cluster made by xpk).
# Once, since lm writes to folders only:
#   xpk storage attach lm --type=gcsfuse --cluster=mine --bucket=BUCKET --size=1 --mount-point=/bucket \
#     --readonly=false --auto-mount=true --mount-options=implicit-dirs,rename-dir-limit=1000000
# Then:
#   CLUSTER=mine RUNS=/bucket/runs launch/xpk.sh NAME [lm arguments]
#   TPU_TYPE=tpu7x-4x4x4 SLICES=2 XPK_OPTIONS='--spot --zone us-east5-b' ...;  XPK_OPTIONS=--dry-run only shows
set -euo pipefail
name=${1:?"usage: CLUSTER=... RUNS=/bucket/runs launch/xpk.sh NAME [lm arguments]"}
shift
lm=(lm run "$name" ${SCALE:+--scale "$SCALE"} --runs "${RUNS:?a folder in the mounted bucket}" "$@")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# xpk lays this folder over the image. It starts a workload again when that ends with 42, lm's "start again", without
# asking us. A pod that is told to go has time to save: exec, so that the signal reaches lm.
# shellcheck disable=SC2086
exec xpk workload create \
  --workload "lm-$(tr -cs 'a-z0-9' '-' <<< "${name,,}" | head -c 25 | sed 's/-*$//')" \
  --cluster "${CLUSTER:?the name of a cluster}" \
  --tpu-type "${TPU_TYPE:-v5litepod-16}" \
  --num-slices "${SLICES:-1}" \
  --base-docker-image "${IMAGE:-python:3.11}" \
  --script-dir . \
  --max-restarts "${RESTARTS:-100}" \
  --termination-grace-period-seconds 120 \
  --command "pip install --quiet --constraint constraints.txt --editable '.[tpu]' && exec env LM_COORDINATOR=auto ${lm[*]@Q}" \
  ${XPK_OPTIONS:-}
