#!/bin/sh
# SFT, then DPO from it with remembered reference answers, then a look at what was learnt.
#   sft-then-dpo.sh DATA OUT [PRESET] [PROCESSES]
# DATA holds helpful-train.jsonl and helpful-test.jsonl ({"chosen", "rejected"} dialogs); OUT is made.
set -eu
data=$(cd "$1" && pwd) here=$(cd "$(dirname "$0")" && pwd) preset=${3:-zero2} processes=${4:-2}
mkdir -p "$2" && cd "$2"
on="--set data.train=$data/helpful-train.jsonl --set data.eval=$data/helpful-test.jsonl --ds-config $preset --num-gpus $processes"

# shellcheck disable=SC2086  # $on is a list of words
{
    dstrain train "$here/hh-sft.yaml" $on --run-dir sft
    dstrain export sft --step last --to hh-sft-model
    dstrain prepare "$here/hh-dpo.yaml" $on
    dstrain train "$here/hh-dpo.yaml" $on --run-dir dpo
}
dstrain evaluate dpo --step last --data "$data/helpful-test.jsonl"
dstrain export dpo --step last --to hh-dpo-model
dstrain evaluate hh-dpo-model --data "$data/helpful-test.jsonl" # its recipe names hh-sft-model as the reference
prompt=$(printf '\n\nHuman: How do I bake bread?\n\nAssistant:') # as the dialogs it learnt from are written
dstrain generate hh-dpo-model --prompt "$prompt" --max-new-tokens 40
