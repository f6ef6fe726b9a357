#!/bin/sh
# From preference pairs to a small model, with tiny models: sft -> rm of two objectives -> rounds of generate, score, pairs
# and dpo -> distillation of the last policy into a model half as large, with judged win rates.
#   reward-chain.sh DATA OUT [ROUNDS] [PROCESSES]
# DATA holds hh-rlhf's helpful-train.jsonl, helpful-test.jsonl, harmless-train.jsonl and harmless-test.jsonl
# ({"chosen", "rejected"} dialogs); OUT is made. A model that is there already is not made again.
# STEPS=2 PROMPTS=8 reward-chain.sh ... tries each command once.
set -eu
data=$(cd "$1" && pwd) here=$(cd "$(dirname "$0")" && pwd) rounds=${3:-3} processes=${4:-2}
steps=${STEPS:-} prompts=${PROMPTS:-200}
mkdir -p "$2" && cd "$2"
head -n "$((prompts < 100 ? prompts : 100))" "$data/helpful-test.jsonl" > held-out.jsonl

train() { # NAME RECIPE EPOCHS SETTINGS...: train in NAME-run and export to NAME, once
    name=$1 recipe=$2 length=epochs=$3
    shift 3
    [ -z "$steps" ] || length=steps=$steps
    [ -d "$name" ] && return
    dstrain train "$recipe" "$@" --set "$length" --run-dir "$name-run" --num-gpus "$processes"
    dstrain export "$name-run" --step last --to "$name"
}

# 1. A policy, from scratch on the chosen answers.
train sft "$here/hh-sft.yaml" 2 --set data.train="$data/helpful-train.jsonl" --set data.eval=held-out.jsonl

# 2. Reward models of two objectives. A pair of hh-rlhf says which answer is more helpful, or which is less harmful: 1 and
#    0 for that objective, and no label for the other. `rm` scores the answers that are trained on; `judge`, which
#    compares the policies in the end, has learnt from the other half of the pairs: its errors are not those of `rm`.
label() { # OBJECTIVE FILE
    sed "s/^{/{\"chosen_$1\": 1, \"rejected_$1\": 0, /" "$2"
}
{ label helpful "$data/helpful-train.jsonl" && label harmless "$data/harmless-train.jsonl"; } > labelled.jsonl
{ label helpful "$data/helpful-test.jsonl" && label harmless "$data/harmless-test.jsonl"; } | awk 'NR % 5 == 0' \
    > labelled-held-out.jsonl
awk 'NR % 2 == 1' labelled.jsonl > labelled-rm.jsonl
awk 'NR % 2 == 0' labelled.jsonl > labelled-judge.jsonl
for model in rm judge; do
    train "$model" "$here/hh-rm.yaml" 1 --set model.path=sft --set options='{objectives: [helpful, harmless]}' \
        --set data.train="labelled-$model.jsonl" --set data.eval=labelled-held-out.jsonl --set eval.every=epoch
done

# 3. Rounds of DPO on the policy's own answers, to other prompts in each round: the best of four answers against the worst.
#    The evaluation after the last step generates answers to the held-out prompts; `reward` is what `rm` gives them, and
#    `win_rate` how often it prefers one to the answer of the data.
answers="--max-new-tokens 48 --num-samples 4 --temperature 1 --batch 32 --json"
policy=sft round=1
while [ "$round" -le "$rounds" ]; do
    if [ ! -d "policy-$round" ]; then
        sed -n "$((round * prompts - prompts + 1)),$((round * prompts))p" "$data/helpful-train.jsonl" > prompts.jsonl
        # shellcheck disable=SC2086  # $answers is a list of words
        dstrain generate "$policy" --data prompts.jsonl $answers --seed "$round" --num-gpus "$processes" > answers.jsonl
        dstrain score rm --data answers.jsonl --out "scored-$round.jsonl" --num-gpus 1
        dstrain pairs "scored-$round.jsonl" --to "pairs-$round.jsonl"
    fi
    train "policy-$round" "$here/hh-dpo.yaml" 2 --set model.path="$policy" --set data.train="pairs-$round.jsonl" \
        --set data.eval=held-out.jsonl --set eval.every=1000 --set eval.generate='{max_new_tokens: 48, reward_model: rm}'
    policy=policy-$round round=$((round + 1))
done

# 4. A student with half of the parameters learns the last policy's probabilities of the tokens of the chosen answers.
train student "$here/hh-sft.yaml" 2 --task distill --set options="{teacher: $policy, top_k: 16}" \
    --set model.config.hidden_size=96 --set model.config.intermediate_size=264 --set model.config.num_hidden_layers=2 \
    --set model.tokenizer="$policy" --set data.train="$data/helpful-train.jsonl" --set data.eval=held-out.jsonl

# 5. What both reward models say of the answers to the held-out prompts, and how often they prefer them.
for model in sft "$policy" student; do
    for judge in rm judge; do
        echo "$model by $judge"
        dstrain evaluate "$model" --data held-out.jsonl --num-gpus 1 \
            --set eval.generate="{max_new_tokens: 48, reward_model: $judge}"
    done
done
