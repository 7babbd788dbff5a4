"""A training program of the standard library, and what such programs do wrong when they resume."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path

NUM_EPOCHS = 6
PAUSE_S = 0.2  # of an epoch

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--resume", type=Path)
parser.add_argument("--wrong", default="nothing")
options = parser.parse_args()

if options.wrong != "seed":
    random.seed(0)
order = list(range(100))
state = {"epoch": 0, "weight": 0.0, "average": 0.0, "rate": 1.0, "generator": None}
if options.resume is not None:
    if options.wrong == "fails":
        raise SystemExit("no such checkpoint")
    state = json.loads(options.resume.read_text())
    version, words, gauss = state["generator"]
    if options.wrong != "loader":
        random.setstate((version, tuple(words), gauss))
    if options.wrong == "average":
        state["average"] = 0.0
    if options.wrong == "schedule":
        state["rate"] = 1.0
first = state["epoch"]
counted = Path(os.environ["COUNTED"])

for epoch in range(first, NUM_EPOCHS):
    time.sleep(PAUSE_S)
    if options.wrong == "interrupt" and epoch == 2:
        os.kill(int(os.environ["INTERRUPTED"]), signal.SIGINT)
        time.sleep(600)
    for sample in random.sample(order, 10):
        state["weight"] += state["rate"] * (sample - state["weight"]) / 10
    state["average"] = 0.9 * state["average"] + 0.1 * state["weight"]
    state["rate"] *= 0.9
    state["epoch"] = epoch + 1
    if options.wrong == "counter" and first:
        state["epoch"] = epoch + 1 - first  # from the resume: right once it is done, or never
        if epoch + 1 == NUM_EPOCHS:
            state["epoch"] = NUM_EPOCHS
    state["generator"] = random.getstate()
    saved = options.out / "last.json"
    saved.with_suffix(".part").write_text(json.dumps(state))
    os.replace(saved.with_suffix(".part"), saved)
    # However busy the machine is, its watcher counts each save, and kills before the next one.
    while int(counted.read_text()) < epoch + 1 - first:
        time.sleep(0.02)
