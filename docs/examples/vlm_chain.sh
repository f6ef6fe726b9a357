#!/bin/sh
# Captions, then questions about images, then a reward model and DPO on pairs about images: each stage begins with the
# folder that the one before has exported. Minutes on a CPU, with a model far too small to be of use.
#   vlm_chain.sh DATA [PRESET] [OUT] [PROCESSES]
# DATA holds emoji_captions/ ({"image", "caption"}), easyvqa/ ({"image", "question", "answer"}) and mathv/ ({"image",
# "prompt" with <image1> in it, "chosen", "rejected"}); OUT is made.
set -eu
data=$(cd "$1" && pwd) preset=${2:-zero2} out=${3:-vlm-chain} processes=${4:-2}
mkdir -p "$out" && cd "$out"
on="--ds-config $preset --num-gpus $processes"
pairs=$data/mathv

# 1. Captions. A LLaVA from scratch, so all of it learns; with a trained tower and language model it would be the
#    projector alone (`dstrain recipes vlm-pretrain`). Its tokenizer knows every byte: the later stages have other texts.
cat > captions.yaml << YAML
task: vlm
model:
  config:
    model_type: llava
    vision_feature_select_strategy: default
    vision_feature_layer: -1
    text_config: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
                  num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 2048}
    vision_config: {model_type: clip_vision_model, image_size: 32, patch_size: 8, hidden_size: 64,
                    intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, projection_dim: 64}
  tokenizer: {train: bpe, vocab_size: 511}   # and <image>
  chat_template: human_assistant             # goes with the exports
  freeze: ["*.post_layernorm"]               # a LLaVA does not look at it
  gradient_checkpointing: false
data: {train: $data/emoji_captions/train.jsonl, eval: $data/emoji_captions/test.jsonl, max_length: 128}
batch: {total: 32, micro: 16}
optim: {lr: 2.0e-3, warmup: 0.1}
steps: 50
eval: {every: 50}
YAML

# 2. Questions, the four about an image as one dialog; the tower stays what it is.
cat > answers.yaml << YAML
task: vlm
options: {group_by_image: true}
model: {path: captions-model, freeze: [vision], gradient_checkpointing: false}
data: {train: $data/easyvqa/train.jsonl, eval: $data/easyvqa/test.jsonl, max_length: 512}
batch: {total: 32, micro: 16}
optim: {lr: 3.0e-3, warmup: 0.1}
steps: 60
eval: {every: 60, metric: exact_match, best: max}
YAML

# 3. Of two answers about an image the right one shall score higher. Both hold the image, which no cut may take away:
#    pairs that are too long for data.max_length are skipped, and counted.
cat > judge.yaml << YAML
task: rm
options: {center_rewards_coefficient: 0.01}
model: {path: answers-model, freeze: ["*.post_layernorm"], gradient_checkpointing: false}
data: {train: $pairs/preferences-train.jsonl, eval: $pairs/preferences-test.jsonl, max_length: 1024, on_error: skip}
batch: {total: 16, micro: 4}
optim: {lr: 5.0e-4, warmup: 0.1}
steps: 20
eval: {every: 20, metric: accuracy, best: max}
YAML

# 4. The policy learns from the same pairs. What its reference says is asked once, by `dstrain prepare`.
cat > policy.yaml << YAML
task: dpo
options: {beta: 0.1, precompute_ref_log_probs: true}
model: {path: answers-model, freeze: ["*.post_layernorm"], gradient_checkpointing: false}
data: {train: $pairs/preferences-train.jsonl, eval: $pairs/preferences-test.jsonl, max_length: 1024, on_error: skip}
batch: {total: 16, micro: 4}
optim: {lr: 1.0e-4, warmup: 0.1}
steps: 20
log: {every: 1}
eval: {every: 20}
YAML

stage() { # NAME: trains NAME.yaml and exports its last step
    # shellcheck disable=SC2086  # $on is a list of words
    dstrain train "$1.yaml" $on --run-dir "$1"
    dstrain export "$1" --step last --to "$1-model"
}

stage captions
stage answers
stage judge
# shellcheck disable=SC2086
dstrain prepare policy.yaml $on
stage policy

# The reward model: the run and its export give the same, and Python reads the export with a line.
dstrain evaluate judge --step last --data "$pairs/preferences-test.jsonl" --json > judge-run.json
dstrain evaluate judge-model --data "$pairs/preferences-test.jsonl" --json > judge-export.json
cat judge-run.json judge-export.json
python3 - "$pairs" << 'PYTHON'
import json
import sys
from pathlib import Path

from PIL import Image
from transformers import AutoProcessor

import dstrain

pairs = Path(sys.argv[1])
model, processor = dstrain.load_reward_model("judge-model"), AutoProcessor.from_pretrained("judge-model")
record = json.loads((pairs / "preferences-test.jsonl").read_text(encoding="utf-8").splitlines()[0])
before, after = (part.strip("\n") for part in record["prompt"].split("<image1>"))
asked = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
for name in ("chosen", "rejected"):
    said = [{"type": "text", "text": record[name]}]
    dialog = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    text = processor.apply_chat_template(dialog)
    inputs = processor(text=text, images=Image.open(pairs / record["image"]).convert("RGB"), return_tensors="pt")
    print(f"score of the {name} answer: {model(**inputs).logits.item():.6f}")
PYTHON

# The policy answers: a question about an image, and the first records of a file.
image=$(find "$data/easyvqa/images" -name 'test_0.png')
dstrain generate policy-model --image "$image" --prompt "what color is the shape?" --max-new-tokens 16
dstrain generate policy-model --data "$pairs/preferences-test.jsonl" --set data.max_samples=2 --max-new-tokens 16
