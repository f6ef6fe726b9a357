#!/bin/sh
# Rounds of DPO on the policy's own answers: a reward model scores four answers to each prompt, and the best and the worst
# of them are the next pairs. After each round the mean reward of new answers to held-out prompts is printed.
#   iterative-dpo.sh DATA OUT [ROUNDS] [PROCESSES]
# DATA holds helpful-train.jsonl and helpful-test.jsonl ({"chosen", "rejected"} dialogs); OUT is made.
set -eu
data=$(cd "$1" && pwd) here=$(cd "$(dirname "$0")" && pwd) rounds=${3:-3} processes=${4:-2}
mkdir -p "$2" && cd "$2"
on="--set data.train=$data/helpful-train.jsonl --set data.eval=$data/helpful-test.jsonl --num-gpus $processes"
sampling="--num-samples 4 --temperature 1 --max-new-tokens 48 --batch 32 --json"

held_out_reward() { # MODEL
    # shellcheck disable=SC2086  # $sampling is a list of words
    dstrain generate "$1" --data held-out.jsonl $sampling --seed 100 --num-gpus "$processes" > held-out-answers.jsonl
    dstrain score rm --data held-out-answers.jsonl --out held-out-scored.jsonl --num-gpus "$processes"
}

head -n 100 "$data/helpful-test.jsonl" > held-out.jsonl
# shellcheck disable=SC2086  # $on is a list of words
{
    dstrain train "$here/hh-sft.yaml" $on --run-dir sft
    dstrain export sft --step last --to hh-sft-model
    dstrain train "$here/hh-rm.yaml" $on --run-dir rm
}
held_out_reward hh-sft-model
policy=hh-sft-model round=1
while [ "$round" -le "$rounds" ]; do
    # Other prompts in each round.
    sed -n "$((round * 200 - 199)),$((round * 200))p" "$data/helpful-train.jsonl" > "prompts-$round.jsonl"
    # shellcheck disable=SC2086
    dstrain generate "$policy" --data "prompts-$round.jsonl" $sampling --seed "$round" --num-gpus "$processes" \
        > "answers-$round.jsonl"
    dstrain score rm --data "answers-$round.jsonl" --out "scored-$round.jsonl" --num-gpus "$processes"
    dstrain pairs "scored-$round.jsonl" --to "pairs-$round.jsonl"
    dstrain train "$here/hh-dpo.yaml" --set data.train="pairs-$round.jsonl" --set data.eval=null --set data.eval_fraction=0.1 \
        --set model.path="$policy" --set options.beta=0.1 --set epochs=2 --num-gpus "$processes" --run-dir "dpo-$round"
    dstrain export "dpo-$round" --step last --to "policy-$round"
    policy=policy-$round round=$((round + 1))
    held_out_reward "$policy"
done
