#!/usr/bin/env bash
# What runs on each worker of a slice.
#   worker.sh setup BUCKET...            install the project, which lies beside this file's folder; mount ~/gs/BUCKET
#   worker.sh start ATTEMPT COMMAND...   run COMMAND and show its output; exits as it does
# The run is a session of its own: a lost connection does not end it, and `start` with the same ATTEMPT, as gcloud
# repeats it when ssh fails, goes on watching. A new ATTEMPT first ends what an earlier one left.
set -uo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state="${TMPDIR:-/tmp}/lm-launch-$(id -u)" # gone after a reboot, as the processes are

setup() {
  set -e
  cd "$project"
  export PATH="$HOME/.local/bin:$PATH"
  command -v uv > /dev/null || python3 -m pip install --quiet --user uv \
    || python3 -m pip install --quiet --user --break-system-packages uv
  # The images come with Python 3.10; uv brings a newer one.
  [ -x .venv/bin/python ] || uv venv --quiet --python "${LM_PYTHON:-3.11}" .venv
  VIRTUAL_ENV=.venv uv pip install --quiet --constraint constraints.txt --editable '.[tpu]'
  printf '%s\n' "$@" > buckets
  mount
}

mount() { # again after a reboot; a checkpoint is renamed when it is whole, and data are read from a copy on this disk
  local bucket
  while read -r bucket <&3; do # 3: what is called here may read its input
    [ -n "$bucket" ] && ! mountpoint -q ~/gs/"$bucket" || continue
    command -v gcsfuse > /dev/null || sudo apt-get install --quiet --yes gcsfuse \
      || { echo "gcsfuse is needed to mount gs://$bucket: name an image that has it with --runtime" >&2; return 1; }
    mkdir -p ~/gs/"$bucket" "${TMPDIR:-/tmp}/gcsfuse"
    gcsfuse --implicit-dirs --rename-dir-limit=1000000 --file-cache-max-size-mb=-1 \
      --cache-dir="${TMPDIR:-/tmp}/gcsfuse" "$bucket" ~/gs/"$bucket" || return 1
  done 3< "$project/buckets"
}

clean() { # ends what earlier attempts left; SIGTERM first, on which the run saves
  local pid file
  for file in "$state"/*/pid; do
    pid=$(cat "$file" 2> /dev/null) && pgrep -s "$pid" > /dev/null || continue
    pkill -TERM -P "$pid"
    for _ in $(seq "${LM_GRACE:-60}"); do kill -0 "$pid" 2> /dev/null && sleep 1; done
    pkill -KILL -s "$pid" # the session: lm's trainer has a group of its own
  done
  rm -rf "$state"
  # libtpu leaves its lock when it is killed, and then refuses to start.
  if [ -O /tmp/libtpu_lockfile ]; then rm -f /tmp/libtpu_lockfile; fi
}

start() {
  local here="$state/$1"
  shift
  if [ ! -e "$here/pid" ]; then
    clean
    [ ! -e "$project/buckets" ] || mount || exit 1 # perhaps not so the next time
    mkdir -p "$here"
    export PATH="$project/.venv/bin:$PATH"
    # shellcheck disable=SC2016
    setsid bash -c 'echo $$ > "$0/pid"; "$@"; echo $? > "$0/code"' "$here" "$@" > "$here/log" 2>&1 < /dev/null &
    until [ -s "$here/pid" ]; do sleep 0.05; done
  fi
  tail -n +1 -f --pid="$(cat "$here/pid")" "$here/log" | sed -u "s/^/[${HOSTNAME#*-n-}] /"
  exit "$(cat "$here/code" 2> /dev/null || echo 1)"
}

"$@"
