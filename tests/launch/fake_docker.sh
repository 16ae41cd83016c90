#!/bin/bash
# Stands for docker: a container is a session that runs the words behind the image "bash"; the rest is ignored.
folder="$0.containers"
mkdir -p "$folder"
verb=$1
shift
case $verb in
  run)
    while [ "$1" != bash ]; do
      [ "$1" = --name ] && name=$2
      [[ $1 == --env=* ]] && export "${1#--env=}"
      shift
    done
    mkdir "$folder/$name"
    setsid bash -c '"$@"; echo $? > "$0/code"' "$folder/$name" "$@" > "$folder/$name/log" 2>&1 < /dev/null &
    echo $! > "$folder/$name/pid" ;;
  inspect) [ -e "$folder/$1" ] ;;
  ps) ls "$folder" ;;
  logs) tail -n +1 -f --pid="$(cat "$folder/$2/pid")" "$folder/$2/log" ;;
  wait) while kill -0 "$(cat "$folder/$1/pid")" 2> /dev/null; do sleep 0.02; done; cat "$folder/$1/code" ;;
  stop)
    for name in "${@:3}"; do
      pid=$(cat "$folder/$name/pid") && [ -n "$pid" ] || continue # it is not up yet
      pkill -TERM -P "$pid"
      while kill -0 "$pid" 2> /dev/null; do sleep 0.02; done
    done ;;
  rm) for name in "${@:2}"; do rm -r "${folder:?}/$name"; done ;;
  *) echo "$verb" "$@" >> "$0.calls" ;;
esac
