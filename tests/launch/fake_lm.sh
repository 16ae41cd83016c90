#!/bin/bash
# Stands for lm: knows the rows that end in a and b; a run does what LM_DOES says, and is written down.
case "$1 $2" in
  "list t5/typo") echo "lm: there is no row 't5/typo'; did you mean t5/a?" >&2; exit 2 ;;
  "list "*) printf '%s\n' "${2/\*/a}" "${2/\*/b}" ;;
  *) echo "$LM_PROCESS/$LM_PROCESSES" "$JAX_PLATFORMS" "$@" >> "$0.calls"; eval "$LM_DOES" ;;
esac
