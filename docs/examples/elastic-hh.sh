#!/bin/sh
# A run of 60 steps that is killed after step 20 with 2 processes at zero3, goes on with 1 at zero2_offload, is killed
# after step 40, and goes on with 3 at zero1; beside it the same run unbroken. Ends with both losses, step by step.
#   elastic-hh.sh DATA OUT [KEY=VALUE]...
# DATA holds helpful-train.jsonl ({"chosen", "rejected"} dialogs); OUT is made; settings are for both runs.
set -eu
data=$(cd "$1" && pwd) here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$2" && cd "$2"
shift 2
more="--set data.train=$data/helpful-train.jsonl"
for setting; do more="$more --set $setting"; done

train() { # RUN PROCESSES PRESET
    # shellcheck disable=SC2086  # $more is a list of words
    dstrain train "$here/elastic-hh.yaml" $more --run-dir "$1" --num-gpus "$2" --ds-config "$3"
}

train_and_kill() { # STEP PROCESSES PRESET: with SIGKILL as soon as the checkpoint of this step is there
    train elastic "$2" "$3" &
    shell=$!
    until [ -f "elastic/checkpoints/step-000000$1/MANIFEST.json" ]; do
        kill -0 "$shell" || exit 1
        sleep 0.05
    done
    kill -KILL "$(pgrep -P "$shell")" || true # dstrain; its workers end with it
    wait "$shell" || true
}

train unbroken 2 zero3
train_and_kill 20 2 zero3
train_and_kill 40 1 zero2_offload
train elastic 3 zero1
python3 - <<'PYTHON'
import json


def train_rows(run):
    rows = map(json.loads, open(f"{run}/metrics.jsonl"))
    return [row for row in rows if row["split"] == "train"]


pairs = list(zip(train_rows("unbroken"), train_rows("elastic"), strict=True))
assert all((a["step"], a["samples"], a["lr"]) == (b["step"], b["samples"], b["lr"]) for a, b in pairs)
print("| step | loss, unbroken | loss, elastic | difference |\n|---|---|---|---|")
for a, b in pairs:
    if a["step"] in (1, 10, 19, 20, 21, 22, 30, 39, 40, 41, 42, 50, 60):
        print(f"| {a['step']} | {a['loss']:.7f} | {b['loss']:.7f} | {b['loss'] - a['loss']:+.1e} |")
worst = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)
print(f"\n{len(pairs)} steps, largest relative difference {worst:.1e}")
PYTHON
