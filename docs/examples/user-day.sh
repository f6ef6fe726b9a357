#!/bin/sh
# A day of a user, first with text, then with images: look at the data, train adapters, talk with them, train them on with
# preferences, score answers, export with a model card, and load the result without dstrain. Models far too small to be
# of use, from scratch in place of a published one; minutes on a CPU.
#   user-day.sh DATA OUT [PROCESSES]
# DATA holds hh/ (helpful-train.jsonl, helpful-test.jsonl: {"chosen", "rejected"} dialogs) and mm/ (easyvqa/,
# emoji_captions/); OUT is made. STEPS=2 user-day.sh ... tries each command once.
set -eu
data=$(cd "$1" && pwd) here=$(cd "$(dirname "$0")" && pwd) processes=${3:-2} steps=${STEPS:-60}
mkdir -p "$2" && cd "$2"
pairs=$data/hh/helpful-train.jsonl held_out=$PWD/held-out.jsonl
head -n 64 "$data/hh/helpful-test.jsonl" > held-out.jsonl
run="--num-gpus $processes --set steps=$steps --set batch.total=16 --set batch.micro=8"

# shellcheck disable=SC2086  # $run is a list of words
train() { # NAME ARGUMENTS...: train and export
    name=$1
    shift
    dstrain train "$@" $run --run-dir "$name-run"
    dstrain export "$name-run" --step last --to "$name"
}

# 0. The base model; yours comes from the Hub.
train base "$here/hh-sft.yaml" --set data.train="$pairs" --set data.eval=null --set model.chat_template=human_assistant

# 1. The records as the model sees them, what it learns between the marks.
dstrain data show "$held_out" --task sft --set model.path=base --set data.max_length=256 --limit 2

# 2. Adapters on the chosen answers, then a word with them beside the base.
train sft --task sft --set model.path=base --set 'model.lora={rank: 8}' --set data.train="$pairs" \
    --set data.eval="$held_out" --set data.max_length=256 --set optim.lr=1e-3
printf '%s\n' 'How do I bake bread?' '/reset' 'What is a lamp?' | dstrain chat sft base --max-new-tokens 24

# 3. The same adapters trained on with preferences; the reference is the adapter as it was.
train dpo --task dpo --set model.path=sft --set 'model.lora={create_new_adapter: false}' --set data.train="$pairs" \
    --set data.eval="$held_out" --set data.max_length=256 --set optim.lr=5e-4

# 4. A reward model scores the answers of both.
train rm "$here/hh-rm.yaml" --set model.path=base --set data.train="$pairs" --set data.eval="$held_out"

head -n 8 "$held_out" > prompts.jsonl
for policy in sft dpo; do
    dstrain generate "$policy" --data prompts.jsonl --max-new-tokens 24 --temperature 1 --json > "answers-$policy.jsonl"
    # A policy as small as this one gives empty answers too.
    dstrain score rm --data "answers-$policy.jsonl" --out "scores-$policy.jsonl" --set data.on_error=skip
done

# 5. To publish: one model, with its card. --push-to-hub OWNER/NAME uploads it; --dry-run lists what it would upload.
dstrain export dpo-run --step last --merge-lora --to policy --push-to-hub someone/policy --dry-run
dstrain export dpo-run --step last --merge-lora --to policy
sed -n '1,/^---$/p' policy/README.md

# 6. transformers and peft alone load both forms, which are the same model.
python3 - << 'PYTHON'
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("policy")
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "dpo")
text = tokenizer.apply_chat_template([{"role": "user", "content": "How do I bake bread?"}], tokenize=False, add_generation_prompt=True)
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
logits = [model.eval()(ids).logits for model in (adapted, AutoModelForCausalLM.from_pretrained("policy"))]
torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
print("adapter and merged model agree; dstrain was", "imported" if "dstrain" in sys.modules else "not imported")
PYTHON

# 7. The same with images: captions from scratch in place of a published LLaVA, then adapters for questions.
vision="{model_type: clip_vision_model, image_size: 32, patch_size: 8, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, projection_dim: 64}"
text="{model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 2048}"
train captions --task vlm --set data.train="$data/mm/emoji_captions/train.jsonl" --set data.max_length=128 \
    --set model.config="{model_type: llava, vision_feature_select_strategy: default, vision_feature_layer: -1, text_config: $text, vision_config: $vision}" \
    --set 'model.tokenizer={train: bpe, vocab_size: 511}' --set model.chat_template=human_assistant \
    --set 'model.freeze=["*.post_layernorm"]' --set optim.lr=2e-3
questions=$data/mm/easyvqa
dstrain data show "$questions/test.jsonl" --task vlm --set model.path=captions --set data.max_length=128 --limit 2
train answers --task vlm --set model.path=captions --set 'model.lora={rank: 8}' --set data.train="$questions/train.jsonl" \
    --set data.eval_fraction=0.01 --set data.max_length=128 --set optim.lr=1e-3
printf '%s\n' "/image $questions/images/test_0.png" 'what color is the shape?' | dstrain chat answers --max-new-tokens 8
