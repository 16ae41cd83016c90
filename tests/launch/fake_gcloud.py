#!python
"""Stands for gcloud: writes each call's verb down; gives the answers recorded for it, the last again and
again.
"""

import json
import os
import signal
import sys
import time

VERBS = {"accelerator-types": "types", "auth": "auth", "config": "config", "list": "list"}
VERBS |= {verb: verb for verb in ("describe", "create", "scp", "ssh", "delete")}
verb = VERBS[next(word for word in sys.argv[1:] if word in VERBS)]
if any("worker.sh start" in word for word in sys.argv):
    verb = "START"
folder = os.path.dirname(os.path.abspath(__file__))
with open(f"{folder}/calls", "a+") as calls:
    calls.write(f"{verb}\n")
    calls.seek(0)
    number = calls.read().split().count(verb)
with open(f"{folder}/answers") as recorded:
    answers = json.load(recorded).get(verb, [[0, "", ""]])
code, out, err = answers[min(number, len(answers)) - 1]
print(out)
print(err, file=sys.stderr)
if code == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
sys.exit(code)
