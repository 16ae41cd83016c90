#!/usr/bin/env bash
# What runs on each host of a slice, beside the folder `studies`.
#   worker.sh setup IMAGE BUCKET...                  install what is missing, pull IMAGE, mount /gs/BUCKET
#   worker.sh start ATTEMPT OPTION... IMAGE WORD...  docker run; show its output; exit as the container does
# A container outlives the connection: `start` with the same ATTEMPT goes on watching. A new ATTEMPT first ends what an
# earlier one left.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

setup() {
  local image=$1
  shift
  printf '%s\n' "$@" > "$here/buckets"
  command -v docker > /dev/null || install docker.io || return 1
  command -v gcsfuse > /dev/null || add_gcsfuse || return 1
  case ${image%%/*} in # whose images are pulled as the machine's service account
    *.pkg.dev | gcr.io | *.gcr.io) sudo gcloud auth configure-docker --quiet "${image%%/*}" ;;
  esac
  mount_buckets && sudo docker pull --quiet "$image"
}

install() {
  sudo apt-get update --quiet && sudo apt-get install --quiet --yes "$1" \
    || { echo "$1 is needed on the machines, and could not be installed" >&2; return 1; }
}

add_gcsfuse() { # cloud.google.com/storage/docs/cloud-storage-fuse/install
  local apt=https://packages.cloud.google.com/apt key=/usr/share/keyrings/cloud.google.asc
  curl --silent --show-error --fail $apt/doc/apt-key.gpg | sudo tee $key > /dev/null \
    && echo "deb [signed-by=$key] $apt gcsfuse-$(lsb_release -cs) main" \
    | sudo tee /etc/apt/sources.list.d/gcsfuse.list > /dev/null
  install gcsfuse
}

mount_buckets() { # again after a reboot; a checkpoint is renamed when it is whole, data are read from a copy on disk
  local bucket folder cache=/var/cache/lm-gcsfuse
  while read -r bucket <&3; do # 3: what is called here may read its input
    folder=${LM_GS:-/gs}/$bucket
    [ -n "$bucket" ] && ! mountpoint -q "$folder" || continue
    sudo mkdir -p "$folder" $cache
    sudo gcsfuse --implicit-dirs --rename-dir-limit=1000000 --file-cache-max-size-mb=-1 --cache-dir=$cache \
      "$bucket" "$folder" || return 1
  done 3< "$here/buckets"
}

clean() { # ends what earlier attempts left; SIGTERM first, on which the run saves
  local left
  left=$(sudo docker ps --all --quiet --filter label=lm-launch)
  # shellcheck disable=SC2086
  [ -z "$left" ] || { sudo docker stop --time 120 $left; sudo docker rm --force $left; } > /dev/null
}

start() {
  local name=lm-$1
  shift
  if ! sudo docker inspect "$name" > /dev/null 2>&1; then
    clean
    mount_buckets || exit 1 # perhaps not so the next time
    sudo docker run --detach --name "$name" --label lm-launch --init --privileged --network=host \
      --ulimit memlock=-1:-1 --shm-size=16g --volume "${LM_GS:-/gs}:/gs" --volume "$here/studies:/studies" "$@" \
      > /dev/null || exit 1
  fi
  sudo docker logs --follow "$name" 2>&1 | sed -u "s/^/[${HOSTNAME#*-n-}] /"
  exit "$(sudo docker wait "$name" 2> /dev/null || echo 1)"
}

"$@"
