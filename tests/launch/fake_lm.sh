#!/bin/bash
# Stands for lm: a run does what LM_DOES says, and is written down.
echo "$LM_PROCESS/$LM_PROCESSES" "$JAX_PLATFORMS" "$@" >> "$0.calls"
eval "$LM_DOES"
